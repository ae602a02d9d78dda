"""How long a step takes, and where its time goes.

`StepTimer` measures every step, and the bytes that the network brought. `Profiler` profiles a few, and writes a profile
for TensorBoard if asked to. At each moment of the profiled steps exactly one of these holds, the first that applies:

    compute        an operation of the model runs on some device of this process
    communication  values of several replicas are being put together; or, on several replicas, nothing runs: one
                   waits for the others, or for the network
    input          the next batch is being waited for
    other          Python between steps: callbacks, and starting the step; on one replica also waiting within it

So communication and input are what isn't hidden behind computing.
"""

import bisect
import contextlib
import dataclasses
import itertools
import logging
import pathlib
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import psutil
import tensorflow as tf

from toolkit.cluster import Membership
from toolkit.training.progress import Progress

_LOG = logging.getLogger(__name__)
_FIRST = 4  # Steps that trace, compile and allocate. The profiled steps end before speed is measured.
_STEPS = 5
STEP = "toolkit_step"  # The name of the profiler's Trace around each step.
# Of one where a step's time ends: the next begins, or the callbacks of an epoch's last one are over.
END = "toolkit_end"
_INPUT = "IteratorGetNextOp::DoCompute"
_COLLECTIVES = ("Collective", "NcclAllReduce", "ncclDevKernel", "ncclKernel")
_DEVICE_PLANE = "/device:GPU"

Interval = tuple[int, int]  # Begin and end, in picoseconds.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Milliseconds of a step, the mean of the profiled steps.

    Attributes:
        steps: How many were profiled.
        milliseconds: Of a step; the next four are its parts, as said above.
        compute, communication, input, other: These parts.
        between: Of other, the time between steps: callbacks, and starting the next step.
        exchanging: In which some exchange between replicas is under way, hidden behind computing or not.
        hidden: Of those, in which something is computed.
        exchanges: How many there are in a step; 0 where TensorFlow doesn't say.
    """

    steps: int
    milliseconds: float
    compute: float
    communication: float
    input: float
    other: float
    between: float = 0.0
    exchanging: float = 0.0
    hidden: float = 0.0
    exchanges: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers by name, rounded to a microsecond."""
        return {name: round(value, 3) for name, value in dataclasses.asdict(self).items()}


def read(directory: pathlib.Path, *, replicas: int) -> Breakdown | None:
    """Reads the newest profile in a directory; None if it has no whole step.

    Args:
        directory: What was given to the profiler: it holds plugins/profile/TIME/HOST.xplane.pb.
        replicas: In all processes.
    """
    # TensorFlow documents the file, but not the place of its class: tests/training/test_profiler.py fails if that
    # moves.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        return None
    space = xplane_pb2.XSpace()
    space.ParseFromString(files[-1].read_bytes())
    return _breakdown(list(_events(space)), replicas)


@dataclasses.dataclass(frozen=True)
class _Event:
    plane: str
    line: str
    name: str
    begin: int
    end: int


def _events(space: Any) -> Iterator[_Event]:
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns * 1000 + event.offset_ps
                name = plane.event_metadata[event.metadata_id].name
                yield _Event(plane.name, line.name, name, begin, begin + event.duration_ps)


def _breakdown(events: list[_Event], replicas: int) -> Breakdown | None:
    steps = sorted((event.begin, event.end) for event in events if event.name.startswith(STEP))
    if not steps:
        return None
    # A step lasts until the next begins. Of steps that were interrupted none has an end.
    end = max([steps[-1][1], *(event.begin for event in events if event.name.startswith(END))])
    window = (steps[0][0], end)
    on_gpus = any(event.plane.startswith(_DEVICE_PLANE) for event in events)
    compute: list[Interval] = []
    collective: list[Interval] = []
    waiting: list[Interval] = []
    exchanges = 0
    for event in events:
        if event.name.startswith(_INPUT):
            waiting.append((event.begin, event.end))
        elif _is_operation(event, on_gpus):
            communicates = any(word in event.name for word in _COLLECTIVES)
            (collective if communicates else compute).append((event.begin, event.end))
        elif event.line.startswith("collective_ops"):
            collective.append((event.begin, event.end))
            exchanges += "/Collective" in event.name or event.name.startswith("CollectiveReduce")
    parts: dict[str, int] = {}
    left = [window]
    kinds = {"compute": compute, "communication": collective, "input": waiting}
    for name, intervals in kinds.items():
        before = _length(left)
        left = _without(left, _merged(intervals))
        parts[name] = before - _length(left)
    exposed = parts["communication"]
    # The rest of a step's time on several replicas is waiting for one another.
    running = ("FunctionRun", "TFE_Py_ExecuteCancelable")
    inside = _merged((event.begin, event.end) for event in events if event.name.startswith(running))
    outside = _length(_without(left, inside))
    if replicas > 1:
        parts["communication"] += _length(left) - outside
        parts["other"] = outside
    else:
        parts["other"] = _length(left)
    exchanging = _length([window]) - _length(_without([window], _merged(collective)))
    hidden = exchanging - exposed
    scale = 1e9 * len(steps)
    return Breakdown(
        steps=len(steps),
        milliseconds=(window[1] - window[0]) / scale,
        between=outside / scale,
        exchanging=exchanging / scale,
        hidden=hidden / scale,
        exchanges=exchanges / len(steps),
        **{name: length / scale for name, length in parts.items()},
    )


def _is_operation(event: _Event, on_gpus: bool) -> bool:
    """Whether an event is an operation on one of the model's devices. With GPUs, the CPU only dispatches them."""
    if on_gpus:
        return event.plane.startswith(_DEVICE_PLANE) and event.line.startswith("Stream")
    return event.line.startswith("tf_Compute") and ":" in event.name and "::" not in event.name


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns intervals without overlaps, in order, with the same union."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _without(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Returns the first intervals without the parts covered by the second; both are in order and without overlaps."""
    left = []
    starts = [begin for begin, _ in taken]
    for begin, end in intervals:
        at = begin
        for number in range(max(0, bisect.bisect_right(starts, begin) - 1), len(taken)):
            first, last = taken[number]
            if first >= end:
                break
            if last <= at:
                continue
            if first > at:
                left.append((at, first))
            at = max(at, last)
        if at < end:
            left.append((at, end))
    return left


def _length(intervals: list[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


class Profiler(keras.callbacks.Callback):
    """Profiles some early steps, once.

    Args:
        steps: How many; 0 for five, of which only the breakdown is kept.
        keep: Where the profile is to stay, for `tensorboard --logdir`; None for nowhere.
        progress: Where training stands: a profile doesn't go across the end of an epoch. Gets the breakdown of the
            profiled steps, and its account how much of a step its data are waited for.
    """

    reads_weights = False

    def __init__(self, *, steps: int, keep: pathlib.Path | None, progress: Progress) -> None:
        super().__init__()
        self._steps = steps or _STEPS
        self._keep = keep if steps else None
        self._progress = progress
        self._seen = self._done = 0
        self._over = False
        self._trace: Any = None
        self._directory: pathlib.Path | None = None

    def _read(self) -> Breakdown | None:
        if self._directory is None:
            return None
        try:
            return read(self._directory, replicas=self.model.distribute_strategy.num_replicas_in_sync)
        except Exception as error:
            # A profile must never make a run fail.
            _LOG.warning("The profile can't be read (%s: %s)", type(error).__name__, error)
            return None
        finally:
            if self._keep is None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._done == self._steps:
            self.close()
        if self._over or self._progress.passing_over:
            return
        self._seen += 1
        if self._directory is None:
            length = self._progress.steps_per_epoch
            if self._seen <= _FIRST or (length is not None and batch + self._steps > length):
                return
            self._start()
        if not self._over:
            self._end_step()
            self._trace = tf.profiler.experimental.Trace(STEP, step_num=self._done, _r=1)
            self._trace.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._trace is None:
            return
        self._trace.__exit__(None, None, None)
        self._trace = None
        self._done += 1

    def on_test_begin(self, logs: Any = None) -> None:
        self.close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.close()

    def on_train_end(self, logs: Any = None) -> None:
        if self._keep is not None and self._directory is None and not self._over:
            _LOG.warning(
                "No profile: %d steps were asked for, and an epoch of %s has too few after the first %d",
                self._steps,
                self._progress.steps_per_epoch,
                _FIRST,
            )
        self.close()

    def close(self) -> None:
        """Ends a profile: before the next step, at the end of an epoch, or after training was interrupted."""
        if self._directory is not None and not self._over:
            self._stop()

    def _start(self) -> None:
        self._directory = self._keep or pathlib.Path(tempfile.mkdtemp(prefix="toolkit-profile-"))
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        try:
            tf.profiler.experimental.start(str(self._directory), options=options)
        except tf.errors.OpError as error:  # TensorBoard's callback profiles, or the disk is full.
            self._over = True
            _LOG.info("No breakdown of a step's time (%s)", error.message)

    def _end_step(self) -> None:
        with tf.profiler.experimental.Trace(END):
            pass

    def _stop(self) -> None:
        self._over = True
        account = self._progress.account
        with account.during("other"):
            # Where data of unknown length have ended, or at an exception, a step has begun that never ends.
            if self._trace is None:
                self._end_step()
            with contextlib.suppress(tf.errors.OpError):
                tf.profiler.experimental.stop()
            self._trace = None  # Not before: it would be a whole step of the profile.
            found = self._read()
        if found is not None:  # Otherwise that of an earlier process stays.
            self._progress.breakdown = found.as_dict()
            account.input = found.input / found.milliseconds if found.milliseconds else 0.0
        if self._keep is not None:
            _LOG.info("Profile of %d steps: tensorboard --logdir=%s", self._done, self._keep)


class StepTimer(keras.callbacks.Callback):
    """Measures the time from the end of one step to the end of the next, within an epoch.

    Args:
        member: Who this process is, by whose address its network interface is found; None where replicas share a
            process. Tasks that share an interface, as on loopback, count as many bytes each.
        warm_up: Steps at the beginning that don't count: the first ones trace and compile.
    """

    reads_weights = False

    def __init__(self, member: Membership | None = None, *, warm_up: int = 5) -> None:
        super().__init__()
        self._warm_up = warm_up
        self._interface, self._tasks = None, 1
        if member is not None:
            carriers = [interface(member.cluster.address(task)) for task in member.cluster.synchronous]
            self._interface = interface(member.cluster.address(member.task))
            self._tasks = carriers.count(self._interface)
        self._ends: list[float] = []
        self._received: list[int] = []
        self._took: list[float] = []
        self._seen = 0

    @property
    def seconds(self) -> float | None:
        """The median time of a step; None until two steps after the warm-up have ended."""
        return statistics.median(self._took) if self._took else None

    @property
    def received(self) -> float | None:
        """Bytes that a task receives in a step, with packet headers; None if no network is counted."""
        if len(self._received) < 2:
            return None
        return (self._received[-1] - self._received[0]) / (len(self._received) - 1) / self._tasks

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._ends, self._received = [], []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        self._ends.append(time.perf_counter())
        if self._interface:
            self._received.append(psutil.net_io_counters(pernic=True)[self._interface].bytes_recv)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._took += [after - before for before, after in itertools.pairwise(self._ends)]


def interface(address: str) -> str | None:
    """Returns the name of this host's network interface with an address, None if there is none.

    Args:
        address: HOST:PORT, or a host's name or address.
    """
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    if any(number.startswith("127.") for number in numbers):
        numbers.add("127.0.0.1")
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address in numbers for found in addresses):
            return name
    return None
