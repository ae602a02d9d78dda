"""What is wrapped of Keras and TensorFlow is there, or a sentence says which versions have it."""

import keras
import pytest

from toolkit.errors import RequestError
from toolkit.support.wrapping import attach, wrap


class Owner:
    def method(self):
        return 1


def test_each_of_us_wraps_once():
    def more(original, *args):
        return original(*args) + 1

    def most(original, *args):
        return original(*args) * 10

    for around in (more, most, more):
        wrap(Owner, "method", around)
    assert Owner().method() == 20


def test_a_method_that_is_replaced_in_its_class_later_is_called():
    class Edited:
        def method(self, *, name):
            return f"{name} as it was"

    edited = Edited()
    attach(edited, method=lambda original, self, **named: f"around {original(self, **named)}")
    assert edited.method(name="method") == "around method as it was"
    Edited.method = lambda _, *, name: f"{name} as it is now"
    assert edited.method(name="method") == "around method as it is now"


def test_what_is_gone_upstream_is_named_before_anything_trains():
    with pytest.raises(RequestError, match=r"Optimizer._no_such of keras 3\.\d+.* is needed.*3\.12 to 3\.15"):
        wrap(keras.optimizers.Optimizer, "_no_such", lambda original: original)
