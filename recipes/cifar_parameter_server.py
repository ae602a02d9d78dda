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
        evaluator = run.membership.task.job == "evaluator"
        strategy = toolkit.cli.create_strategy(  # A worker or ps serves here until the chief is done.
            run,
            "auto" if evaluator else "parameter_server",
            parameter_server=toolkit.cli.flags.parameter_servers(),
        )

        import keras  # Imported here, because it starts TensorFlow.

        keras.utils.set_random_seed(FLAGS.seed)
        batches = toolkit.cli.load_batches(run, strategy)

        with strategy.scope():
            model = toolkit.models.build(FLAGS.model, classes=len(batches.examples.classes), dropout=FLAGS.dropout)
            rate = toolkit.cli.learning_rate(batches, scaling="sqrt")
            model.compile(
                # Stale gradients would spoil a momentum as high as SGD's.
                optimizer=keras.optimizers.Adam(rate),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        toolkit.cli.show_variables(toolkit.strategies.report(model))
        run.fit(model, batches, epochs=FLAGS.epochs, validation_data=batches.test())


if __name__ == "__main__":
    toolkit.cli.run(main)
