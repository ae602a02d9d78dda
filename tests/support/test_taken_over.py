"""What is taken over of Keras and TensorFlow stands in one table, and an upgrade that changes it ends in a sentence."""

import ast
import inspect
import pathlib

import keras
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import RequestError
from toolkit.strategies import multi_worker
from toolkit.strategies.fit import adapt
from toolkit.strategies.parameter_servers import variables, worker_step
from toolkit.strategies.step import trial, view
from toolkit.support import taken_over, wrapping
from toolkit.support.taken_over import ADDED, ATTACHED, CALLED, MEANWHILE, WRAPPED, Taken

TESTS = pathlib.Path(__file__).resolve().parent.parent
# Classes of which a model, an optimizer or a metric may have methods of its own.
DOCUMENTED = (
    keras.Model,
    keras.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.LossScaleOptimizer,
    tf.distribute.ReplicaContext,
)
BY_PLACE = {row.place: row for row in (*WRAPPED, *ATTACHED, *CALLED)}


def owner_and_name(place):
    separator = "." if "." in place.partition(":")[2] else ":"
    owner, _, name = place.rpartition(separator)
    return taken_over.find(owner) if ":" in owner else __import__(owner, fromlist=["_"]), name


def test_what_is_installed_is_as_the_table_says():
    taken_over.check.__wrapped__()


def test_the_table_has_all_that_is_wrapped_and_nothing_else():
    strategies.create("mirrored")
    adapt.adapt_workers()
    trial.adapt_trials()
    view.adapt_draws()
    worker_step.adapt_optimizers()
    variables.adapt_lookups()
    mine = {(id(owner), name) for owner, name in wrapping.wrapped_here if "Owner" not in str(owner)}
    assert mine == {(id(owner), name) for owner, name in (owner_and_name(row.place) for row in (*WRAPPED, *ADDED))}


def hooks():
    """The names that `attach` and `instead` replace anywhere in the toolkit, as far as they are written out."""
    for path in (TESTS.parent / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("attach", "instead"):
                names = [*node.args[1:2], *(ast.Constant(each.arg) for each in node.keywords)]
                yield from (each.value for each in names if isinstance(each, ast.Constant) and each.value)


def test_every_hook_has_a_row_or_is_documented_by_keras():
    """A method that Keras documents needs no row: a release that changes it says so."""
    in_table = {row.place.rpartition(".")[2].rpartition(":")[2] for row in (*WRAPPED, *ADDED, *ATTACHED, *MEANWHILE)}
    documented = {name for kind in DOCUMENTED for name in dir(kind) if not name.startswith("_")}
    found = set(hooks())
    assert len(found) > 20
    assert found - in_table - documented == set()
    kinds = {each.__name__ for kind in DOCUMENTED for each in kind.__mro__}
    parts = [(row.place, *row.place.rpartition(":")[2].split(".")[-2:]) for row in ATTACHED]
    assert [place for place, kind, name in parts if kind in kinds and name in documented] == [], "no row is needed"


@pytest.mark.parametrize(
    "row", [*WRAPPED, *ADDED, *ATTACHED, *MEANWHILE, *CALLED], ids=lambda row: row.place.partition(":")[2]
)
def test_a_row_has_a_reason_and_a_test(row):
    assert row.why.endswith(".")
    assert (TESTS / row.test).exists()
    assert bool(row.upstream) == (row in WRAPPED)


def test_a_release_without_one_is_named():
    with pytest.raises(RequestError, match=r"Optimizer._no_such of keras 3\.\d+.* is needed.*has none.*3\.12"):
        _check(Taken("keras.src.optimizers.optimizer:Optimizer._no_such", "self", "", ""))


def with_parameters(takes):
    """A function that takes these: "a b=None *args"."""

    def function():
        return None

    kinds = {
        0: inspect.Parameter.POSITIONAL_OR_KEYWORD,
        1: inspect.Parameter.VAR_POSITIONAL,
        2: inspect.Parameter.VAR_KEYWORD,
    }
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name.strip("*").removesuffix("=None"),
                kinds[name.count("*")],
                default=None if name.endswith("=None") else inspect.Parameter.empty,
            )
            for name in takes.split()
        ]
    )
    return function


@pytest.mark.parametrize(
    "takes", ["self trainable_variables grads", "self grads", "self grads trainable_variables share"]
)
def test_a_release_with_other_parameters_is_named(takes, monkeypatch):
    row = BY_PLACE["keras.src.optimizers.optimizer:Optimizer.apply"]
    monkeypatch.setattr(taken_over, "find", lambda _: with_parameters(takes))
    with pytest.raises(
        RequestError, match=r"Optimizer.apply of keras.*its parameters are \(self, .*and not \(self, grads, tr"
    ):
        _check(row)


@pytest.mark.parametrize("takes", ["self grads trainable_variables more=None **rest", "*args **kwargs"])
def test_what_works_all_the_same_is_taken(takes, monkeypatch):
    """The second is what somebody else has put around it."""
    monkeypatch.setattr(taken_over, "find", lambda _: with_parameters(takes))
    _check(BY_PLACE["keras.src.optimizers.optimizer:Optimizer.apply"])


@pytest.mark.parametrize("make", [lambda: strategies.create("mirrored"), lambda: multi_worker.enable_fit(None)])
def test_the_first_strategy_looks(make, monkeypatch):
    def refuse():
        raise RequestError(asked="the table was", found="looked at", remedy="")

    monkeypatch.setattr(taken_over, "check", refuse)
    with pytest.raises(RequestError, match="looked at"):
        make()


def _check(row):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken_over, "WRAPPED", (row,))
        patch.setattr(taken_over, "ATTACHED", ())
        patch.setattr(taken_over, "MEANWHILE", ())
        patch.setattr(taken_over, "CALLED", ())
        taken_over.check.__wrapped__()
