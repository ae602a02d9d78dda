"""The choice for each layer: what it is, why, and what it is predicted to cost."""

import dataclasses
import itertools
import math
import os
import re
import time

import hypothesis
import keras
import pytest
from hypothesis import strategies as st

from toolkit import models
from toolkit.cli.plan_scaling import powers, scaling, verdict
from toolkit.errors import ModelError, StrategyError
from toolkit.parallel import Choice, Link, Machine, Plan, Setting, choose, choose_within, costs, slots_of
from toolkit.parallel.plan.step_cost import REPLICATED, exchanges, step

L = keras.layers
SLOW = Machine(name="slow network", speed=5e12, inside=Link(bandwidth=12e9), between=Link(bandwidth=125e6), hosts=2)


@pytest.fixture(scope="module")
def alexnet():
    return costs(models.build("alexnet"))


@pytest.fixture(scope="module")
def small():
    return costs(models.build("small_cnn"))


def chosen(plan):
    return {name: str(choice) for name, choice in plan.choices.items() if choice.split}


def test_over_a_slow_network_convolutions_are_replicated_and_fc_layers_sharded(alexnet):
    plan = choose(alexnet, SLOW, Setting(replicas=2, global_batch=128))
    assert chosen(plan) == {"head/fc1": "by outputs, kept", "head/fc2": "by inputs"}
    assert "instead of 67.1 MB of gradients" in plan.reasons["head/fc1"]
    assert "of gradients between hosts (18.9 ms); sharded, it would exchange" in plan.reasons["trunk/conv5"]


def test_where_examples_outweigh_weights_all_is_replicated(alexnet):
    assert chosen(choose(alexnet, SLOW, Setting(replicas=2, global_batch=16384))) == {}


@pytest.mark.parametrize(("replicas", "batch"), [(2, 1), (2, 64), (3, 16), (8, 4), (8, 256)])
def test_no_other_choice_is_predicted_to_be_faster(replicas, batch):
    kinds = [keras.Input((64,)), L.Dense(96, activation="relu", name="a"), L.Dropout(0.5)]
    layers = costs(keras.Sequential([*kinds, L.Dense(512, activation="relu", name="b"), L.Dense(10, name="c")]))
    setting = Setting(replicas=replicas, global_batch=batch * replicas)
    machine = dataclasses.replace(SLOW, hosts=replicas, between=Link(bandwidth=125e6, latency=1e-4))
    best = choose(layers, machine, setting).step.seconds
    kept, taken = Choice(split="outputs", keep_split=True), Choice(split="inputs", comes_split=True)
    alone = [REPLICATED, Choice(split="outputs"), Choice(split="inputs")]
    for a, b, c in itertools.product([*alone, kept], [*alone, kept, taken], [*alone, taken]):
        if (a.keep_split, b.keep_split) != (b.comes_split, c.comes_split):
            continue
        if (c.split == "outputs" and replicas > 10) or (b.comes_split and b.keep_split):
            continue
        assert step(layers, {"a": a, "b": b, "c": c}, machine, setting).seconds >= best * (1 - 1e-9)


def test_all_that_can_be_is_sharded_where_that_is_asked_for(alexnet):
    plan = choose(alexnet, SLOW, Setting(replicas=4, global_batch=64), conv="sharded", fc="sharded")
    assert {name.split("/")[1] for name in chosen(plan)} == {*(f"conv{n}" for n in range(1, 6)), "fc1", "fc2", "fc3"}
    plan = choose(alexnet, SLOW, Setting(replicas=4, global_batch=64), conv="replicated", fc="replicated")
    assert chosen(plan) == {}
    with pytest.raises(StrategyError, match="conv='all'"):
        choose(alexnet, SLOW, Setting(replicas=4, global_batch=64), conv="all")


def test_a_reason_says_over_which_link_and_why_more_bytes_win():
    """Within a host lies a fast link; and where both links are alike, an update of fewer weights decides."""
    (wide,) = costs(keras.Sequential([keras.Input((4096,)), L.Dense(4096, name="wide")]))
    machine = Machine(speed=1e15, inside=Link(bandwidth=1e12), between=Link(bandwidth=1e8), hosts=2)
    setting = Setting(replicas=4, global_batch=64, shards=2)
    reason = choose([wide], machine, setting).reasons["wide"]
    inside, between = r"\S+ kB of \w+ within a host \(.* ms\)", r"\S+ MB of gradients between hosts \(.* ms\)"
    assert re.fullmatch(f"exchanges {inside} and {between} instead of {between}", reason), reason
    near = Machine(speed=1e15, inside=Link(bandwidth=1e9), memory=1e9)
    reason = choose([wide], near, Setting(replicas=4, global_batch=4 * 2048)).reasons["wide"]
    assert "faster in all: each replica updates 1/4 of the weights" in reason, reason


def test_more_replicas_than_units_leave_a_layer_replicated_and_it_is_said():
    layers = costs(keras.Sequential([keras.Input((6,)), L.Dense(4, name="few")]))
    plan = choose(layers, SLOW, Setting(replicas=8, global_batch=8), fc="sharded")
    assert chosen(plan) == {}
    assert plan.reasons["few"] == "8 replicas outnumber its 4 units"


def test_bytes_of_the_docstrings(alexnet):
    fc1 = next(layer for layer in alexnet if layer.name == "head/fc1")

    def received(choice, replicas=4, **kwargs):
        return sum(
            e.received for e in exchanges(fc1, choice, Setting(replicas=replicas, global_batch=64 * replicas, **kwargs))
        )

    own, counted = 64 * 4096 * 4, 4 * 3
    assert received(REPLICATED) == 2 * 3 / 4 * (4096 * 4096 + 4096) * 4
    assert received(REPLICATED, gradient_dtype="float16") == received(REPLICATED) / 2
    compressed = received(REPLICATED, gradient_rank=4)  # The bias is sent as it is.
    assert compressed == 2 * 3 / 4 * (4 * (4096 + 4096) + 4096) * 4
    assert received(REPLICATED, gradient_rank=1024) == received(REPLICATED), "factors wouldn't be smaller"
    assert received(Choice(split="outputs")) == 2 * (3 * own + 3 / 4 * own) + counted
    assert received(Choice(split="outputs", keep_split=True)) == 2 * 3 * own + counted
    bias = 2 * 3 / 4 * 4096 * 4
    assert received(Choice(split="inputs", comes_split=True)) == 2 * 3 * own + bias
    assert received(Choice(split="inputs")) == 2 * (3 / 4 * own + 3 * own) + bias + counted
    assert received(Choice(split="outputs"), replicas=1) == 0


def test_compressed_gradients_keep_what_is_left(alexnet):
    whole, compressed = (
        choose(
            alexnet, SLOW, Setting(replicas=2, global_batch=128, gradient_rank=rank), conv="replicated", fc="replicated"
        )
        for rank in (None, 4)
    )
    assert compressed.step.received < whole.step.received / 50
    weights = 4 * sum(layer.parameters for layer in alexnet)
    assert compressed.step.memory - whole.step.memory == weights


def test_a_hosts_replicas_share_what_joins_hosts(alexnet):
    setting = Setting(replicas=8, global_batch=128)
    by = {
        hosts: choose(alexnet, dataclasses.replace(SLOW, hosts=hosts), setting, conv="replicated", fc="sharded").step
        for hosts in (1, 2, 8)
    }
    assert by[1].received == by[2].received == by[8].received
    # Each of 4 replicas gets from 4 others through one link, against each from 7 through its own.
    assert by[1].seconds < by[8].seconds < by[2].seconds


def test_memory_falls_where_layers_are_sharded(alexnet):
    setting = Setting(replicas=4, global_batch=64, slots=2)
    whole = choose(alexnet, SLOW, setting, conv="replicated", fc="replicated").step
    parts = choose(alexnet, SLOW, setting, conv="replicated", fc="sharded").step
    assert whole.parameters == sum(layer.parameters for layer in alexnet)
    assert whole.memory > whole.parameters * 4 * 4  # Weight, gradient, two of Adam's.
    assert parts.parameters < whole.parameters / 2
    assert parts.memory < whole.memory / 2


def test_thousands_of_replicas_are_simulated_in_seconds(alexnet):
    began = time.process_time()
    points = scaling(alexnet, SLOW, Setting(replicas=2, global_batch=128), powers(4096))
    assert time.process_time() - began < 5
    assert [point.replicas for point in points] == [1 << n for n in range(13)]
    assert points[-1].hosts == 4096
    assert points[0].speed_up == {"data": 1.0, "model": 1.0, "planned": 1.0}
    for point in points:
        assert point.plans["planned"].step.seconds <= point.plans["data"].step.seconds
        assert all(math.isfinite(plan.step.seconds) for plan in point.plans.values())
    assert powers(6) == [1, 2, 4, 6]


SIZES = st.sampled_from([0.15, 0.3, 0.5, 0.7, 0.9, 1.2, math.inf])  # Of what data-parallel training needs.


@st.composite
def asked(draw):
    """Devices and a network, what is trained on them, and how much memory each has."""
    hosts = draw(st.sampled_from([1, 2, 4]))
    replicas = hosts * draw(st.sampled_from([1, 2, 4]))
    link = Link(bandwidth=draw(st.sampled_from([1e8, 1e9, 1e10])), latency=5e-5)
    inside = Link(bandwidth=12e9, latency=1e-5)
    sharing = draw(st.sampled_from([1, -(-replicas // hosts)]))
    machine = Machine(speed=7e12, memory=9e11, inside=inside, between=link, hosts=hosts, fixed=1e-3, sharing=sharing)
    state = draw(st.sampled_from(["replicated", "sharded"]))
    setting = Setting(
        replicas=replicas, global_batch=64 * replicas, slots=draw(st.integers(0, 2)), optimizer_state=state
    )
    return machine, setting, draw(SIZES)


@pytest.mark.slow
@hypothesis.settings(max_examples=int(os.environ.get("TOOLKIT_FUZZ_CASES", "5")), deadline=None)
@hypothesis.given(asked())
def test_every_sentence_has_the_plans_own_figures_and_recommends_what_fits(small, given):
    machine, setting, size = given
    memory = size * choose(small, machine, setting, conv="replicated", fc="replicated").step.memory
    plan = choose_within(small, machine, setting, memory=memory)
    points = scaling(small, machine, setting, powers(setting.replicas), memory=memory, plan=plan)
    assert points[-1].plans["planned"] is plan
    one = points[0].plans["data"].step
    mine = f"{setting.replicas * one.seconds / plan.step.seconds:.2f}x"
    sentences = verdict(plan, setting, bandwidth="1Gbit", memory=memory)
    if setting.replicas == 1 or plan.step.memory > memory:
        assert sentences == [], "what doesn't fit isn't recommended"
        return
    assert mine in sentences[0]
    assert one.memory <= memory or "Train on one device" not in sentences[0]
    fewer = re.search("(Train|stay) on one", sentences[0])
    assert not (fewer and "Apply the plan" in sentences[-1])
    for point in points:
        planned = point.plans["planned"]
        if planned.step.memory > memory and machine.hosts > 1 and point.replicas == setting.replicas // machine.hosts:
            assert "stay on one host" not in sentences[0]
    # Who may do more to save memory gets no slower plan, but for what a plainer one is worth.
    free = dataclasses.replace(setting, optimizer_state="replicated")
    both = dataclasses.replace(setting, optimizer_state="sharded", recompute=True)
    if memory < math.inf:
        assert choose_within(small, machine, both, memory=memory).step == plan.step
        assert choose_within(small, machine, free, memory=memory).step == plan.step
    assert choose_within(small, machine, setting, memory=1.5 * memory).step.seconds <= 1.01 * plan.step.seconds


def test_what_saves_memory_is_no_part_of_a_plan_that_fits_without_it(alexnet):
    machine = dataclasses.replace(SLOW, hosts=2)
    setting = Setting(replicas=2, global_batch=128, slots=2)
    free = choose_within(alexnet, machine, setting)
    plan = choose_within(alexnet, machine, setting, memory=4 * free.step.memory)
    assert (plan.setting.optimizer_state, plan.setting.recompute, plan.step) == ("replicated", False, free.step)


def test_devices_that_share_cores_are_no_faster_together(alexnet):
    machine = dataclasses.replace(SLOW, hosts=1, sharing=2, inside=Link(bandwidth=math.inf))
    (point,) = scaling(alexnet, machine, Setting(replicas=2, global_batch=128), [2])
    assert point.speed_up["data"] == pytest.approx(1.0, rel=0.05)


def test_a_plan_is_kept_in_a_file_and_shown_as_a_table(alexnet, tmp_path):
    plan = choose(alexnet, SLOW, Setting(replicas=2, global_batch=128, slots=2))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.choices, loaded.setting, loaded.step) == (plan.choices, plan.setting, plan.step)
    assert loaded.as_dict() == plan.as_dict()
    head, *rows, total = str(plan).splitlines()
    assert head.split() == ["layer", "choice", "received", "memory"]
    assert len(rows) == len(plan.layers)
    assert "ms a step" in total
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "nowhere.json"):
        with pytest.raises(ModelError, match=f"the plan in .*{name}, but it can't be read"):
            Plan.load(tmp_path / name)


@pytest.mark.parametrize(("optimizer", "slots"), [("SGD", 0), ("RMSprop", 1), ("Adam", 2), ("Adafactor", 1)])
def test_what_an_optimizer_keeps_is_taken_from_it(optimizer, slots):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert slots_of(model) == 1, "not compiled"
    model.compile(getattr(keras.optimizers, optimizer)(), "mse")
    assert slots_of(model) == slots
    assert slots_of(keras.optimizers.LossScaleOptimizer(model.optimizer)) == slots
