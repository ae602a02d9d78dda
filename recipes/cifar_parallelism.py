"""Which layers to replicate and which to shard: predicted, and measured, on CIFAR-10.

    python -m recipes.cifar_parallelism --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_parallelism

Trains AlexNet with its convolutions replicated (data parallelism) or sharded (model parallelism), and its FC layers so
or so: four combinations, and what a plan chooses from the speed of these devices and of what joins them, measured at
the start. It ends with a table of what the cost model predicted and what was measured.
"""

import os

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=1, global_batch_size=64, learning_rate=0.02)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
flags.DEFINE_enum("model", "alexnet", ["small_cnn", "alexnet"], "Model.")
flags.DEFINE_enum("activation_dtype", "float32", ["float32", "float16", "bfloat16"], "What activations travel as.")
FLAGS = flags.FLAGS

ROWS = [("replicated", "replicated"), ("replicated", "sharded"), ("sharded", "replicated"), ("sharded", "sharded")]


def main() -> None:
    """Flags, cluster, devices, strategy, data, measured speeds; then plan, model and fit for each row, and a table."""
    if FLAGS.resume:
        raise toolkit.errors.RequestError(
            asked="--resume", found="rows are compared from their first step", remedy="Start anew"
        )
    toolkit.devices.restart(FLAGS.visible_devices)
    member = toolkit.cluster.discover(os.environ, file=FLAGS.cluster, task=FLAGS.task)
    chief = member is None or member.task == member.cluster.chief
    with toolkit.training.Run(FLAGS.run_dir, recipe="cifar_parallelism", chief=chief) as run:
        devices = toolkit.devices.configure(**toolkit.cli.flags.devices())
        toolkit.cli.show_devices(devices)
        kind = "mirrored" if member is None else "multi_worker"
        strategy = toolkit.strategies.create(
            kind,
            devices=devices.logical_devices,
            membership=member,
            start_timeout=FLAGS.start_timeout,
            gradients=toolkit.cli.flags.gradients(),
        )

        import keras  # Only now: importing it starts TensorFlow.

        examples = toolkit.data.load(FLAGS.data, data_dir=FLAGS.data_dir, seed=FLAGS.seed)
        batches = toolkit.data.Batches(
            examples=examples, strategy=strategy, global_batch_size=FLAGS.global_batch_size, seed=FLAGS.seed
        )
        length = toolkit.training.Length(epochs=FLAGS.epochs, steps_per_epoch=FLAGS.steps_per_epoch or 25)
        run.describe(
            strategy=kind,
            replicas=batches.replicas,
            devices=devices.logical_devices,
            emulated=devices.emulated,
            dataset=examples.name,
            global_batch_size=batches.global_batch_size,
        )

        def optimizer() -> keras.optimizers.Optimizer:
            return keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9)

        keras.utils.set_random_seed(FLAGS.seed)
        plain = toolkit.models.build(FLAGS.model, classes=len(examples.classes))
        setting = toolkit.parallel.Setting(
            replicas=batches.replicas,
            batch=batches.global_batch_size / batches.replicas,
            gradient_dtype=FLAGS.gradient_dtype,
            activation_dtype=FLAGS.activation_dtype,
            slots=1,  # The momentum.
        )
        machine = toolkit.parallel.measure(plain, strategy, batch=round(setting.batch), optimizer=optimizer())
        costs = toolkit.parallel.costs(plain)

        rows: list[toolkit.parallel.Comparison] = []
        for conv, fc in [*ROWS, ("planned", "planned")]:
            toolkit.cli.say(f"{len(rows) + 1} of {len(ROWS) + 1}: convolutions {conv}, FC layers {fc}")
            plan = toolkit.parallel.choose(costs, machine, setting, conv=conv, fc=fc)
            keras.utils.set_random_seed(FLAGS.seed)
            with strategy.scope():
                model = toolkit.parallel.parallelize(plain, plan, exchange_dtype=FLAGS.activation_dtype)
                model.compile(
                    optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
                )
            meter = toolkit.training.Meter(member)
            last = conv == "planned"
            if last:
                run.restore(model, length)
            history = model.fit(
                batches.train(),
                epochs=length.epochs,
                steps_per_epoch=length.steps_per_epoch,
                validation_data=batches.test() if last else None,
                callbacks=[
                    meter,
                    *(
                        run.callbacks(global_batch_size=batches.global_batch_size, profile=FLAGS.profile)
                        if last
                        else []
                    ),
                ],
                shuffle=False,
                verbose=0,
            )
            rows.append(
                toolkit.parallel.Comparison(
                    conv=conv,
                    fc=fc,
                    predicted=plan.step,
                    measured_seconds=meter.seconds,
                    measured_bytes=meter.received,
                    loss=history.history["loss"][-1],
                )
            )
        run.describe(parallelism=[row.as_dict() for row in rows])
        run.finish(model)
        toolkit.observe.report.after(run)
        toolkit.cli.show_comparisons(rows)


if __name__ == "__main__":
    toolkit.cli.run(main)
