"""Which layers to replicate and which to shard, predicted and measured.

    python -m recipes.cifar_parallelism --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_parallelism

It trains AlexNet on CIFAR-10 five times: with its convolutions replicated or
sharded, with its FC layers replicated or sharded, and as a plan chooses. The
plan measures the speed of these devices and of their network at the start. A
table at the end compares the cost model's predictions with the measured times.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=1, global_batch_size=64, learning_rate=0.02)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
toolkit.cli.flags.define_activations()
flags.DEFINE_enum("model", "alexnet", toolkit.models.NAMES, "Network to train.")
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
        strategy = toolkit.cli.create_strategy(run)

        import keras  # Imported here, because it starts TensorFlow.

        def optimizer():
            return keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9)

        toolkit.cli.train_ways(run, strategy, WAYS, optimizer, slots=1)


if __name__ == "__main__":
    toolkit.cli.run(main)
