"""What a job runs on: processor, limits, disks and clock of this machine, its GPUs, and the hosts of a cluster."""

import ctypes
import datetime
import errno
import importlib.util
import json
import os
import pathlib
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import toolkit
from toolkit.cluster import check, split
from toolkit.devices.capability import build_info, support
from toolkit.devices.inventory import Gpu, shown
from toolkit.errors import ClusterError, DeviceError
from toolkit.launch.agent.ports import HeldPorts
from toolkit.launch.agent.tasks import own_addresses
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok, warning

_FILES = 1024  # File descriptors: Linux's default. A job with many tasks, or a pipeline with many files, uses hundreds.
_DOCKERS_SHARED = 64 << 20  # The size of /dev/shm in a container without --shm-size, in bytes.
_SHARED_FOR_GPUS = 1 << 30  # NVIDIA's advice for NCCL in containers: docs.nvidia.com, NCCL, "Shared memory".
_FULL, _SCARCE = 256 << 20, 2 << 30  # Free bytes: less than one checkpoint of AlexNet; less than a few of them.


def look_at_machine(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each limit that training may reach, or that there is none."""
    wrong = [f for part in (_processor, _open_files, _shared_memory, _disks, _clock) for f in part(situation)]
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


def _open_files(_: Situation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        cure = f"ulimit -n {most}"
        if 0 <= hard < _FILES:
            cure = (
                f"Have the limit raised: `nofile` in /etc/security/limits.conf; a container's --ulimit nofile={_FILES}"
            )
        yield warning("open files", f"a process may open {soft}", cure)


def _shared_memory(situation: Situation) -> Iterator[Finding]:
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
    """With a slow clock, new files look_at_machine older than old ones to rsync, make and TensorBoard."""
    installed = pathlib.Path(toolkit.__file__).stat().st_mtime
    if time.time() < installed - 86400:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="minutes")
        yield failure("clock", f"it shows {now}, which is before the toolkit was installed", "timedatectl set-ntp true")


_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # PCI: the vendor; the classes VGA controller and 3D controller.
_IMPORT_SECONDS = 120
_SEEN = "import json, tensorflow as tf; print(json.dumps([d.name for d in tf.config.list_physical_devices('GPU')]))"
# The libraries that TensorFlow opens for GPUs, by CUDA's major version, with the package of each:
# the requirements of tensorflow[and-cuda].
_LIBRARIES = {
    12: {
        "libcudart.so.12": "nvidia-cuda-runtime-cu12",
        "libcublas.so.12": "nvidia-cublas-cu12",
        "libcublasLt.so.12": "nvidia-cublas-cu12",
        "libcufft.so.11": "nvidia-cufft-cu12",
        "libcusolver.so.11": "nvidia-cusolver-cu12",
        "libcusparse.so.12": "nvidia-cusparse-cu12",
        "libnccl.so.2": "nvidia-nccl-cu12",
    }
}


def look_at_gpus(situation: Situation) -> Iterator[Finding]:
    """Yields what keeps TensorFlow from using the cards, or that nothing does."""
    inventory = situation.inventory
    if not inventory.gpus:
        yield _without_gpus(situation)
        return
    build = build_info()
    if not build.get("is_cuda_build"):
        yield failure(
            "GPU",
            f"{len(inventory.gpus)} GPUs are there, and this build of TensorFlow has no CUDA",
            "pip uninstall -y tensorflow-cpu tensorflow && pip install 'tensorflow[and-cuda]'",
        )
        return
    wrong = [*_driver(build), *_missing_libraries(build)]
    if inventory.unreadable:
        wrong.append(
            failure(
                "GPU",
                f"NVML can't read {', '.join(inventory.unreadable)}",
                "See `sudo dmesg | grep -i xid`; a GPU that fell off the bus needs a restart of the machine",
            )
        )
    wrong += _unsupported(situation, build)
    yield from wrong
    if all(finding.level != "failure" for finding in wrong):
        yield from _check_visible(situation)


def _without_gpus(situation: Situation) -> Finding:
    reason = situation.inventory.without_gpus or "NVML lists none"
    if _nvidia_on_the_bus(situation.pci):
        return failure(
            "GPU driver",
            f"an NVIDIA card is on the PCI bus, and its driver doesn't answer ({reason})",
            "Install NVIDIA's driver, or start the container with --gpus=all; then nvidia-smi must list the card",
        )
    return ok("GPU", f"none ({reason}): CPU devices stand in for them")


def _nvidia_on_the_bus(devices: pathlib.Path) -> bool:
    try:
        for device in devices.iterdir():
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    except OSError:
        pass
    return False


def _major(version: object) -> int:
    first = str(version or "").partition(".")[0]
    return int(first) if first.isdigit() else 0


def _driver(build: dict[str, Any]) -> Iterator[Finding]:
    import pynvml

    wanted = _major(build.get("cuda_version"))
    try:
        pynvml.nvmlInit()
        try:
            most = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is CUDA 12.4.
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return
    if most // 1000 < wanted:
        yield failure(
            "GPU driver",
            f"it supports CUDA {most // 1000}.{most % 1000 // 10}; TensorFlow is built for {build['cuda_version']}",
            f"Install an NVIDIA driver for CUDA {wanted}, or pip install an earlier TensorFlow",
        )


def _missing_libraries(build: dict[str, Any]) -> Iterator[Finding]:
    needed = dict(_LIBRARIES.get(_major(build.get("cuda_version")), {}))
    if cudnn := _major(build.get("cudnn_version")):
        needed[f"libcudnn.so.{cudnn}"] = f"nvidia-cudnn-cu{_major(build.get('cuda_version'))}"
    missing = [name for name in needed if not _loads(name)]
    if missing:
        packages = sorted({needed[name] for name in missing})
        yield failure(
            "CUDA libraries",
            f"{', '.join(missing)} can't be loaded; {', '.join(packages)} {'has' if len(packages) == 1 else 'have'} "
            f"{'it' if len(missing) == 1 else 'them'}",
            f"pip install 'tensorflow[and-cuda]=={metadata.version('tensorflow')}'",
        )


def _loads(name: str) -> bool:
    """Whether TensorFlow would find a library: in the packages nvidia-*, or on the loader's path."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations if found else None) or ():
        if any(pathlib.Path(folder).glob(f"*/lib/{name}")):
            return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _unsupported(situation: Situation, build: dict[str, Any]) -> Iterator[Finding]:
    """Yields a finding for each kind of visible card that this TensorFlow wasn't built for."""
    inventory = situation.inventory
    try:
        ids = shown(situation.environ, inventory)
    except DeviceError:
        return  # `environment` has a finding for this.
    kinds: dict[tuple[int, int] | None, list[Gpu]] = {}
    for card in inventory.gpus:
        if ids is None or not {str(card.index), *card.mig_uuids}.isdisjoint(ids):
            kinds.setdefault(card.capability, []).append(card)
    for capability, cards in kinds.items():
        found = support(capability, build)
        if found.found:
            make = failure if found.kernels in ("none", "left out") else warning
            yield make("GPU", f"{', '.join(each.with_capability() for each in cards)}: {found.found}", found.remedy)


def _check_visible(situation: Situation) -> Iterator[Finding]:
    try:
        expected = shown(situation.environ, situation.inventory)
        count = len(situation.inventory.gpus) if expected is None else len(expected)
    except DeviceError:
        return  # `environment` has a finding for this.
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SEEN],
            env={**situation.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield failure(
            "GPU", f"TensorFlow didn't list the GPUs within {_IMPORT_SECONDS} s", "nvidia-smi; dmesg | grep -i nvrm"
        )
        return
    try:
        found = len(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield failure("TensorFlow", f"it can't be imported: {last}", "pip install --force-reinstall tensorflow")
        return
    if found < count:
        yield failure(
            "GPU",
            f"NVML sees {count} GPUs, but TensorFlow sees {found}",
            f"TF_CPP_MIN_LOG_LEVEL=0 {sys.executable} -c 'import tensorflow as tf; tf.config.list_physical_devices()'",
        )
    elif found > count:
        yield warning("GPU", f"TensorFlow sees {found} GPUs, but NVML sees {count}", "nvidia-smi -L")
    else:
        yield ok("GPU", f"TensorFlow sees {found} of {len(situation.inventory.gpus)}")


_TIME_ERROR = 5  # adjtimex(2)'s result for a clock that isn't synchronised.
_SECONDS = 3.0  # Seconds in which a host must answer: within a site it takes milliseconds.


def look_at_network(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each task of the given cluster, or of TF_CONFIG's."""
    cluster = situation.cluster
    if cluster is None and "TF_CONFIG" in situation.environ:
        cluster = check(situation.environ["TF_CONFIG"]).cluster
    if cluster is None:
        return
    own = own_addresses()
    if len({split(cluster.address(task))[0] for task in cluster.tasks}) > 1 and not _clock_is_kept():
        yield warning(
            "clock",
            "no service synchronizes it, so times in the logs of several hosts may not agree",
            "timedatectl set-ntp true",
        )
    for task in cluster.tasks:
        yield _look_at_task(str(task), cluster.address(task), own)


def _clock_is_kept() -> bool:
    """Whether the kernel says that NTP synchronises the clock; True if it doesn't say."""
    try:
        # struct timex with modes 0, which only reads.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return True
    return state != _TIME_ERROR


def _look_at_task(task: str, address: str, own: set[str]) -> Finding:
    host, port = split(address)
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return failure(
            task,
            f"its host {host} can't be resolved ({(getattr(error, 'strerror', None) or str(error)).lower()})",
            f"getent hosts {host}; add it to DNS or /etc/hosts, or write its address in the cluster",
        )
    if any(str(answer[4][0]) in own or str(answer[4][0]).startswith("127.") for answer in answers):
        try:
            with HeldPorts() as held:
                held.given(port, task=task)
        except ClusterError as error:
            return failure(task, error.found, f"ss -ltnp 'sport = :{port}'; end that program, or choose another port")
        return ok(task, f"{address} is this machine, and its port is free")
    return _look_at_other_host(task, host, port)


def _look_at_other_host(task: str, host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except ConnectionRefusedError:
        return ok(task, f"{host} is reached; nobody listens on port {port} yet")
    except TimeoutError:
        found = f"{host} doesn't answer on port {port} within {_SECONDS:g} s"
        return failure(task, found, f"ping -c1 {host}; open port {port} in its firewall to the hosts of the cluster")
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        reason = "there is no route to it" if unreachable else (error.strerror or str(error)).lower()
        return failure(task, f"{host} can't be reached ({reason})", f"ip route get {host}")
    return ok(task, f"{host} is reached, and somebody listens on port {port}")
