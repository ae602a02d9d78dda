"""A function in the place of a script: run in every task, its results brought back.

    toolkit.launch.run(function, 3, workers=2)

cloudpickle takes functions along that no module holds, such as a notebook's. What runs in a task is `called`.
"""

import pickle
import sys
from collections.abc import Callable
from typing import Any

from toolkit.errors import LaunchError, TaskFailed

__all__ = ["run"]

_MOST = 64 << 20  # Bytes of a function with its arguments.


def run(function: Callable[..., Any], *args: Any, **spec: Any) -> list[Any]:
    """Runs a function in the tasks of a job, as `toolkit launch` runs a script, and returns what each task returned.

    The function makes its strategy itself: `toolkit.strategies.create()`. It may be a notebook's; what it uses of other
    modules must be importable where the tasks run. Ctrl-C, or a notebook's stop button, ends the tasks.

    Args:
        function: Called in every task.
        args: Its arguments, for every task the same.
        spec: Attributes of a `JobSpec` but the command: workers=2, on="slurm", max_restarts=1 ...

    Returns:
        A result for each task, in the order chief, workers, ps, evaluator; None for one that doesn't return, as a ps;
        at a rendezvous all of them where the chief is, and an empty list on the other hosts.

    Raises:
        LaunchError: What was asked can't be done, or the function or its arguments can't be sent.
        TaskFailed: The first task that failed, with its last lines; its cause is what the function raised.
        JobStopped: This process received a signal to stop.
    """
    import cloudpickle

    from toolkit.launch.here import new_job_id, run_here
    from toolkit.launch.job.spec import JobSpec
    from toolkit.launch.records.record import Record, log_directory

    made = JobSpec(command=("-m", "toolkit.launch.task.called"), **spec)
    try:
        work = cloudpickle.dumps((function, args))
    except Exception as error:  # Whatever an object's own __reduce__ raises.
        raise LaunchError(
            asked=f"{getattr(function, '__qualname__', function)} is to run in the job's tasks",
            found=f"it or its arguments can't be pickled ({error})",
            remedy="Create such objects, for example models and data sets, inside the function",
        ) from error
    if len(work) > _MOST:
        raise LaunchError(
            asked=f"{getattr(function, '__qualname__', function)} is to run in the job's tasks",
            found=f"it and its arguments take {len(work) >> 20} MiB, and the limit is {_MOST >> 20} MiB",
            remedy="Read large data from files inside the function",
        )
    logs, job_id = log_directory(made.log_dir), new_job_id()
    record = Record(logs)
    record.start_job(made, job_id)
    record.keep_call(pickle.dumps((sys.path, work)))
    try:
        if made.place == "slurm":
            from toolkit.launch.backends import slurm

            slurm.submit(made, job_id, follow=True, logs=logs)
        else:
            run_here(made, job_id=job_id, logs=logs)
    except TaskFailed as error:
        raise error from next((found for good, found in _results(record).values() if not good), None)
    tasks: list[str] = next((e["tasks"] for e in reversed(record.so_far()) if e["event"] == "attempt"), [])
    found = _results(record)
    return [found[name][1] if name in found else None for name in tasks]


def _results(record: Any) -> dict[str, tuple[bool, Any]]:
    """Returns, by tasks, whether the function returned, and what it returned or raised."""
    import cloudpickle

    return {name: cloudpickle.loads(data) for name, data in record.results().items()}
