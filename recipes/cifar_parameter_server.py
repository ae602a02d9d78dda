"""CIFAR-10 with parameter servers: a chief hands out steps, workers do them at their own pace.

    toolkit launch --chief --workers=2 --ps=2 -m recipes.cifar_parameter_server

Variables live on the ps tasks; a worker pulls them, computes the gradient of one batch, and pushes
it. By default nobody waits for anybody. Or start it by hand, on each host:

    TF_CONFIG='{"cluster": ..., "task": ...}' python -m recipes.cifar_parameter_server
    python -m recipes.cifar_parameter_server --cluster=tf_configs/chief_workers_ps.json --task=ps:0

An evaluator (launch --evaluator) follows the checkpoints. Only the chief writes the run directory.
"""

import os

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=8, global_batch_size=32, learning_rate=0.006)
toolkit.cli.flags.define_cluster()
flags.DEFINE_enum("model", "small_cnn", ["small_cnn", "alexnet"], "Model.")
flags.DEFINE_float("dropout", 0.0, "Share of the units dropped before FC layers.")
toolkit.cli.flags.define_parameter_servers()
FLAGS = flags.FLAGS


def main() -> None:
    """Flags, cluster, devices, strategy, data, model, fit, summary: each a value handed to the next."""
    toolkit.devices.restart(FLAGS.visible_devices)
    member = toolkit.cluster.require(os.environ, file=FLAGS.cluster, task=FLAGS.task)
    evaluator, chief = (member.task.job == job for job in ("evaluator", "chief"))
    with toolkit.training.Run(FLAGS.run_dir, recipe="cifar_parameter_server", resume=FLAGS.resume, chief=chief) as run:
        run.settle(model=FLAGS.model, seed=FLAGS.seed, learning_rate=FLAGS.learning_rate, dropout=FLAGS.dropout)

        devices = toolkit.devices.configure(**toolkit.cli.flags.devices())
        toolkit.cli.show_devices(devices)
        strategy = toolkit.strategies.create(  # A worker or ps serves here, until the chief is done.
            "auto" if evaluator else "parameter_server",
            devices=devices.logical_devices,
            membership=member,
            start_timeout=FLAGS.start_timeout,
            parameter_server=toolkit.cli.flags.parameter_servers(),
        )

        import keras  # Only now: importing it starts TensorFlow.

        keras.utils.set_random_seed(FLAGS.seed)
        examples = toolkit.data.load(FLAGS.data, data_dir=FLAGS.data_dir, seed=FLAGS.seed)
        batches = toolkit.data.Batches(
            examples=examples, strategy=strategy, global_batch_size=FLAGS.global_batch_size, seed=FLAGS.seed
        )
        length = toolkit.training.Length(
            epochs=FLAGS.epochs, steps_per_epoch=FLAGS.steps_per_epoch or batches.steps_per_epoch
        )
        run.settle(
            dataset=examples.name,
            fingerprint=examples.fingerprint(),
            global_batch_size=batches.global_batch_size,
            steps_per_epoch=length.steps_per_epoch,
        )
        run.describe(
            strategy="parameter_server",
            replicas=sum(task.job == "worker" for task in member.cluster.tasks),
            devices=devices.logical_devices,
            emulated=devices.emulated,
            cluster=member.cluster.as_dict(),
        )

        with strategy.scope():
            model = toolkit.models.build(FLAGS.model, classes=len(examples.classes), dropout=FLAGS.dropout)
            rate = toolkit.training.learning_rate(
                FLAGS.learning_rate,
                global_batch_size=batches.global_batch_size,
                total_steps=length.total_steps,
                scaling="sqrt",
            )
            model.compile(
                optimizer=keras.optimizers.Adam(rate),  # Momentum as high as SGD's here suffers from stale gradients.
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        if evaluator:
            toolkit.training.follow(FLAGS.run_dir, model, batches.test(), recipe="cifar_parameter_server")
            return
        run.restore(model, length)
        toolkit.cli.show_variables(toolkit.strategies.report(model))
        model.fit(
            batches.train(start_step=run.step),
            initial_epoch=run.epoch,
            epochs=length.epochs,
            steps_per_epoch=length.steps_per_epoch,
            validation_data=batches.test(),
            callbacks=run.callbacks(
                global_batch_size=batches.global_batch_size,
                checkpoint_steps=FLAGS.checkpoint_steps,
                profile=FLAGS.profile,
            ),
            shuffle=False,  # The stream is shuffled; Keras warns where it can't do that itself.
            verbose=0,  # The run's own progress display suits a log file as well.
        )
        run.finish(model)
        toolkit.observe.report.after(run)


if __name__ == "__main__":
    toolkit.cli.run(main)
