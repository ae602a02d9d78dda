"""A vision transformer on CIFAR-10, data parallel and tensor parallel.

    python -m recipes.cifar_vit --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_vit --shard_optimizer

It trains three times: with all layers replicated, with attention sharded by
heads and FC layers by units, and as a plan chooses. A table at the end compares
predictions with measured times. With --shard_optimizer each replica keeps a
shard of Adam's state of the replicated layers.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=1, global_batch_size=64, learning_rate=0.001)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
toolkit.cli.flags.define_activations()
flags.DEFINE_enum("model", "vit", toolkit.models.NAMES, "Network to train.")
FLAGS = flags.FLAGS

# Its only convolution, which turns patches into words, stays replicated.
WAYS = [("replicated", "replicated"), ("replicated", "sharded"), ("planned", "planned")]


def main() -> None:
    """Devices and strategy; then plan, model, compile and fit for each way, and a table."""
    with toolkit.cli.open_run("cifar_vit", can_resume=False) as run:
        strategy = toolkit.cli.create_strategy(run)

        import keras  # Imported here, because it starts TensorFlow.

        def optimizer():
            return keras.optimizers.AdamW(FLAGS.learning_rate, global_clipnorm=1.0)

        toolkit.cli.train_ways(run, strategy, WAYS, optimizer, slots=2)


if __name__ == "__main__":
    toolkit.cli.run(main)
