"""CIFAR-10 in several processes, on one host or many, with MultiWorkerMirroredStrategy.

    toolkit launch --workers=2 -m recipes.cifar_multi_worker

Each worker holds a replica of the model on each of its devices and takes its share of every global
batch; gradients are summed over all replicas after each step. Or start it by hand, on each host:

    TF_CONFIG='{"cluster": ..., "task": ...}' python -m recipes.cifar_multi_worker
    python -m recipes.cifar_multi_worker --cluster=tf_configs/two_hosts.json --task=worker:1

Only the chief, worker:0 where there is no other, writes the run directory.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=5, global_batch_size=128, learning_rate=0.1)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
flags.DEFINE_enum("model", "small_cnn", toolkit.models.NAMES, "Model; alexnet learns at --learning_rate=0.02.")
flags.DEFINE_float("dropout", 0.0, "Share of the units dropped before FC layers.")
FLAGS = flags.FLAGS


def main() -> None:
    """Devices, strategy, data, model, compile, fit."""
    with toolkit.cli.open_run("cifar_multi_worker", needs_cluster=True) as run:
        devices = toolkit.cli.configure_devices()
        strategy = toolkit.strategies.create(
            "multi_worker",
            devices=devices.logical_devices,
            membership=run.membership,
            start_timeout=FLAGS.start_timeout,
            **toolkit.cli.flags.exchanges(),
        )

        import keras  # Only now: importing it starts TensorFlow.

        keras.utils.set_random_seed(FLAGS.seed)
        examples = toolkit.data.load(FLAGS.data, data_dir=FLAGS.data_dir, seed=FLAGS.seed)
        batches = toolkit.data.Batches(
            examples=examples,
            strategy=strategy,
            global_batch_size=FLAGS.global_batch_size,
            seed=FLAGS.seed,
            steps_per_epoch=FLAGS.steps_per_epoch,
        )
        toolkit.cli.check_same(run, strategy, batches)

        with strategy.scope():
            model = toolkit.models.build(FLAGS.model, classes=len(examples.classes), dropout=FLAGS.dropout)
            rate = toolkit.training.learning_rate(
                FLAGS.learning_rate,
                global_batch_size=FLAGS.global_batch_size,
                total_steps=FLAGS.epochs * batches.steps_per_epoch,
            )
            model.compile(
                optimizer=keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=5e-4),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        run.fit(model, batches, epochs=FLAGS.epochs, validation_data=batches.test())


if __name__ == "__main__":
    toolkit.cli.run(main)
