"""A backbone of KerasHub, built from its class without a download: its layers within layers are sharded."""

import importlib.util

import keras
import numpy as np
import pytest

from toolkit import parallel, strategies

TOKENS = np.random.default_rng(0).integers(1, 50, size=(40, 12))
GIVEN = {
    "token_ids": TOKENS,
    "segment_ids": np.zeros_like(TOKENS),
    "padding_mask": (np.arange(12) < np.random.default_rng(1).integers(3, 13, size=(40, 1))).astype("int32"),
}
LABELS = np.random.default_rng(2).integers(0, 4, size=40)
MACHINE = parallel.Machine(name="any", speed=1e12, inside=parallel.Link(bandwidth=1e9))


def classifier():
    import keras_hub

    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=24,
        dropout=0,
        max_sequence_length=12,
    )
    return keras.Model(backbone.inputs, keras.layers.Dense(4)(backbone.output["pooled_output"]))


def trained(model, strategy):
    losses = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    with strategy.scope():
        optimizer = keras.optimizers.AdamW(0.003, global_clipnorm=1.0)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    given = [GIVEN[tensor.name] for tensor in model.inputs]
    model.fit(given, LABELS, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[each])
    assert len(losses) == 20
    return losses, model.evaluate(given, LABELS, batch_size=12, verbose=0), model.predict(given, verbose=0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="KerasHub isn't installed: see .ci/run")
def test_a_backbone_trains_in_two_groups_as_on_one_device(four_devices):
    alone = trained(classifier(), strategies.create("auto", devices=four_devices[:1]))
    strategy = strategies.create("mirrored", devices=four_devices, shards=2)
    plain = classifier()
    setting = parallel.Setting(replicas=4, shards=2, global_batch=8)
    plan = parallel.choose(parallel.costs(plain, length=12), MACHINE, setting, fc="sharded")
    with strategy.scope():
        model = parallel.parallelize(plain, plan)
    split = {choice.split for choice in plan.choices.values()}
    assert {"heads", "outputs", "inputs"} <= split, plan.choices
    for many, one in zip(trained(model, strategy), alone, strict=True):
        np.testing.assert_allclose(many, one, atol=1e-5, rtol=0)
