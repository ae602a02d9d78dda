"""CIFAR-10 with replicated convolutions and sharded FC layers, on several devices or in several processes.

    python -m recipes.cifar_hybrid --gpus=2
    toolkit launch --workers=2 -m recipes.cifar_hybrid

Convolutions do most of the arithmetic with few weights, FC layers the reverse: so each replica has all of the
convolutions and exchanges their gradients, and has a part of the FC layers, for which it exchanges activations instead
(Krizhevsky, arXiv 1404.5997). The numbers are those of one device, and `compile` and `fit` are Keras's own.
"""

import os

from absl import flags

import toolkit

toolkit.cli.flags.define_shared(epochs=5, global_batch_size=128, learning_rate=0.02)
toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_gradients()
flags.DEFINE_integer("units", 512, "Of each of the two hidden FC layers.", lower_bound=1)
flags.DEFINE_enum("activation_dtype", "float32", ["float32", "float16", "bfloat16"], "What activations travel as.")
FLAGS = flags.FLAGS


def main() -> None:
    """Flags, cluster, devices, strategy, data, model, fit, summary: each a value handed to the next."""
    toolkit.devices.restart(FLAGS.visible_devices)
    member = toolkit.cluster.discover(os.environ, file=FLAGS.cluster, task=FLAGS.task)
    chief = member is None or member.task == member.cluster.chief
    with toolkit.training.Run(FLAGS.run_dir, recipe="cifar_hybrid", resume=FLAGS.resume, chief=chief) as run:
        run.settle(units=FLAGS.units, seed=FLAGS.seed, learning_rate=FLAGS.learning_rate)

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
        from keras import layers

        from toolkit.parallel import ShardedDense

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
        run.compare(strategy, gradients=str(toolkit.cli.flags.gradients()), activation_dtype=FLAGS.activation_dtype)
        run.describe(
            strategy=kind,
            replicas=batches.replicas,
            devices=devices.logical_devices,
            emulated=devices.emulated,
        )

        travels = FLAGS.activation_dtype
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((32, 32, 3)),
                    layers.Rescaling(1 / 64, offset=-1.9),
                    layers.Conv2D(32, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Conv2D(64, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Flatten(),
                    # Each replica has some units of the first, and the inputs that they are to the second.
                    ShardedDense(FLAGS.units, activation="relu", keep_split=True, exchange_dtype=travels),
                    ShardedDense(FLAGS.units, activation="relu", split="inputs", exchange_dtype=travels),
                    layers.Dense(len(examples.classes)),
                ]
            )
            rate = toolkit.training.learning_rate(
                FLAGS.learning_rate, global_batch_size=batches.global_batch_size, total_steps=length.total_steps
            )
            model.compile(
                optimizer=keras.optimizers.SGD(rate, momentum=0.9),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        run.restore(model, length)
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
