"""What is taken over of Keras and TensorFlow stands in one table, and an upgrade that changes it ends in a sentence."""

import ast
import inspect
import pathlib
import re

import keras
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import RequestError
from toolkit.strategies import multi_worker
from toolkit.strategies.upstream import private, replaced, table
from toolkit.strategies.upstream.table import Row
from toolkit.strategies.upstream.wrapping import Replaced

pytestmark = pytest.mark.versions
TESTS = pathlib.Path(__file__).resolve().parents[2]
ROOM = TESTS.parent / "toolkit" / "strategies" / "upstream"
# Classes of which a model, an optimizer or a metric may have methods of its own.
DOCUMENTED = (
    keras.Model,
    keras.Metric,
    keras.callbacks.Callback,
    keras.optimizers.Optimizer,
    keras.optimizers.LossScaleOptimizer,
    tf.distribute.ReplicaContext,
)


def test_what_is_installed_is_as_the_table_says():
    table.check.__wrapped__()


def test_the_table_has_all_that_is_replaced_for_the_process_and_each_once():
    names = [name for each in vars(replaced).values() if isinstance(each, Replaced) for name in each.names]
    assert sorted(names) == sorted(row.name for row in table.rows("wrapped"))


def test_every_name_of_the_table_means_one_thing():
    names = [row.name for row in table.rows()]
    assert len(names) == len(set(names))


FROM_PRIVATE = re.compile(r"^\s*(from|import) (keras\.src|tensorflow\.python)", re.MULTILINE)


def test_only_this_room_imports_what_is_private():
    """And it does so by the table alone."""
    assert [path for path in (TESTS.parent / "toolkit").rglob("*.py") if FROM_PRIVATE.search(path.read_text())] == []
    assert "import_module" in (ROOM / "table.py").read_text()


def private_names():
    """The names that the toolkit takes from `private`."""
    for path in (TESTS.parent / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "private":
                yield node.attr


def test_each_row_of_what_is_imported_is_used():
    assert set(private_names()) == {row.name for row in table.rows("imported")}


def test_a_private_name_without_a_row_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"table\.csv has no row for no_such"):
        private.no_such  # noqa: B018


def test_what_has_moved_is_found_at_either_place(monkeypatch):
    places = ("keras.src.models.model:Model", "keras.src.there_was_none:Model")
    for now, before in (places, places[::-1]):
        assert table.find(Row("imported", now, before)) is keras.Model


def test_a_release_that_lacks_a_private_name_ends_in_the_tables_sentence(monkeypatch):
    gone = Row("imported", "keras.src.gone:thing", "keras.src.gone_before:thing")
    monkeypatch.setattr(table, "rows", lambda *_: (gone,))
    monkeypatch.setattr(table, "row", lambda _: gone)
    with pytest.raises(RequestError, match=r"thing of keras 3\.\d+.* is needed, but that version has none"):
        private.thing  # noqa: B018


def hooks():
    """The names that `attach` and `instead` replace anywhere in the toolkit, as far as they are written out."""
    for path in (TESTS.parent / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("attach", "instead"):
                names = [*node.args[1:2], *(ast.Constant(each.arg) for each in node.keywords)]
                yield from (each.value for each in names if isinstance(each, ast.Constant) and each.value)


def test_every_hook_has_a_row_or_is_documented_by_keras():
    """A method that Keras documents needs no row: a release that changes it says so."""
    in_table = {row.name.rpartition(".")[2] for row in table.rows()}
    documented = {name for kind in DOCUMENTED for name in dir(kind) if not name.startswith("_")}
    found = set(hooks())
    assert len(found) > 15
    assert found - in_table - documented == set()
    kinds = {each.__name__ for kind in DOCUMENTED for each in kind.__mro__}
    parts = [(row.place, *row.name.split(".")[-2:]) for row in table.rows("attached")]
    assert [place for place, kind, name in parts if kind in kinds and name in documented] == [], "no row is needed"


@pytest.mark.parametrize("row", table.rows(), ids=lambda row: row.name)
def test_a_row_has_a_reason_and_a_test(row):
    assert row.why.endswith(".")
    assert (TESTS / row.test).exists()
    assert bool(row.upstream) == (row.kind == "wrapped")


def test_a_release_without_one_is_named():
    with pytest.raises(RequestError, match=r"Optimizer._no_such of keras 3\.\d+.* is needed.*has none.*3\.12"):
        _check(Row("called", "keras.src.optimizers.optimizer:Optimizer._no_such", takes="self"))


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
    row = table.row("Optimizer.apply")
    monkeypatch.setattr(table, "find", lambda _: with_parameters(takes))
    with pytest.raises(
        RequestError, match=r"Optimizer.apply of keras.*its parameters are \(self, .*and not \(self, grads, tr"
    ):
        _check(row)


@pytest.mark.parametrize("takes", ["self grads trainable_variables more=None **rest", "*args **kwargs"])
def test_what_works_all_the_same_is_taken(takes, monkeypatch):
    """The second is what somebody else has put around it."""
    monkeypatch.setattr(table, "find", lambda _: with_parameters(takes))
    _check(table.row("Optimizer.apply"))


@pytest.mark.parametrize("make", [lambda: strategies.create("mirrored"), lambda: multi_worker.enable_fit(None)])
def test_the_first_strategy_looks(make, monkeypatch):
    def refuse():
        raise RequestError(asked="the table was", found="looked at", remedy="")

    monkeypatch.setattr(table, "check", refuse)
    with pytest.raises(RequestError, match="looked at"):
        make()


def _check(row):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_rows", lambda: (row,))
        table.check.__wrapped__()
