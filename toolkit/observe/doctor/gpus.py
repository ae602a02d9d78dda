"""GPUs: the driver, the libraries that this TensorFlow needs, and whether TensorFlow sees the cards."""

import ctypes
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from toolkit.devices.inventory import shown
from toolkit.errors import DeviceError
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok, warning

__all__ = ["libraries", "look"]

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


def look(situation: Situation) -> Iterator[Finding]:
    """Yields what keeps TensorFlow from using the cards, or that nothing does."""
    inventory = situation.inventory
    if not inventory.gpus:
        yield _without(situation)
        return
    build = _build()
    if not build.get("is_cuda_build"):
        yield failure(
            "GPU",
            f"{len(inventory.gpus)} GPUs are there, and this build of TensorFlow has no CUDA",
            "pip uninstall -y tensorflow-cpu tensorflow && pip install 'tensorflow[and-cuda]'",
        )
        return
    wrong = [*_driver(build), *_missing(build)]
    if inventory.unreadable:
        wrong.append(
            failure(
                "GPU",
                f"NVML can't read {', '.join(inventory.unreadable)}",
                "See `sudo dmesg | grep -i xid`; a GPU that fell off the bus needs a restart of the machine",
            )
        )
    yield from wrong
    if not wrong:
        yield from _check_visible(situation)


def libraries(build: dict[str, Any]) -> dict[str, str]:
    """Returns the libraries that a build of TensorFlow opens, each with its package."""
    needed = dict(_LIBRARIES.get(_major(build.get("cuda_version")), {}))
    if cudnn := _major(build.get("cudnn_version")):
        needed[f"libcudnn.so.{cudnn}"] = f"nvidia-cudnn-cu{_major(build.get('cuda_version'))}"
    return needed


def _without(situation: Situation) -> Finding:
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


def _build() -> dict[str, Any]:
    """The CUDA version of TensorFlow's build, read from its file: importing TensorFlow takes seconds."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:
        return {}
    file = pathlib.Path(found.origin).parent / "python" / "platform" / "build_info.py"
    spec = importlib.util.spec_from_file_location("toolkit_build_info", file)
    if spec is None or spec.loader is None or not file.exists():
        return {}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.build_info)


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


def _missing(build: dict[str, Any]) -> Iterator[Finding]:
    needed = libraries(build)
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
