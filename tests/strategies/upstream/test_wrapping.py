"""How a function of somebody else's is replaced: once for the process, for one object, or for the time of a call."""

import pytest

from toolkit.errors import RequestError
from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import table, wrapping
from toolkit.strategies.upstream.table import Row
from toolkit.strategies.upstream.wrapping import Replaced, attach, instead


@pytest.fixture
def owner(monkeypatch):
    """A class whose method the table names."""

    class Owner:
        def method(self, number):
            return number

    monkeypatch.setattr(table, "row", lambda name: Row("wrapped", f"owners:{name}"))
    monkeypatch.setattr(table, "owner_and_name", lambda row: (Owner, row.name.rpartition(".")[2]))
    monkeypatch.setattr(wrapping, "replaced_here", [])
    return Owner


def test_who_answers_follows_the_written_order_and_not_that_of_arrival(owner):
    replaced = Replaced("Owner.method", first="view", second="")
    assert owner().method(1) == 1
    replaced.answer(second=lambda further, self, number: further(self, number) * 10)
    replaced.answer(first=lambda further, self, number: further(self, number) + 1)
    assert owner().method(1) == 10
    with this_step.having(view="mine"):
        assert owner().method(1) == 11
    assert wrapping.replaced_here == [(owner, "method")]


def test_a_second_time_changes_nothing_and_only_those_that_are_listed_answer(owner):
    replaced = Replaced("Owner.method", anyone="")
    for _ in range(2):
        replaced.answer(anyone=lambda further, *args: further(*args) + 1)
    assert owner().method(1) == 2
    replaced.answer(other=lambda further, *args: further(*args) * 100)
    assert owner().method(1) == 2


def test_whoever_answers_may_leave_out_all_others(owner):
    replaced = Replaced("Owner.method", first="", second="")
    replaced.answer(first=lambda *arguments: arguments[-1], second=lambda *_: pytest.fail("it isn't its turn"))
    assert owner().method(7) == 7


def test_what_is_replaced_for_a_call_is_inherited_again_afterwards():
    class Base:
        def method(self):
            return "base"

    class Derived(Base):
        pass

    with instead(Derived, "method", lambda _: lambda *_: "meanwhile"):
        assert (Derived().method(), Base().method()) == ("meanwhile", "base")
    assert "method" not in vars(Derived)


def test_a_method_that_is_replaced_in_its_class_later_is_called():
    class Edited:
        def method(self, *, name):
            return f"{name} as it was"

    edited = Edited()
    attach(edited, method=lambda original, self, **named: f"around {original(self, **named)}")
    assert edited.method(name="method") == "around method as it was"
    Edited.method = lambda _, *, name: f"{name} as it is now"
    assert edited.method(name="method") == "around method as it is now"


def test_what_is_gone_upstream_is_named_before_anything_trains(monkeypatch):
    gone = Row("wrapped", "keras.src.optimizers.optimizer:Optimizer._no_such")
    monkeypatch.setattr(table, "row", lambda _: gone)
    with pytest.raises(RequestError, match=r"Optimizer._no_such of keras 3\.\d+.* is needed.*3\.12 to 3\.16"):
        Replaced("Optimizer._no_such", anyone="").answer(anyone=lambda *_: None)
