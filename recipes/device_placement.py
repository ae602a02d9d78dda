"""Where operations and variables go: a tutorial's examples, one by one.

    python -m recipes.device_placement
    python -m recipes.device_placement --gpus=2 --only=naming,missing

Each example prints what it asks for, what happened, and its seconds. Without a
GPU, two CPU devices stand in.
"""

import contextlib
import socket
import subprocess
import sys
import time

from absl import flags

import toolkit

toolkit.cli.flags.define_devices()
flags.DEFINE_list("only", [], "Examples to run, such as naming,missing. Default: all.")
FLAGS = flags.FLAGS
say = toolkit.cli.say


def naming(first: str, second: str) -> None:
    """Devices are named by kind and number; tf.device chooses one for operations and variables."""
    import tensorflow as tf

    say(f"    logical devices: {', '.join(device.name for device in tf.config.list_logical_devices())}")
    for name in (first, second):
        with tf.device(name):
            say(f"    asked for {name}, the product is on {tf.matmul([[1.0, 2.0]], [[3.0], [4.0]]).device}")


def missing(*_: str) -> None:
    """A device that doesn't exist: with soft placement the operation runs elsewhere; without it, an error."""
    import tensorflow as tf

    def on_gpu_7(x: tf.Tensor) -> tf.Tensor:
        with tf.device("GPU:7"):
            return x * 2.0

    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(True)
    say(f"    soft: {toolkit.observe.placement.observe(on_gpu_7, tf.constant(1.0)).moved[0].because}; it ran elsewhere")
    tf.config.set_soft_device_placement(False)
    try:
        tf.function(on_gpu_7)(tf.constant(1.0))
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        say(f"    hard: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    tf.config.set_soft_device_placement(before)


def no_kernel(first: str, *_: str) -> None:
    """An operation without a kernel for its device, such as a string operation on a GPU."""
    import tensorflow as tf

    def text(x: tf.Tensor) -> tf.Tensor:
        with tf.device(first):
            return tf.strings.as_string(x)

    for kind in ("AsString", "MatMul", "NcclAllReduce"):
        say(f"    {kind} has kernels for {', '.join(sorted(toolkit.observe.placement.kernels(kind))) or 'no device'}")
    moved = toolkit.observe.placement.observe(text, tf.range(3)).moved
    say(f"    AsString on {first}: {moved[0].because if moved else 'it ran there'}")


def variables_on_the_cpu(first: str, second: str) -> None:
    """A rule that keeps variables on the CPU, where every device reads them, while operations run on each device."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        weights = tf.Variable(tf.ones((256, 256)))

    def towers(x: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for name in (first, second):
            with tf.device(name):
                results.append(tf.matmul(x, weights))
        return results

    say("    " + str(toolkit.observe.placement.observe(towers, tf.ones((8, 256)))).replace("\n", "\n    "))


def branches(*_: str) -> None:
    """Branches that don't depend on one another run at once, on as many threads as inter_op_threads says."""
    for threads in (1, 2):
        command = ["-m", "recipes.device_placement", "--only=two_branches", f"--inter_op_threads={threads}"]
        done = subprocess.run(
            [sys.executable, *command, "--intra_op_threads=1"], capture_output=True, text=True, timeout=300, check=False
        )
        found = [line.strip() for line in done.stdout.splitlines() if line.startswith("    two branches")]
        say(f"    --inter_op_threads={threads}: {found[-1] if found else done.stderr[-300:]}")


def two_branches(*_: str) -> None:
    """Two branches of one function, in a process of `branches`, because threads are set before TensorFlow starts."""
    import tensorflow as tf

    @tf.function
    def both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        left, right = x, x / 2.0
        for _turn in range(10):
            left, right = tf.matmul(left, x), tf.matmul(right, x)
        return tf.reduce_sum(left), tf.reduce_sum(right)

    given = tf.ones((700, 700)) / 700
    both(given)
    began = time.perf_counter()
    for _turn in range(5):
        left, _ = both(given)
    float(left)
    say(f"    two branches, five times: {time.perf_counter() - began:.2f} s")


def control_dependencies(*_: str) -> None:
    """Operations run in any order that their inputs allow; tf.control_dependencies orders those with side effects."""
    import tensorflow as tf

    counter = tf.Variable(0)

    @tf.function
    def ordered() -> tf.Tensor:
        with tf.control_dependencies([counter.assign_add(1)]):
            return counter.read_value()  # Inside a tf.function, automatic control dependencies keep this order.

    say(f"    counted, then read: {int(ordered())}, then {int(ordered())}")


def on_a_task(*_: str) -> None:
    """Operations pinned to a task of a cluster: two workers, both in this process here."""
    import tensorflow as tf

    connect("worker", tasks=2)
    for task in (0, 1):
        with tf.device(f"/job:worker/task:{task}"):
            say(f"    asked for task {task}, the sum is on {(tf.constant(1.0) + 2.0).device}")


def dealt_to_ps(*_: str) -> None:
    """Variables placed on two parameter servers in turn, as replica_device_setter did; strategies do it for a model."""
    import tensorflow as tf

    connect("ps", tasks=2)
    for number in range(4):
        with tf.device(f"/job:ps/task:{number % 2}"):
            say(f"    variable {number} is on {tf.Variable(float(number)).device}")


def memory(*_: str) -> None:
    """A GPU's memory: growing, a share of it, or a limit; set before TensorFlow starts."""
    inventory = toolkit.devices.take()
    for text in ("growth", "0.4", "4096", "all"):
        say(f"    --memory={text}: {toolkit.devices.Memory.parse(text)}")
    say(f"    {inventory.describe()}")


def connect(job: str, tasks: int) -> None:
    """Starts the servers of a job's tasks in this process, on loopback, and registers their devices."""
    import tensorflow as tf

    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(tasks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        cluster = tf.train.ClusterSpec({job: [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]})
    SERVERS.extend(tf.distribute.Server(cluster, job_name=job, task_index=task) for task in range(tasks))
    tf.config.experimental_connect_to_cluster(cluster, job_name="client")


SERVERS: list = []  # A server runs as long as a variable refers to it.
EXAMPLES = {
    example.__name__: example
    for example in (
        naming,
        missing,
        no_kernel,
        variables_on_the_cpu,
        branches,
        two_branches,
        control_dependencies,
        memory,
        on_a_task,
        dealt_to_ps,
    )
}


def main() -> None:
    """Flags, devices, then one example after another."""
    toolkit.devices.restart(FLAGS.visible_devices)
    unknown = [name for name in FLAGS.only if name not in EXAMPLES]
    if unknown:
        raise toolkit.errors.RequestError(
            asked=f"--only={unknown[0]}", found="there is no such example", remedy=f"Choose from {', '.join(EXAMPLES)}"
        )
    devices = toolkit.devices.configure(**{**toolkit.cli.flags.devices(), "gpus": FLAGS.gpus or 2})
    first, second = (devices.logical_devices * 2)[:2]
    for name in FLAGS.only or [name for name in EXAMPLES if name != "two_branches"]:
        say(f"{name}: {EXAMPLES[name].__doc__}")
        began = time.perf_counter()
        EXAMPLES[name](first, second)
        say(f"    {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    toolkit.cli.run(main)
