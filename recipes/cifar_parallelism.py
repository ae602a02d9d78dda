"""Which layers to replicate and which to shard: predicted, and measured, on CIFAR-10.

    python -m recipes.cifar_parallelism --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_parallelism

Trains AlexNet with its convolutions replicated (data parallelism) or sharded (model parallelism), and its FC layers so
or so: four combinations, and what a plan chooses from the speed of these devices and of what joins them, measured at
the start. It ends with a table of what the cost model predicted and what was measured.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=1, global_batch_size=64, learning_rate=0.02)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
toolkit.cli.flags.define_activations()
flags.DEFINE_enum("model", "alexnet", toolkit.models.NAMES, "Model.")
FLAGS = flags.FLAGS

WAYS = [
    ("replicated", "replicated"),
    ("replicated", "sharded"),
    ("sharded", "replicated"),
    ("sharded", "sharded"),
    ("planned", "planned"),
]


def main() -> None:
    """Devices and strategy; then plan, model, compile and fit for each way, and a table."""
    with toolkit.cli.open_run("cifar_parallelism", can_resume=False) as run:
        devices = toolkit.cli.configure_devices()
        strategy = toolkit.strategies.create(
            "mirrored" if run.membership is None else "multi_worker",
            devices=devices.logical_devices,
            membership=run.membership,
            start_timeout=FLAGS.start_timeout,
            **toolkit.cli.flags.exchanges(),
        )

        import keras  # Only now: importing it starts TensorFlow.

        def optimizer():
            return keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9)

        toolkit.cli.train_ways(run, strategy, WAYS, optimizer, slots=1)


if __name__ == "__main__":
    toolkit.cli.run(main)
