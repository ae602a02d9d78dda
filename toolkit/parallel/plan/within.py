"""Finds the fastest way to train within a memory limit: sharded layers, the number of shards, and what saves memory."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from toolkit.parallel.plan.choose import Plan, choose
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.division import Setting
from toolkit.parallel.plan.machine import Machine

__all__ = ["choose_within"]


def choose_within(
    layers: Sequence[LayerCost],
    machine: Machine,
    setting: Setting,
    *,
    memory: float = math.inf,
    conv: str = "planned",
    fc: str = "planned",
) -> Plan:
    """Returns the fastest plan that fits into a replica's memory; if none fits, the smallest.

    The returned plan's setting has the number of shards, what is done with the optimizer's state, into how many
    micro-steps a batch is divided (`gradient_accumulation_steps` of Keras's optimizers), and whether activations are
    computed again. Where the given one says something of these, it stays: a number of shards, sharded state, more than
    one micro-step, recomputation. Nothing is given up for
    memory that isn't asked for: without a limit only the shards are chosen.

    Args:
        layers: As `costs` returns them.
        machine: The devices on which the model is to train, and the network between them.
        setting: How many replicas there are, and their batch.
        memory: Bytes of each replica.
        conv: As for `choose`; "planned" may become "sharded".
        fc: The same.
    """
    saving = memory < math.inf
    conv_ways, fc_ways = ([way, "sharded"] if way == "planned" and saving else [way] for way in (conv, fc))
    plans = [
        choose(layers, machine, each, conv=conv_way, fc=fc_way)
        for each in _settings(setting, saving=saving)
        for conv_way, fc_way in itertools.product(conv_ways, fc_ways)
    ]
    fitting = [plan for plan in plans if plan.step.memory <= memory]
    if not fitting:
        return min(plans, key=lambda plan: plan.step.memory)
    return min(fitting, key=lambda plan: plan.step.seconds)


def _settings(setting: Setting, *, saving: bool) -> Iterator[Setting]:
    """Yields plans with each number of shards and, if memory must be saved, with what saves it; the plainest first."""
    replicas = setting.replicas
    shards: list[int | None] = [n for n in range(replicas, 1, -1) if replicas % n == 0]
    if setting.shards or not shards:
        shards = [setting.shards]
    steps, states = [setting.micro_steps], [setting.optimizer_state]
    if saving and steps == [1]:
        steps = [
            1 << n
            for n in range(int(setting.per_replica_batch).bit_length())
            if setting.per_replica_batch % (1 << n) == 0
        ] or [1]
    if saving and replicas > 1 and states == ["replicated"]:
        states = ["replicated", "sharded"]
    again = [False, True] if saving and not setting.recompute else [setting.recompute]
    for count, parts, state, recompute in itertools.product(steps, shards, states, again):
        yield dataclasses.replace(setting, shards=parts, optimizer_state=state, micro_steps=count, recompute=recompute)
