"""How long a checkpoint stops training: written in the training thread, and while training goes on.

    python -m benchmarks.checkpoint_pause [--weights=34_000_000] [--rounds=5] [--directory=DIR]

A model of FC layers with Adam on one device: a checkpoint has three times its weights. In each round both ways save
once, in turn, between two steps of training. The figure is the median of the rounds' ratios of seconds for which
training waits; steps that are trained while a checkpoint is written are shown beside steps that have the machine for
themselves.
"""

import pathlib
import statistics
import tempfile
import time

from absl import flags

import toolkit

_WEIGHTS = flags.DEFINE_integer("weights", 34_000_000, "Of the model.", lower_bound=10_000)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Pairs to run.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", None, "On the disk to measure; a temporary directory unless given.")
_LAYERS = 4


def main() -> None:
    """Runs the pairs and prints each ratio."""
    import keras
    import numpy as np

    from toolkit.training import state
    from toolkit.training.checkpointer import check_finite
    from toolkit.training.checkpoints import Checkpoint, CheckpointStore, Writing
    from toolkit.training.restore import RunProcesses

    width = int((_WEIGHTS.value / _LAYERS) ** 0.5)
    model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(_LAYERS))])
    model.compile(keras.optimizers.Adam(1e-6), "mse")
    x = np.ones((4, width), "float32")

    def step() -> float:
        began = time.perf_counter()
        model.train_on_batch(x, x)
        return time.perf_counter() - began

    step(), step()
    processes = RunProcesses(model.distribute_strategy)
    steps = 0
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as folder:
        store = CheckpointStore(pathlib.Path(folder), keep=2)

        def save(*, waits: bool) -> tuple[float, list[float]]:
            """Returns the seconds for which training waited, and those of the steps until the checkpoint was there."""
            nonlocal steps
            steps += 1
            began = time.perf_counter()
            arrays = state.capture(model)
            check_finite(model, arrays, processes, step=steps, good=None, directory=folder)
            writing = Writing(store, Checkpoint(step=steps, arrays=arrays, metadata={}), end_of_epoch=False)
            if waits:
                writing.finish()
            blocked, during = time.perf_counter() - began, []
            while not writing.ended:
                during.append(step())
            writing.finish()
            return blocked, during

        print(f"{sum(v.nbytes for v in state.capture(model).values()) / 1e6:.0f} MB")
        ratios = []
        for number in range(_ROUNDS.value):
            alone = statistics.median(step() for _ in range(5))
            found = {waits: save(waits=waits) for waits in ((True, False) if number % 2 else (False, True))}
            ratios.append(found[False][0] / found[True][0])
            during = found[False][1] or [float("nan")]
            print(
                f"round {number + 1}: {found[True][0]:.2f} and {found[False][0]:.3f} s, ratio {ratios[-1]:.3f}; "
                f"a step {alone:.2f} s, while a checkpoint is written {statistics.median(during):.2f} s",
                flush=True,
            )
    low, high = min(ratios), max(ratios)
    print(f"while training goes on / in its thread: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    toolkit.cli.run(main)
