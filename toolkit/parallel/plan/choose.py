"""The choice for each layer, with its reasons, and the fastest plan within some memory.

`choose` takes the setting as it is given. `choose_within` also chooses the number of shards, and what saves memory.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.errors import ModelError, StrategyError
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.step_cost import (
    REPLICATED,
    Choice,
    Link,
    Machine,
    Setting,
    Step,
    exchanges,
    exchanges_of,
    layer_memory,
    layer_seconds,
    memory_of,
    recomputed,
    step,
)
from toolkit.support import files

_FORMAT = 1  # The format of saved plans.
_WORTH = 1.01  # A plan that is slower by less than so much is as good, if it is plainer.
WAYS = ("planned", "replicated", "sharded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice for each layer.

    Attributes:
        layers: Their costs, in order.
        choices: How each layer is divided, by name.
        machine: The devices that it is made for.
        setting: The training that it is made for.
        step: The training step that it predicts.
    """

    layers: tuple[LayerCost, ...]
    choices: dict[str, Choice]
    machine: Machine
    setting: Setting
    step: Step

    @functools.cached_property
    def reasons(self) -> dict[str, str]:
        """A sentence for each layer, by name."""
        return {each.name: _reason(each, self.choices[each.name], self.machine, self.setting) for each in self.layers}

    @property
    def recomputed(self) -> frozenset[str]:
        """Layers that are recomputed as a whole in the backward pass, with the layers in them, by name."""
        return recomputed(self.layers, self.choices, self.setting)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Layers whose operations couldn't be counted and count as zero."""
        return tuple(c.name for c in self.layers if c.operations is None and c.name not in self.machine.seconds)

    def __str__(self) -> str:
        """Prints the choice for each layer as a table, and the time of a step."""
        rows = [("layer", "choice", "received", "memory")]
        for layer in self.layers:
            memory = layer_memory(layer, self.choices[layer.name], self.setting)
            sizes = (size_in_words(self.received(layer)), size_in_words(memory))
            rows.append((layer.name, str(self.choices[layer.name]), *sizes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:{widths[0]}}  {choice:{widths[1]}}  {received:>{widths[2]}}  {memory:>{widths[3]}}"
            for name, choice, received, memory in rows
        ]
        takes, holds = milliseconds(self.step.seconds), size_in_words(self.step.memory)
        total = f"{takes} ms a step, {holds} of each replica's memory"
        return "\n".join([*lines, f"{total}; {self.setting.replicas} replicas, {self.machine.name}"])

    def save(self, path: str | os.PathLike) -> None:
        """Writes it as JSON, for `load`.

        Raises:
            OSError: It can't be written.
        """
        choices = {name: dataclasses.asdict(choice) for name, choice in self.choices.items()}
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("machine", "setting")}
        layers = [dataclasses.asdict(layer) for layer in self.layers]
        files.write_json(pathlib.Path(path), {"toolkit_plan": _FORMAT, "layers": layers, "choices": choices, **parts})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Returns a plan that `save`, or `toolkit plan --save`, has written.

        Raises:
            ModelError: It can't be read, or is no such plan.
        """
        try:
            held = json.loads(files.read_text(pathlib.Path(path)))
            if held["toolkit_plan"] != _FORMAT:
                raise ValueError(f"it has format {held['toolkit_plan']}, and this version reads {_FORMAT}")
            layers = tuple(
                LayerCost(**{**layer, "shapes": tuple(map(tuple, layer["shapes"]))}) for layer in held["layers"]
            )
            choices = {name: Choice(**choice) for name, choice in held["choices"].items()}
            machine = {**held["machine"], "memory": held["machine"]["memory"] or math.inf}
            links: dict[str, Any] = {
                name: Link(**link) for name in ("inside", "between") if (link := machine.pop(name))
            }
            setting = Setting(**held["setting"])
            made = Machine(**machine, **links)
            return cls(
                layers=layers, choices=choices, machine=made, setting=setting, step=step(layers, choices, made, setting)
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                asked=f"the plan in {os.fspath(path)}",
                found=f"it can't be read ({getattr(error, 'strerror', None) or error})",
                remedy="Name a file that `toolkit plan --save` has written",
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values: seconds, bytes, operations."""
        return {
            "machine": self.machine.name,
            "replicas": self.setting.replicas,
            "hosts": self.machine.hosts,
            "global_batch": self.setting.global_batch,
            "per_replica_batch": self.setting.per_replica_batch,
            "shards": self.setting.group,
            "optimizer_state": self.setting.optimizer_state,
            "weights": self.setting.weights,
            "micro_steps": self.setting.micro_steps,
            "recomputed": sorted(self.recomputed),
            "memory": memory_of(self.layers, self.choices, self.setting),
            "step": {**dataclasses.asdict(self.step), "seconds": self.step.seconds},
            "unknown": list(self.unknown),
            "layers": [
                {
                    **dataclasses.asdict(layer),
                    "choice": str(self.choices[layer.name]),
                    "received": self.received(layer),
                    "memory": layer_memory(layer, self.choices[layer.name], self.setting),
                    "reason": self.reasons[layer.name],
                }
                for layer in self.layers
            ],
        }

    def received(self, layer: LayerCost) -> float:
        """Returns the bytes that a replica receives in a step for a layer."""
        return _received(layer, self.choices[layer.name], self.setting)


def choose(
    layers: Sequence[LayerCost], machine: Machine, setting: Setting, *, conv: str = "planned", fc: str = "planned"
) -> Plan:
    """Chooses for each layer the way that makes a training step shortest.

    A sharded `Dense` that feeds another through elementwise layers only may leave its output split for that one.

    Args:
        layers: As `costs` returns them.
        machine: The devices on which the model is to train, and the network between them.
        setting: How many replicas there are, and their batch.
        conv: "planned", or "replicated" or "sharded" for all convolutions that can be.
        fc: The same for all other layers: `Dense`, attention and tables.

    Raises:
        StrategyError: conv or fc has an unknown value, or the setting's shards don't divide its replicas.
    """
    if setting.replicas % setting.group:
        raise StrategyError(
            asked=f"{setting.group} shards of {setting.replicas} replicas",
            found="the replicas can't be divided into groups of that size",
            remedy="Give a number that divides the replicas",
        )
    for name, way in (("conv", conv), ("fc", fc)):
        StrategyError.check_choice(way, WAYS, asked=f"{name}={way!r}", found="layers can't be divided in that way")
    choices: dict[str, Choice] = {}
    for chain in _chains(layers):
        choices.update(_cheapest(chain, machine, setting, conv=conv, fc=fc))
    total = step(layers, choices, machine, setting)
    # Gradients can be exchanged during computation, so replicating all free layers may be faster.
    fixed = {layer.name: choices[layer.name] for layer in layers if _way(layer, conv, fc) != "planned"}
    other = {**dict.fromkeys(choices, REPLICATED), **fixed}
    if (instead := step(layers, other, machine, setting)).seconds < total.seconds:
        choices, total = other, instead
    return Plan(layers=tuple(layers), choices=choices, machine=machine, setting=setting, step=total)


def _way(layer: LayerCost, conv: str, fc: str) -> str:
    if not layer.splits:
        return "replicated"
    return conv if layer.kind in ("Conv2D", "ShardedConv2D") else fc


def _chains(layers: Sequence[LayerCost]) -> Iterator[list[LayerCost]]:
    """Yields lists of layers, each of which can take the sharded output of the one before; most have one layer."""
    after = {layer.takes_split_from: layer for layer in layers if layer.takes_split_from}
    for layer in layers:
        if layer.takes_split_from is None:
            chain = [layer]
            while chain[-1].name in after:
                chain.append(after[chain[-1].name])
            yield chain


def _cheapest(
    chain: Sequence[LayerCost], machine: Machine, setting: Setting, *, conv: str, fc: str
) -> dict[str, Choice]:
    """Returns the fastest choices for such a list."""
    # By whether the output so far is sharded: the seconds, and the choices that led there.
    best: dict[bool, tuple[float, dict[str, Choice]]] = {False: (0.0, {})}
    for number, layer in enumerate(chain):
        found: dict[bool, tuple[float, dict[str, Choice]]] = {}
        for choice in _possible(layer, setting.group, _way(layer, conv, fc), last=number == len(chain) - 1):
            if choice.comes_split not in best:
                continue
            before, choices = best[choice.comes_split]
            seconds = before + layer_seconds(layer, choice, machine, setting)
            if choice.keep_split not in found or seconds < found[choice.keep_split][0]:
                found[choice.keep_split] = seconds, {**choices, layer.name: choice}
        best = found
    return best[False][1]


def _possible(layer: LayerCost, group: int, way: str, *, last: bool) -> list[Choice]:
    sharded = []
    for split, size in layer.splits.items():
        if not 1 < group <= size or (split == "heads" and size % group):
            continue
        sharded.append(Choice(split=split))
        if split == "outputs" and layer.elementwise and not last:
            sharded.append(Choice(split="outputs", keep_split=True))
    if way == "replicated":
        return [REPLICATED]
    found = sharded if way == "sharded" and sharded else [REPLICATED, *sharded]
    # If an output stays sharded, the next layer must take it so.
    return [*found, Choice(split="inputs", comes_split=True)] if layer.takes_split_from else found


def _received(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    return sum(exchange.received for exchange in exchanges(layer, choice, setting))


def _reason(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> str:
    counted = layer.operations is not None or layer.name in machine.seconds
    unknown = "" if counted else f"{layer.note}, so its time counts as 0; " if layer.note else ""
    replicated = _exchanges_in_words(layer, REPLICATED, machine, setting)
    if choice.split is not None:
        sharded = _exchanges_in_words(layer, choice, machine, setting)
        return f"{unknown}exchanges {sharded} instead of {replicated}{_gain(layer, choice, machine, setting)}"
    if not layer.parameters:
        return unknown.rstrip("; ") or "nothing to exchange"
    if setting.replicas == 1:
        return f"{unknown}there is one replica"
    if not layer.splits:
        return unknown.rstrip("; ") or layer.note
    possible = [c for c in _possible(layer, setting.group, "sharded", last=True) if not c.comes_split]
    if possible == [REPLICATED]:
        split, size = next(iter(layer.splits.items()))
        what = {"outputs": "units", "inputs": "inputs"}.get(split, split)
        cannot = "outnumber" if setting.group > size else "can't share"
        return f"{unknown}{setting.group:,} replicas {cannot} its {size:,} {what}"
    other = min(possible, key=lambda other: _received(layer, other, setting))
    least = _received(layer, other, setting)
    sharded = _exchanges_in_words(layer, other, machine, setting)
    words = f"exchanges {replicated}; sharded, it would exchange {sharded}"
    slower = all(
        layer_seconds(layer, choice, machine, setting) <= layer_seconds(layer, other, machine, setting)
        for other in possible
    )
    in_rounds = slower and least < _received(layer, REPLICATED, setting)
    return unknown + words + (" in more rounds" if in_rounds else "")


def _exchanges_in_words(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> str:
    several = machine.hosts > 1
    return " and ".join(
        f"{size_in_words(received)} of {kind}"
        + f"{several * (' between hosts' if among_hosts else ' within a host')} ({milliseconds(seconds)} ms)"
        for (kind, among_hosts), (received, seconds) in sorted(exchanges_of(layer, choice, machine, setting).items())
    )


def _gain(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> str:
    """Why a layer is sharded although the exchange takes longer: its optimizer has fewer weights to update."""
    exchanging, otherwise = (
        sum(seconds for _, seconds in exchanges_of(layer, each, machine, setting).values())
        for each in (choice, REPLICATED)
    )
    saved = layer_seconds(layer, REPLICATED, machine, setting) - layer_seconds(layer, choice, machine, setting)
    if exchanging <= otherwise or saved <= 0:
        return ""
    return f", and is {milliseconds(saved)} ms faster in all: each replica updates 1/{setting.group} of the weights"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds; what would be 0.0 is "<0.1"."""
    return "<0.1" if 0 < seconds < 0.00005 else f"{1e3 * seconds:,.1f}"


def size_in_words(size: float) -> str:
    """Returns a number of bytes in words, such as "6.29 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def choose_within(
    layers: Sequence[LayerCost],
    machine: Machine,
    setting: Setting,
    *,
    memory: float = math.inf,
    conv: str = "planned",
    fc: str = "planned",
) -> Plan:
    """Returns the fastest plan that fits into a replica's memory, or a plainer one; if none fits, the smallest.

    The returned plan's setting has the number of shards, what is done with the optimizer's state, into how many
    micro-steps a batch is divided (`gradient_accumulation_steps` of Keras's optimizers), and whether activations are
    computed again. A number of shards, and more than one micro-step, stay where they are given. Nothing is given up for
    memory that isn't asked for: without a limit only the shards are chosen. With one, sharded state and recomputation
    are chosen where the plan needs them, whether they were given or not: a means that makes a step faster by less than
    a hundredth isn't worth its name. So asking for more means never gives a plan that is slower by more than that.

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
    enough = _WORTH * min(plan.step.seconds for plan in fitting)
    return next(plan for plan in fitting if plan.step.seconds <= enough)  # The plainest.


def _settings(setting: Setting, *, saving: bool) -> Iterator[Setting]:
    """Yields plans with each number of shards and, if memory must be saved, with what saves it; the plainest first."""
    replicas = setting.replicas
    shards: list[int | None] = [n for n in range(replicas, 1, -1) if replicas % n == 0]
    if setting.shards or not shards:
        shards = [setting.shards]
    steps, states = [setting.micro_steps], [(setting.optimizer_state, setting.weights)]
    if saving and steps == [1]:
        steps = [
            1 << n
            for n in range(int(setting.per_replica_batch).bit_length())
            if setting.per_replica_batch % (1 << n) == 0
        ] or [1]
    if saving and replicas > 1:
        # Weights in shards bring their slots along. What was asked for stays.
        states = [("replicated", "replicated"), ("sharded", "replicated"), ("replicated", "sharded")]
        states = [each for each in states if setting.weights in ("replicated", each[1])]
    again = [False, True] if saving else [setting.recompute]
    for count, parts, (state, weights), recompute in itertools.product(steps, shards, states, again):
        yield dataclasses.replace(
            setting, shards=parts, optimizer_state=state, weights=weights, micro_steps=count, recompute=recompute
        )
