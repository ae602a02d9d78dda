"""Processor, limits, disks and the clock."""

import datetime
import os
import pathlib
import platform
import resource
import shlex
import shutil
import time
from collections.abc import Iterator

import toolkit
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok, warning

__all__ = ["look"]

_FILES = 1024  # File descriptors: Linux's default. A job with many tasks, or a pipeline with many files, uses hundreds.
_DOCKERS_SHARED = 64 << 20  # The size of /dev/shm in a container without --shm-size, in bytes.
_SHARED_FOR_GPUS = 1 << 30  # NVIDIA's advice for NCCL in containers: docs.nvidia.com, NCCL, "Shared memory".
_FULL, _SCARCE = 256 << 20, 2 << 30  # Free bytes: less than one checkpoint of AlexNet; less than a few of them.


def look(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each limit that training may reach, or that there is none."""
    wrong = [f for part in (_processor, _files, _shared, _disks, _clock) for f in part(situation)]
    yield from wrong
    if not wrong:
        free = shutil.disk_usage(situation.here).free
        yield ok("machine", f"{situation.inventory.cores} cores, {free / 1e9:,.0f} GB free here")


def _processor(situation: Situation) -> Iterator[Finding]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    try:
        text = situation.cpuinfo.read_text(errors="replace")
    except OSError:
        return
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), None)
    if flags is not None and "avx" not in flags:
        yield failure(
            "processor",
            "it has no AVX, which TensorFlow's packages need: `import tensorflow` ends in `Illegal instruction`",
            "Use another machine, or pass the host's processor through to the virtual machine (QEMU: -cpu host)",
        )


def _files(_: Situation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        cure = f"ulimit -n {most}"
        if 0 <= hard < _FILES:
            cure = (
                f"Have the limit raised: `nofile` in /etc/security/limits.conf; a container's --ulimit nofile={_FILES}"
            )
        yield warning("open files", f"a process may open {soft}", cure)


def _shared(situation: Situation) -> Iterator[Finding]:
    needed = _SHARED_FOR_GPUS if len(situation.inventory.gpus) > 1 else _DOCKERS_SHARED + 1
    try:
        size = shutil.disk_usage(situation.shared_memory).total
    except OSError:
        size = 0
    if size < needed:
        yield warning(
            "shared memory",
            f"{situation.shared_memory} holds {size >> 20} MiB, too little for NCCL or the processes of a PyDataset",
            "Start the container with --shm-size=1g, or mount -o remount,size=1g /dev/shm",
        )


def _disks(situation: Situation) -> Iterator[Finding]:
    for name, path in (("disk", situation.here), ("temporary files", situation.temporary)):
        try:
            free = shutil.disk_usage(path).free
        except OSError as error:
            yield failure(
                name, f"{path}: {(error.strerror or str(error)).lower()}", f"mkdir -p {shlex.quote(str(path))}"
            )
            continue
        if not os.access(path, os.W_OK):
            yield failure(name, f"this user may not write in {path}", "Start in a directory that can be written")
        elif free < _FULL:
            yield failure(
                name,
                f"{path} has {free / 1e6:,.0f} MB free, less than a checkpoint",
                f"du -xh {shlex.quote(str(path))} | sort -h",
            )
        elif free < _SCARCE:
            yield warning(
                name,
                f"{path} has {free / 1e9:.1f} GB free, a few checkpoints",
                f"du -xh {shlex.quote(str(path))} | sort -h",
            )


def _clock(_: Situation) -> Iterator[Finding]:
    """With a slow clock, new files look older than old ones to rsync, make and TensorBoard."""
    installed = pathlib.Path(toolkit.__file__).stat().st_mtime
    if time.time() < installed - 86400:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="minutes")
        yield failure("clock", f"it shows {now}, which is before the toolkit was installed", "timedatectl set-ntp true")
