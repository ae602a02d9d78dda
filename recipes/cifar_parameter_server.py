"""CIFAR-10 with parameter servers.

    toolkit launch --chief --workers=2 --ps=2 -m recipes.cifar_parameter_server

The chief sends steps to the workers. The ps tasks hold the variables: a worker
pulls them, computes the gradient of one batch and pushes it. By default no
worker waits for another. To start it by hand, run one of these on each host:

    TF_CONFIG='{...}' python -m recipes.cifar_parameter_server
    python -m recipes.cifar_parameter_server --cluster=FILE --task=ps:0

FILE is such as tf_configs/chief_workers_ps.json. An evaluator (`toolkit launch
--evaluator`) evaluates each checkpoint. The chief writes the run directory.
"""

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=8, global_batch_size=32, learning_rate=0.006)
toolkit.cli.flags.define_cluster()
flags.DEFINE_enum("model", "small_cnn", toolkit.models.NAMES, "Network to train.")
flags.DEFINE_float("dropout", 0.0, "Fraction of the units to drop before FC layers.")
toolkit.cli.flags.define_parameter_servers()
FLAGS = flags.FLAGS


def main() -> None:
    """Devices, strategy, data, model, compile, fit."""
    with toolkit.cli.open_run("cifar_parameter_server", needs_cluster=True) as run:
        devices = toolkit.cli.configure_devices()
        evaluator = run.membership.task.job == "evaluator"
        strategy = toolkit.strategies.create(  # A worker or ps serves here, until the chief is done.
            "auto" if evaluator else "parameter_server",
            devices=devices.logical_devices,
            membership=run.membership,
            start_timeout=FLAGS.start_timeout,
            parameter_server=toolkit.cli.flags.parameter_servers(),
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

        with strategy.scope():
            model = toolkit.models.build(FLAGS.model, classes=len(examples.classes), dropout=FLAGS.dropout)
            rate = toolkit.training.learning_rate(
                FLAGS.learning_rate,
                global_batch_size=FLAGS.global_batch_size,
                total_steps=FLAGS.epochs * batches.steps_per_epoch,
                scaling="sqrt",
            )
            model.compile(
                optimizer=keras.optimizers.Adam(rate),  # Momentum as high as SGD's here suffers from stale gradients.
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        toolkit.cli.show_variables(toolkit.strategies.report(model))
        run.fit(model, batches, epochs=FLAGS.epochs, validation_data=batches.test())


if __name__ == "__main__":
    toolkit.cli.run(main)
