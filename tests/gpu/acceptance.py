"""What has to hold on a machine with GPUs, a case at a time, in a process of its own; prints what it saw as JSON.

    python acceptance.py CASE STRATEGY DEVICES GPU|CPU

Where the last argument is CPU, logical CPU devices stand in for GPUs: the same functions, on any machine.
"""

import json
import os
import sys

STEPS = 12
BATCH = 32


def configured(devices, place, **memory):
    import toolkit

    cards = len(toolkit.devices.take().gpus)
    if place == "GPU" and cards < devices:
        memory |= {"split": -(-devices // cards), "memory": 8192}  # MiB, each.
    return toolkit.devices.configure(gpus=devices, emulate="never" if place == "GPU" else "always", **memory)


def sees(strategy, devices, place):
    """Which devices TensorFlow sees, and where it computes what it is told to."""
    setup = configured(devices, place)
    import tensorflow as tf

    ran = []
    for name in setup.logical_devices:
        with tf.device(name):
            ran.append((tf.ones([64, 64]) @ tf.ones([64, 64])).device.rpartition("device:")[2])
    logical = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices(place)]
    return {"asked": list(setup.logical_devices), "logical": logical, "ran": ran}


def grows(strategy, devices, place):
    """How much of a card a process takes that computes little, in MiB, as nvidia-smi has it."""
    return _memory(devices, place, memory="growth")


def limited(strategy, devices, place):
    """How much of it one takes that has a limit of 1024 MiB, and what becomes of a tensor of 2048."""
    return _memory(devices, place, memory=1024)


def _memory(devices, place, **memory):
    from toolkit.devices.inventory import look

    before = look()[1][0].memory_used_mib
    configured(devices, place, **memory)
    import tensorflow as tf

    with tf.device("GPU:0"):
        kept = tf.ones([64, 1024, 1024]) + 1  # 256 MiB, and as much while it is made.
        taken = look()[1][0].memory_used_mib - before
        try:
            tf.ones([512, 1024, 1024]) + kept[0]
            refused = False
        except tf.errors.ResourceExhaustedError:
            refused = True
    return {"taken": taken, "refused": refused}


def trains(strategy, devices, place, *, dtype="float32", sharded=False, jit=False):
    """Losses of some steps, and weights: the same on one device as on several."""
    setup = configured(1 if strategy == "multi_worker" else devices, place)
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    import toolkit

    made = toolkit.strategies.create(strategy, devices=setup.logical_devices)
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, 16, 16, 3)).astype("float32")
    y = random.integers(0, 10, BATCH * STEPS)
    keras.config.set_dtype_policy(dtype)
    dense = toolkit.parallel.ShardedDense if sharded else keras.layers.Dense
    with made.scope():
        model = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                dense(64, activation="relu"),
                keras.layers.Dense(10, dtype="float32"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit)
    losses = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(x, y, batch_size=BATCH, shuffle=False, callbacks=[noting], verbose=0)
    predicted = model.predict(x[:50], verbose=0)
    described = toolkit.strategies.describe(made)
    return {"losses": losses, "predicted": predicted[:, 0].tolist(), "communication": described.get("communication")}


CASES = {
    "sees": sees,
    "grows": grows,
    "limited": limited,
    "trains": trains,
    "mixed": lambda *given: trains(*given, dtype="mixed_float16"),
    "sharded": lambda *given: trains(*given, sharded=True),
    "compiled": lambda *given: trains(*given, jit=True),
}

if __name__ == "__main__":
    case, strategy, devices, place = sys.argv[1:]
    if place == "CPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    sys.stdout.write(f"SEEN {json.dumps(CASES[case](strategy, int(devices), place))}\n")
