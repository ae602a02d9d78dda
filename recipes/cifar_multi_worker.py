"""CIFAR-10 in several processes, with MultiWorkerMirroredStrategy.

    toolkit launch --workers=2 -m recipes.cifar_multi_worker

Each worker holds a replica of the model on each of its devices and trains on
its share of every global batch. After each step all replicas add their
gradients. To start it by hand, run one of these on each host:

    TF_CONFIG='{...}' python -m recipes.cifar_multi_worker
    python -m recipes.cifar_multi_worker --cluster=FILE --task=worker:1

FILE is such as tf_configs/two_hosts.json. The chief writes the run directory;
without a task named chief, that is worker:0.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=5, global_batch_size=128, learning_rate=0.1)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
flags.DEFINE_enum("model", "small_cnn", toolkit.models.NAMES, "Network to train; alexnet needs --learning_rate=0.02.")
flags.DEFINE_float("dropout", 0.0, "Fraction of the units to drop before FC layers.")
FLAGS = flags.FLAGS


def main() -> None:
    """Devices, strategy, data, model, compile, fit."""
    with toolkit.cli.open_run("cifar_multi_worker", needs_cluster=True) as run:
        strategy = toolkit.cli.create_strategy(run, "multi_worker")

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
