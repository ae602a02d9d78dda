"""CIFAR-10 on several devices of one machine, with MirroredStrategy.

    python -m recipes.cifar_mirrored --gpus=2

Each device holds a replica of the model and trains on its share of every
global batch. After each step the replicas add their gradients. Without a GPU,
CPU devices stand in for GPUs; without CIFAR-10, an embedded data set is used.

    python -m recipes.cifar_mirrored --gpus=2 --data=cifar10 --data_dir=DIR

Measured with that command, on two shared CPU cores without a GPU, from JPEG
pictures: 77.3 % test accuracy after 5 epochs, 1,930 images/s, 152 s (one run).
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=5, global_batch_size=128, learning_rate=0.1)
toolkit.cli.flags.define_gradients(between_processes=False)
flags.DEFINE_enum("model", "small_cnn", toolkit.models.NAMES, "Network to train; alexnet needs --learning_rate=0.02.")
flags.DEFINE_float("dropout", 0.0, "Fraction of the units to drop before FC layers.")
FLAGS = flags.FLAGS


def main() -> None:
    """Devices, strategy, data, model, compile, fit."""
    with toolkit.cli.open_run("cifar_mirrored") as run:
        strategy = toolkit.cli.create_strategy(run, "mirrored")

        import keras  # Imported here, because it starts TensorFlow.

        keras.utils.set_random_seed(FLAGS.seed)
        batches = toolkit.cli.load_batches(run, strategy)

        with strategy.scope():
            model = toolkit.models.build(FLAGS.model, classes=len(batches.examples.classes), dropout=FLAGS.dropout)
            rate = toolkit.cli.learning_rate(batches)
            model.compile(
                optimizer=keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=5e-4),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        run.fit(model, batches, epochs=FLAGS.epochs, validation_data=batches.test())


if __name__ == "__main__":
    toolkit.cli.run(main)
