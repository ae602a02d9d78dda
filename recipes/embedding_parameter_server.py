r"""A recommender whose two embedding tables live on parameter servers.

    toolkit launch --chief --workers=2 --ps=2 \
        -m recipes.embedding_parameter_server
    python -m recipes.embedding_parameter_server

A step pulls the rows that its batch looks up and pushes their gradients. The
second command trains on one device, with the tables in its memory. The data is
generated: a rating is a user's number plus an item's number plus noise, so the
best possible loss is known. One row in fifty of each table is looked up.
"""

import os
import time

from absl import flags

import toolkit

toolkit.cli.flags.define_cluster()
toolkit.cli.flags.define_parameter_servers()
flags.DEFINE_integer("users", 1_000_000, "Rows of the table of users.", lower_bound=50)
flags.DEFINE_integer("items", 200_000, "Rows of the table of items.", lower_bound=50)
flags.DEFINE_integer("width", 16, "Columns of both tables.", lower_bound=1)
flags.DEFINE_integer("epochs", 4, "Epochs.", lower_bound=1)
flags.DEFINE_integer("steps_per_epoch", 500, "Steps in an epoch.", lower_bound=1)
flags.DEFINE_integer("batch_size", 1024, "Examples in a step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.2, "Learning rate of Adagrad.")
flags.DEFINE_integer("seed", 1, "Seed of weights and data.", lower_bound=0)
FLAGS = flags.FLAGS
NOISE = 0.5  # Its square is the loss of a model that knows all users and items exactly.


def ratings(first: int, count: int):
    """Returns this many batches, each computed from its number."""
    import tensorflow as tf

    def batch(number):
        seed = tf.stack([number, tf.constant(FLAGS.seed, tf.int64)])
        ids, opinions = {}, NOISE * tf.random.stateless_normal([FLAGS.batch_size, 1], seed)
        for index, (name, rows) in enumerate({"user": FLAGS.users, "item": FLAGS.items}.items(), 1):
            ids[name] = 50 * tf.random.stateless_uniform([FLAGS.batch_size], seed + index, 0, rows // 50, tf.int32)
            opinions += tf.sin(tf.cast(ids[name][:, None] * (2 * index + 1) % 1009, tf.float32)) * 2**0.5
        return ids, opinions

    return tf.data.Dataset.range(first, first + count).map(batch, num_parallel_calls=2).prefetch(4)


def main() -> None:
    """Strategy, model, compile, fit."""
    strategy = toolkit.strategies.create(  # A worker or ps serves here until the chief is done.
        "auto",
        membership=toolkit.cluster.discover(os.environ, file=FLAGS.cluster, task=FLAGS.task),
        start_timeout=FLAGS.start_timeout,
        parameter_server=toolkit.cli.flags.parameter_servers(),
    )

    import keras  # Imported here, because it starts TensorFlow.

    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        ids = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
        found = [keras.layers.Embedding(FLAGS.users, FLAGS.width)(ids["user"])]
        found.append(keras.layers.Embedding(FLAGS.items, FLAGS.width)(ids["item"]))
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(found)))
        model.compile(keras.optimizers.Adagrad(FLAGS.learning_rate), "mse")
    toolkit.cli.show_variables(toolkit.strategies.report(model))
    began, steps = time.perf_counter(), FLAGS.epochs * FLAGS.steps_per_epoch
    data = ratings(0, steps).repeat()
    model.fit(data, epochs=FLAGS.epochs, steps_per_epoch=FLAGS.steps_per_epoch, shuffle=False, verbose=2)
    rate = steps * FLAGS.batch_size / (time.perf_counter() - began)
    loss = model.evaluate(ratings(10**9, 20), verbose=0)
    best = f"the best possible is {NOISE**2:.3f}, and 2.25 without the tables"
    toolkit.cli.say(f"loss {loss:.3f}; {best}; {rate:,.0f} examples/s")


if __name__ == "__main__":
    toolkit.cli.run(main)
