"""The commands for jobs that were launched: `toolkit jobs`, `logs`, `attach`, `stop` and `stacks`."""

import argparse
import json
import shutil
import sys
import time

from toolkit.launch import Job, jobs
from toolkit.launch.jobs import Entry
from toolkit.launch.supervisor.stacks import folded
from toolkit.support import goodput
from toolkit.support.words import counted


class Jobs:
    """List the jobs that you launched from this machine: on it, by ssh or in a queue. Those of this directory come
    first. In each list the newest is the last; a running job shows the process of each task.

    Watch a running job with `toolkit attach ID`, and end it with `toolkit stop ID`. A job is dead when its machine or
    its launcher is gone. Goodput is the share of its time in which training made progress; --json has the rest.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("--json", action="store_true", help="print a list of objects for other programs")
        parser.add_argument(
            "--forget",
            nargs="*",
            metavar="ID",
            help="take these jobs off the list, or all that have ended; their files stay",
        )

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Prints a table, or JSON.

        Raises:
            LaunchError: There is no job of that name, or it runs and can't be forgotten.
        """
        known = jobs.present()
        if given.forget is not None:
            named = [jobs.find(name) for name in given.forget]
            ended = named or [job for job in known if not job.alive and (job.over or not job.elsewhere)]
            for job in ended:
                jobs.forget(job)
            print(f"Forgot {counted(len(ended), 'job')}")
            return
        if given.json:
            found = [
                {
                    **{name: getattr(job, name) for name in ("id", "directory", "host", "number", "at", "started_in")},
                    "queue": job.queue_name,
                    "state": job.state(),
                    "goodput": goodput.summary(goodput.of_events(job.record.new())),
                    "command": jobs.command(job),
                    "processes": job.processes if job.alive else {},
                }
                for job in known
            ]
            print(json.dumps(found, indent=2))
            return
        if not known:
            print("No job has been launched here.")
        for near, heading in ((True, "Started in this directory:"), (False, "Started elsewhere:")):
            if rows := [job for job in known if job.near is near]:
                print(heading)
                _show(rows, near=near)


class Logs:
    """Show what the tasks of a job wrote in its last attempt, or in the one that --attempt names.

        toolkit logs                        for the job that you started last in this directory
        toolkit logs ID -f --task=worker:1

    ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        _add_job(parser)
        parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
        parser.add_argument(
            "--task", action="append", default=[], metavar="TASK", help="show only this task; may be repeated"
        )
        parser.add_argument("--attempt", type=int, metavar="N", help="attempt to show [the last]")
        parser.add_argument("--native_logs", action="store_true", help="TensorFlow's own notes, too")

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Prints the logs.

        Raises:
            LaunchError: There is no such job, task or attempt.
        """
        found = jobs.find(given.job)
        job = Job(found)
        if not job.attempts() and not found.alive and (written := found.record.beginnings()):
            print(written)
        elif given.follow:
            job.follow(show=given.task or ["all"], native_logs=given.native_logs)
        else:
            job.show(given.task, attempt=given.attempt, native_logs=given.native_logs)


class Attach:
    """Watch a running job on this terminal until it ends; the exit code is the job's. Ctrl-C leaves the job running.

        toolkit attach [ID]

    ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that
    you started in this directory.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        _add_job(parser)
        parser.add_argument(
            "--show", action="append", default=[], metavar="TASK", help="as of `toolkit launch`; may be repeated"
        )

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Watches the job.

        Raises:
            LaunchError: There is no such job.
            TaskFailed: It failed.
            JobStopped: It was stopped, or this program was told to.
        """
        show = [name for names in given.show for name in names.split(",")]
        Job(jobs.find(given.job)).follow(show=show, lines=10)


class Stop:
    """End a job. Its tasks are asked to end, and get time to write a checkpoint.

        toolkit stop [ID]

    ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that
    you started in this directory, of those that run.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        _add_job(parser)

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Ends the job, and prints how it ended.

        Raises:
            LaunchError: There is no such job, or it can't be ended from here.
        """
        job = jobs.find(given.job, runs=True)
        if not job.state().startswith("on ") and not job.alive:
            print(f"Job {job.id} had ended already: {job.state()}")
        else:
            print(f"Job {job.id}: {Job(job).stop()}")


class Stacks:
    """Show where the tasks of a running job are: each one's Python stacks, and which tasks the others wait for.

        toolkit stacks [ID]

    ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that
    runs. Frames of libraries are folded here; the tasks' logs have the whole stacks. The job goes on. Where tasks
    exchange by NCCL, what NCCL reports on its ranks follows.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        _add_job(parser)

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Prints the stacks.

        Raises:
            LaunchError: There is no such job, it doesn't run, or it doesn't answer.
        """
        words, found = Job(jobs.find(given.job, runs=True)).where()
        for task, text in found.items():
            print(f"--- {task} ---\n{folded(text.strip()) or '(it did not answer)'}\n")
        print(words)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="ID", help="the job [the newest that you started in this directory]")


def _show(found: list[Entry], *, near: bool) -> None:
    rows = [("job", "state", "age", "goodput", "command")]
    for job in found:
        state = job.state() + (f", {job.queue.name} {job.number}" if job.queue else "")
        where = "" if near else f"{job.started_in or job.directory}: "
        useful = goodput.summary(goodput.of_events(job.record.new()))
        share = f"{useful['share']:.0%}" if useful else ""
        rows.append((job.id, state, _age(time.time() - job.at), share, where + jobs.command(job)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # On a terminal each line stays one line; a pipe gets everything.
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row, entry in zip(rows, [None, *found], strict=True):
        line = "  ".join(f"{text:{width}}" for text, width in zip(row[:4], widths[:4], strict=True))
        _print(f"  {line}  {' '.join(row[4].split())}", most)
        if entry is not None and near and entry.alive and entry.processes:
            _print("    " + ", ".join(f"{task} is process {pid}" for task, pid in entry.processes.items()), most)


def _print(line: str, most: int | None) -> None:
    print(line if most is None or len(line) <= most else f"{line[: most - 3]}...")


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
