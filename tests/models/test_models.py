import numpy as np
import pytest

from toolkit import models
from toolkit.errors import ModelError


def layers_of(model):
    for layer in model.layers:
        yield from layers_of(layer) if hasattr(layer, "layers") else [layer]


def multiplications(layer):
    """Multiply-adds for one picture in the forward pass, from the kernel's and the output's shape."""
    kernel = getattr(layer, "kernel", None)
    if kernel is None:
        return 0
    places = np.prod(layer.output.shape[1:-1], dtype=int) if len(kernel.shape) == 4 else 1
    return int(np.prod(kernel.shape)) * int(places)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_model_is_a_trunk_joined_to_a_head(name):
    model = models.build(name, classes=7)
    trunk, head = model.get_layer("trunk"), model.get_layer("head")
    logits = head(trunk(np.zeros((2, 32, 32, 3), np.uint8)))
    assert logits.shape == (2, 7)
    assert not any(len(layer.kernel.shape) == 4 for layer in layers_of(head) if hasattr(layer, "kernel"))
    assert trunk(np.zeros((2, 32, 32, 3), np.uint8)).shape[0] == 2
    assert model.count_params() == trunk.count_params() + head.count_params()


def test_alexnets_head_holds_the_parameters_and_its_trunk_does_the_arithmetic():
    model = models.build("alexnet")
    trunk, head = model.get_layer("trunk"), model.get_layer("head")
    work = {part.name: sum(map(multiplications, layers_of(part))) for part in (trunk, head)}
    assert head.count_params() / model.count_params() >= 0.90
    assert work["trunk"] / sum(work.values()) >= 0.80
    # By hand, multiply-adds: 27*64*32^2 + 576*192*16^2 + 1728*384*8^2 + 3456*256*8^2 + 2304*256*8^2.
    assert work["trunk"] == 1_769_472 + 28_311_552 + 42_467_328 + 56_623_104 + 37_748_736
    assert work["head"] == 4096 * 4096 * 2 + 4096 * 10


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("no_such_model", {}, "small_cnn, alexnet, vit"),
        ("alexnet", {"dropout": 1.0}, "Give 0"),
        ("small_cnn", {"dropout": -0.1}, "Give 0"),
    ],
)
def test_what_can_not_be_built(name, arguments, word):
    with pytest.raises(ModelError, match=word):
        models.build(name, **arguments)


def test_dropout_is_there_only_on_request():
    def dropouts(**arguments):
        return sum(type(layer).__name__ == "Dropout" for layer in layers_of(models.build("alexnet", **arguments)))

    assert dropouts() == 0
    assert dropouts(dropout=0.5) == 2
