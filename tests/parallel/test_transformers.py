"""Attention, projections and tables whose heads, axes and rows are sharded: the numbers of Keras's own layers."""

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from toolkit import parallel, strategies
from toolkit.errors import StrategyError

RANDOM = np.random.default_rng(0)
WORDS, LENGTH, WIDTH = 23, 6, 8  # A vocabulary that neither 2 nor 4 divide.
TOKENS = RANDOM.integers(1, WORDS, size=(60, LENGTH)) * (
    np.arange(LENGTH) < RANDOM.integers(2, LENGTH + 1, size=(60, 1))
)
LABELS = RANDOM.integers(0, 3, size=60)
SERIES = RANDOM.normal(size=(60, LENGTH, WIDTH)).astype("float32")
OWN = {
    "attention": layers.MultiHeadAttention,
    "grouped": layers.GroupQueryAttention,
    "einsum": layers.EinsumDense,
    "embedding": layers.Embedding,
    "dense": layers.Dense,
}
SHARDED = {
    "attention": parallel.ShardedMultiHeadAttention,
    "grouped": parallel.ShardedGroupedQueryAttention,
    "einsum": parallel.ShardedEinsumDense,
    "embedding": parallel.ShardedEmbedding,
    "dense": parallel.ShardedDense,
}


@keras.saving.register_keras_serializable()
class Positions(layers.Layer):
    def __init__(self, sharded, **more):
        super().__init__(**more)
        self.sharded = sharded
        self.table = (parallel.ShardedEmbedding if sharded else layers.Embedding)(LENGTH, WIDTH)

    def build(self, _):
        self.table.build()

    def call(self, x):
        return x + self.table(ops.arange(ops.shape(x)[1]))

    def get_config(self):
        return {**super().get_config(), "sharded": self.sharded}


def text(kinds, sharded, *, split="columns", causal=False):
    """A transformer with masks, as Keras's example of text classification has it; a pair of Dense in the block."""
    more = {"split": split} if sharded else {}
    pair = ({"keep_split": True}, {"split": "inputs"}) if sharded else ({}, {})
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = kinds["embedding"](WORDS, WIDTH, mask_zero=True, **more)(tokens)
    x = layers.LayerNormalization()(x + kinds["attention"](4, 3, name="attend")(x, x, use_causal_mask=causal))
    x = x + kinds["dense"](8, **pair[1])(kinds["dense"](18, activation="gelu", **pair[0])(x))
    return tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x))


def series(kinds, sharded):
    """Grouped heads, and projections by equations, over real numbers and with a mask of its own."""
    given = keras.Input((LENGTH, WIDTH))
    x = Positions(sharded)(given)
    near = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)) < 3
    x = layers.LayerNormalization()(
        x + kinds["grouped"](3, 8, 4)(x, x, attention_mask=ops.convert_to_tensor(near[None]))
    )
    pair = ({"keep_split": True}, {"split": "inputs"}) if sharded else ({}, {})
    heads = kinds["einsum"]("abc,cde->abde", (None, 5, 3), bias_axes="de", activation="gelu", **pair[0])(x)
    x = x + kinds["einsum"]("abde,dec->abc", (None, WIDTH), bias_axes="c", **pair[1])(heads)
    x = kinds["einsum"]("...x,xy->...y", 7, bias_axes="y", activation="tanh")(x)
    x = kinds["einsum"]("abc,cd->abd", (None, 9), **({"split": "inputs"} if sharded else {}))(x)
    return given, layers.Dense(3)(layers.GlobalAveragePooling1D()(x))


def translation(kinds, _sharded):
    """Cross attention: two inputs of another length each, one of them masked."""
    source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH, WIDTH))
    read = kinds["embedding"](WORDS, WIDTH, mask_zero=True)(source)
    x = target[:, :4] + kinds["attention"](4, 4, value_dim=3)(target[:, :4], read, return_attention_scores=True)[0]
    x, scores = kinds["attention"](4, 2)(x, x, use_causal_mask=True, return_attention_scores=True)
    flat = [ops.reshape(each, (-1, size)) for each, size in ((x, 4 * WIDTH), (scores, 4 * 4 * 4))]
    return [source, target], layers.Dense(3)(flat[0]) + layers.Dense(3)(flat[1])


NETWORKS = {
    "text, by columns": (text, {}, TOKENS),
    "text, by rows, causal": (text, {"split": "rows", "causal": True}, TOKENS),
    "series": (series, {}, SERIES),
    "translation": (translation, {}, [TOKENS, SERIES]),
}
SHORT = {("series", 2, 2)}
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam, each clipped": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "AdamW, clipped, averaged": lambda: keras.optimizers.AdamW(
        0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
    ),
}


def trained(strategy, kinds, name, optimizer="SGD", dtype="float32"):
    """Losses, weights, and what it evaluates and predicts; no batch's last examples can be shared equally."""
    build, how, data = NETWORKS[name]
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope():
        model = keras.Model(*build(kinds, kinds is SHARDED, **how))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
    keras.config.set_dtype_policy("float32")
    losses = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    model.fit(data, LABELS, batch_size=22, epochs=3, shuffle=False, verbose=0, callbacks=[each])
    few = tf.nest.map_structure(lambda array: array[:31], data)
    found = [np.array(losses), *(weight.numpy() for weight in model.weights)]
    return [
        *found, np.array(model.evaluate(data, LABELS, batch_size=17, verbose=0)),
        model.predict(few, batch_size=12, verbose=0),
    ]  # fmt: skip


_ALONE = {}


def alone(*case):
    if case not in _ALONE:
        _ALONE[case] = trained(tf.distribute.get_strategy(), OWN, *case)
    return _ALONE[case]


def same(mine, theirs, tolerance=1e-5):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "shards"),
    [
        pytest.param(name, *mesh, marks=[] if (name, *mesh) in SHORT else pytest.mark.long)
        for name in NETWORKS
        for mesh in ((2, 2), (4, 4), (4, 2))
    ],
)
def test_the_numbers_are_those_of_keras_own_layers(four_devices, name, replicas, shards):
    mirrored = strategies.create("mirrored", devices=four_devices[:replicas], shards=shards)
    same(trained(mirrored, SHARDED, name), alone(name))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("text, by columns", "AdamW, clipped, averaged"),
        ("text, by rows, causal", "Adam, each clipped"),
        ("series", "AdamW, clipped, averaged"),
    ],
)
def test_optimizers_do_what_they_do_on_one_device(four_devices, name, optimizer):
    mesh = strategies.create("mirrored", devices=four_devices, shards=2)
    case = (name, optimizer)
    same(trained(mesh, SHARDED, *case), alone(*case), 3e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["text, by rows, causal", "series"])
def test_in_16_bits_losses_are_near(four_devices, name):
    mirrored = strategies.create("mirrored", devices=four_devices[:2])
    case = (name, "SGD", "mixed_bfloat16")
    np.testing.assert_allclose(trained(mirrored, SHARDED, *case)[0], alone(*case)[0], rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", batteries.rows(NETWORKS, "series"))
def test_a_saved_model_is_whole_and_built_with_the_weights_of_keras_own(four_devices, tmp_path, name):
    build, how, data = NETWORKS[name]
    models = []
    for kinds, devices in ((OWN, four_devices[:1]), (SHARDED, four_devices)):
        keras.utils.set_random_seed(1)
        with strategies.create("auto", devices=devices, shards=2 if kinds is SHARDED else None).scope():
            models.append(keras.Model(*build(kinds, kinds is SHARDED, **how)))
    for own, sharded in zip(*(model.weights for model in models), strict=True):
        assert np.array_equal(own.numpy(), sharded.numpy()), own.path
    models[1].save(tmp_path / "it.keras")
    again = keras.models.load_model(tmp_path / "it.keras")
    few = tf.nest.map_structure(lambda array: tf.constant(array[:5]), data)
    for model in (models[1], again):  # By hand, outside of any step, too.
        np.testing.assert_allclose(model(few), models[0](few), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: parallel.ShardedMultiHeadAttention(6, 2)(x, x), "num_heads=6 isn't a multiple of 4"),
        (lambda x: parallel.ShardedGroupedQueryAttention(2, 8, 2)(x, x), "num_key_value_heads=2"),
        (lambda _: parallel.ShardedEmbedding(9, 4, split="words"), "split='words'"),
        (lambda x: parallel.ShardedEmbedding(9, 3)(x[..., 0]), "its split axis has only 3 elements"),
        (lambda _: parallel.ShardedEinsumDense("abc,c->abc", (None, 8)), "its kernel has no axis to split that way"),
        (lambda _: parallel.ShardedEinsumDense("abc,cd->bad", (None, 8)), "its first axis isn't the batch"),
        (lambda _: parallel.ShardedMultiHeadAttention(4, 2, exchange_dtype="int8"), "int8"),
        (lambda x: parallel.ShardedMultiHeadAttention(4, 2, activity_regularizer="l2")(x, x), "activity_regularizer"),
    ],
)
def test_what_can_not_be_is_said(four_devices, make, said):
    with strategies.create("mirrored", devices=four_devices).scope(), pytest.raises(StrategyError, match=said):
        make(keras.Input((6, 8)))


def test_a_mask_of_another_shape_is_refused(four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices[:2])
    with mirrored.scope():
        layer = parallel.ShardedMultiHeadAttention(4, 2)
        layer.build((None, 6, 8), (None, 6, 8))

    @tf.function(autograph=False)
    def step(x):
        return mirrored.run(lambda: layer(x, x, attention_mask=tf.ones([6], tf.bool)))

    with pytest.raises(StrategyError, match=r"attention_mask of shape \(6,\)"):
        step(tf.ones([3, 6, 8]))
