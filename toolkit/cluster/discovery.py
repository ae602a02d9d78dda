"""Finds this process's cluster: from a file, TF_CONFIG, an srun step, mpirun, or an Indexed Job of Kubernetes."""

import json
import logging
import os
from collections.abc import Mapping

from toolkit.cluster.check import check, parse
from toolkit.cluster.sources import kubernetes, open_mpi, slurm
from toolkit.cluster.spec import Cluster, Membership, Task
from toolkit.errors import ClusterError

__all__ = ["discover", "load", "read_file", "require"]

_LOG = logging.getLogger(__name__)
_LONGEST = 10_000_000  # The most characters of a file, enough for a hundred thousand tasks.


def discover(
    environ: Mapping[str, str], *, file: str | os.PathLike[str] | None = None, task: str | None = None
) -> Membership | None:
    """Finds this process's cluster and its task.

    Args:
        environ: The process's environment, `os.environ` as a rule.
        file: A file with {"cluster": ...}, such as those in tf_configs/; it goes before everything else.
        task: Which task this process is, such as "worker:1". Unless given, what the file says, or
            else TF_CONFIG. Given without a file, it goes before the task in TF_CONFIG.

    Returns:
        None where the process was given no cluster. A TF_CONFIG with neither cluster nor task, such as "", "{}" or
        '{"environment": "cloud"}', gives none.

    Raises:
        ClusterError: What there is can't be used. Nothing further down the list is tried then.
    """
    config = environ.get("TF_CONFIG", "")
    if _says_nothing(config):
        config = ""
    if file is not None:
        found = parse(read_file(file), source=os.fspath(file), task_required=False)
        described = found.task or (check(config).task if config else None)
        return _membership(found.sound, task, described, source=os.fspath(file))
    if config:
        found = parse(config, source="TF_CONFIG", task_required=task is None)
        for note in found.notes:
            _LOG.warning("TF_CONFIG: %s", note)
        return _membership(found.sound, task, found.task, source="TF_CONFIG")
    if task is not None:
        raise ClusterError(
            asked=f"this process is given the task {task!r}",
            found="neither a file nor TF_CONFIG describes its cluster",
            remedy="Also name a file with the cluster, or leave the task out",
        )
    return slurm.membership(environ) or open_mpi.membership(environ) or kubernetes.membership(environ)


def _says_nothing(config: str) -> bool:
    if not config.strip():
        return True
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "cluster" not in value and "task" not in value


def require(
    environ: Mapping[str, str], *, file: str | os.PathLike[str] | None = None, task: str | None = None
) -> Membership:
    """Does the same as `discover`, for programs that need a cluster.

    Raises:
        ClusterError: `discover` raises it, or nothing describes a cluster.
    """
    found = discover(environ, file=file, task=task)
    if found is None:
        raise ClusterError(
            asked="this program is one of several processes that train together",
            found="nothing says who takes part: TF_CONFIG is not set",
            remedy="Start it with toolkit launch --workers=2 -m MODULE, set TF_CONFIG, or name a file of tf_configs/",
        )
    return found


def load(file: str | os.PathLike[str]) -> Cluster:
    """Returns the cluster that a file describes; tf_configs/ has samples.

    Raises:
        ClusterError: It can't be read, or something is wrong with it.
    """
    return parse(read_file(file), source=os.fspath(file), task_required=False).sound


def read_file(file: str | os.PathLike[str]) -> str:
    """Returns the text of a cluster file.

    Raises:
        ClusterError: It can't be read.
    """
    try:
        with open(file, encoding="utf-8-sig") as stream:
            text = stream.read(_LONGEST + 1)
        fault = f"it has more than {_LONGEST:,} characters" if len(text) > _LONGEST else ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        fault = f"it can't be read: {reason}"
    if fault:
        raise ClusterError(
            asked=f"{str(file)!r} should describe a cluster",
            found=fault,
            remedy="Name a file such as tf_configs/local_two_workers.json",
        )
    return text


def _membership(cluster: Cluster, asked: str | None, described: Task | None, *, source: str) -> Membership:
    own = Task.parse(asked) if asked is not None else described
    if own is None:
        raise ClusterError(
            asked=f"{source} describes a cluster of {len(cluster.tasks):,} tasks",
            found="nothing says which of them this process is",
            remedy=f"Name it, or set TF_CONFIG's task. The tasks are {cluster.listed()}",
        )
    cluster.tf_config(own)  # Raises if the cluster has no such task.
    return Membership(cluster=cluster, task=own, source=source)
