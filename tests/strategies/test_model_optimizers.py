"""Which optimizers a model has."""

import keras
import pytest

from toolkit.strategies.variables import optimizers_of


class Trainer:
    """A helper of a user's own, as in scripts that keep an optimizer beside its schedule."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize("kept", [lambda each: each, lambda each: [each], lambda each: {"it": each}, Trainer])
def test_an_optimizer_is_found_wherever_a_model_keeps_it(kept):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.mine = kept(keras.optimizers.Adam())

    model = Own()
    model.compile("sgd")
    assert [type(each).__name__ for each in optimizers_of(model)] == ["SGD", "Adam"]
