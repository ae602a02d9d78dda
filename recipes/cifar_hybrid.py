"""CIFAR-10 with replicated convolutions and sharded FC layers.

    python -m recipes.cifar_hybrid --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_hybrid

Convolutions have few weights and much arithmetic; FC layers have many weights
and little arithmetic. So each replica holds all convolutions and exchanges
their gradients, and holds one shard of the FC layers and exchanges their
activations (Krizhevsky, arXiv 1404.5997). Losses equal those of one device.
`compile` and `fit` are Keras's own.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=5, global_batch_size=128, learning_rate=0.02)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
toolkit.cli.flags.define_activations()
toolkit.cli.flags.define_mesh()
flags.DEFINE_integer("units", 512, "Units of each of the two hidden FC layers.", lower_bound=1)
FLAGS = flags.FLAGS


def build_model(classes: int):
    """Every replica has the two convolutions, and a shard of the two FC layers."""
    from keras import Input, Sequential, layers

    from toolkit.parallel import ShardedDense

    dtype = FLAGS.activation_dtype
    return Sequential(
        [
            Input((32, 32, 3)),
            layers.Rescaling(1 / 64, offset=-1.9),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            # Each replica has some units of the first layer, which are its inputs to the second.
            ShardedDense(FLAGS.units, activation="relu", keep_split=True, exchange_dtype=dtype),
            ShardedDense(FLAGS.units, activation="relu", split="inputs", exchange_dtype=dtype),
            layers.Dense(classes),
        ]
    )


def main() -> None:
    """Devices, strategy, data, model, compile, fit."""
    with toolkit.cli.open_run("cifar_hybrid") as run:
        strategy = toolkit.cli.create_strategy(run)

        import keras  # Imported here, because it starts TensorFlow.

        keras.utils.set_random_seed(FLAGS.seed)
        batches = toolkit.cli.load_batches(run, strategy)

        with strategy.scope():
            model = build_model(classes=len(batches.examples.classes))
            rate = toolkit.cli.learning_rate(batches)
            model.compile(
                optimizer=keras.optimizers.SGD(rate, momentum=0.9),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        run.fit(model, batches, epochs=FLAGS.epochs, validation_data=batches.test())


if __name__ == "__main__":
    toolkit.cli.run(main)
