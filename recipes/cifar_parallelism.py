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
    """Devices, strategy, data; then plan, model, compile and fit for each way, and a table."""
    with toolkit.cli.open_run("cifar_parallelism", can_resume=False) as run:
        devices = toolkit.cli.configure_devices()
        strategy = toolkit.strategies.create(
            "mirrored" if run.membership is None else "multi_worker",
            devices=devices.logical_devices,
            membership=run.membership,
            start_timeout=FLAGS.start_timeout,
            gradients=toolkit.cli.flags.gradients(),
        )

        import keras  # Only now: importing it starts TensorFlow.

        examples = toolkit.data.load(FLAGS.data, data_dir=FLAGS.data_dir, seed=FLAGS.seed)
        batches = toolkit.data.Batches(
            examples=examples,
            strategy=strategy,
            global_batch_size=FLAGS.global_batch_size,
            seed=FLAGS.seed,
            steps_per_epoch=FLAGS.steps_per_epoch or 25,
        )
        keras.utils.set_random_seed(FLAGS.seed)
        plain = toolkit.models.build(FLAGS.model, classes=len(examples.classes))
        rows: list[toolkit.parallel.Comparison] = []
        for (conv, fc), plan in zip(WAYS, plan_all(plain, strategy, batches), strict=True):
            toolkit.cli.say(f"{len(rows) + 1} of {len(WAYS)}: convolutions {conv}, FC layers {fc}")
            keras.utils.set_random_seed(FLAGS.seed)
            with strategy.scope():
                model = toolkit.parallel.parallelize(plain, plan, exchange_dtype=FLAGS.activation_dtype)
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(optimizer(), loss, metrics=["accuracy"])
            rows.append(train(run, model, batches, plan, conv, fc))
        run.add_facts(parallelism=[row.as_dict() for row in rows])
    toolkit.cli.show_comparisons(rows)


def optimizer():
    """Returns an optimizer: each model gets one of its own."""
    import keras

    return keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9)


def plan_all(plain, strategy, batches) -> list:
    """Measures these devices and what joins them, and returns a plan for each way."""
    setting = toolkit.parallel.Setting(
        replicas=batches.replicas,
        batch=batches.global_batch_size / batches.replicas,
        gradient_dtype=FLAGS.gradient_dtype,
        activation_dtype=FLAGS.activation_dtype,
        slots=1,  # The momentum.
    )
    machine = toolkit.parallel.measure(plain, strategy, batch=round(setting.batch), optimizer=optimizer())
    costs = toolkit.parallel.costs(plain)
    return [toolkit.parallel.choose(costs, machine, setting, conv=conv, fc=fc) for conv, fc in WAYS]


def train(run, model, batches, plan, conv: str, fc: str):
    """Trains one way, the planned one as the run that stays, and returns its row of the table."""
    meter = toolkit.training.Meter(run.membership)
    if conv == "planned":
        validation = batches.test()
        history = run.fit(model, batches, epochs=FLAGS.epochs, validation_data=validation, callbacks=[meter])
    else:
        history = model.fit(
            batches.train(),
            epochs=FLAGS.epochs,
            steps_per_epoch=batches.steps_per_epoch,
            callbacks=[meter],
            shuffle=False,
            verbose=0,
        )
    return toolkit.parallel.Comparison(
        conv=conv,
        fc=fc,
        predicted=plan.step,
        measured_seconds=meter.seconds,
        measured_bytes=meter.received,
        loss=history.history["loss"][-1],
    )


if __name__ == "__main__":
    toolkit.cli.run(main)
