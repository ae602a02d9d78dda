"""What the installed TensorFlow can do on a card of some compute capability: with its own kernels, and with XLA.

TensorFlow's build lists what its kernels were compiled for. "sm_80" is a binary, which runs on cards of the same major
version and the same or a later minor one. "compute_90" is a binary and PTX, which the driver compiles for later cards
(TensorFlow's configure.py; "Binary Compatibility" and "PTX Compatibility" in NVIDIA's CUDA programming guide). "sm_90a"
runs on 9.0 alone, and "sm_100f" on its family (PTX ISA, `.target`).

XLA uses none of that: it writes PTX for the card that it finds, in the PTX version of its CUDA. If that version doesn't
know the card, LLVM ends the process: "PTX version 8.5 does not support target 'sm_120'" (tensorflow/tensorflow#111958).
"""

import dataclasses
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal

_ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# The first CUDA whose PTX knows a card: the PTX ISA's release history. Every CUDA 12 knows 9.0 and what came before.
_KNOWN_TO_CUDA_12 = (9, 0)
_FIRST_CUDA = {
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
# Before 2.21, "compute_90" made PTX for sm_90a, which later cards refuse: CUDA_ERROR_INVALID_PTX
# (tensorflow/tensorflow#97387). In the wheels' libtensorflow_cc, 1149 kernels of 1397 are so in 2.20.0, none in 2.21.0.
_FIRST_EXACT_PTX = (9, 0)
_PTX_FOR_LATER_CARDS = (2, 21)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """What TensorFlow can do on a card.

    Attributes:
        kernels: How its own kernels run: as they are ("binary"), compiled by the driver when they first run ("ptx"), or
            not at all ("none"). TensorFlow leaves cards out that are older than all of its binaries ("left out").
            "unknown" where the card or the build doesn't say enough.
        xla: Whether XLA can compile for the card; True where that is unknown.
        found: What is wrong, in sentences without the last full stop; "" if nothing is.
        remedy: What to do about it; "" if there is nothing to do.
    """

    kernels: Literal["binary", "ptx", "none", "left out", "unknown"]
    xla: bool
    found: str = ""
    remedy: str = ""


def build_info() -> dict[str, Any]:
    """Returns what TensorFlow was built with and its "version", read from its files: importing it takes seconds.

    The rest is `tf.sysconfig.get_build_info()`. Empty where TensorFlow isn't installed.
    """
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:
        return {}
    file = pathlib.Path(found.origin).parent / "python" / "platform" / "build_info.py"
    spec = importlib.util.spec_from_file_location("toolkit_build_info", file)
    if spec is None or spec.loader is None or not file.exists():
        return {}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        version = metadata.version("tensorflow")
    except metadata.PackageNotFoundError:  # Another build's name, such as tensorflow-cpu.
        version = ""
    return {**module.build_info, "version": version}


def support(capability: tuple[int, int] | None, build: Mapping[str, Any]) -> Support:
    """Returns what a TensorFlow can do on a card.

    Args:
        capability: The card's compute capability, such as (12, 0); None if it is unknown.
        build: As `build_info` returns it. A build for CPUs lists no capabilities.
    """
    listed = [_ENTRY.fullmatch(str(each)) for each in build.get("cuda_compute_capabilities") or ()]
    entries = [((int(each[2]), int(each[3])), each[1] == "compute", each[4]) for each in listed if each is not None]
    if capability is None or not entries:
        return Support(kernels="unknown", xla=True)
    name = f"TensorFlow {build.get('version', '')}".rstrip()
    binary = any(_runs(made_for, suffix, capability) for made_for, _, suffix in entries)
    ptx = [made_for for made_for, has_ptx, suffix in entries if has_ptx and not suffix and made_for <= capability]
    version = _numbers(build.get("version"))
    exact = bool(ptx and version) and min(ptx) >= _FIRST_EXACT_PTX and version < _PTX_FOR_LATER_CARDS
    lowest = min(made_for for made_for, _, _ in entries)
    if capability < lowest:
        return Support(
            kernels="left out",
            xla=False,
            found=f"{name} leaves it out: it is built for compute capability {_named(lowest)} and later",
            remedy=f"Use another card, or build TensorFlow from its source for compute capability {_named(capability)}",
        )
    if not binary and (exact or not ptx):
        cure = f"pip install 'tensorflow[and-cuda]>={_named(_PTX_FOR_LATER_CARDS)}'"
        return Support(
            kernels="none",
            xla=False,
            found=f"{'most' if exact else 'the'} operations of {name} have no code that runs on it",
            remedy=f"{cure if exact else f'Install a TensorFlow built for compute capability {_named(capability)}'}, "
            "or choose another card with CUDA_VISIBLE_DEVICES",
        )
    cuda, first = _numbers(build.get("cuda_version")), _FIRST_CUDA.get(capability)
    xla = capability <= _KNOWN_TO_CUDA_12 or (cuda >= first if first and cuda else binary)
    found, remedy = [], []
    if not binary:
        found.append(
            f"{name} has no binaries for it: the driver compiles each operation when it first runs, which can take "
            "half an hour, once"
        )
        remedy.append("Keep what the driver compiles: export CUDA_CACHE_MAXSIZE=4294967296")
    if not xla:
        built = f", built with CUDA {_named(cuda)}," if cuda else ""
        needed = f"with CUDA {_named(first)} or later" if first else f"for compute capability {_named(capability)}"
        found.append(
            f"XLA of {name}{built} can't compile for it and ends the process: under a strategy of the toolkit, "
            'jit_compile="auto" doesn\'t use XLA'
        )
        remedy.append(
            "Create the strategy with toolkit.strategies.create(), or compile with jit_compile=False. For XLA, choose "
            f"another card with CUDA_VISIBLE_DEVICES, or install a TensorFlow built {needed}: a newer "
            "release, NVIDIA's or your own"
        )
    return Support(kernels="binary" if binary else "ptx", xla=xla, found=". ".join(found), remedy=". ".join(remedy))


def _runs(made_for: tuple[int, int], suffix: str, capability: tuple[int, int]) -> bool:
    if suffix == "a":
        return capability == made_for
    return capability[0] == made_for[0] and capability[1] >= made_for[1]


def _numbers(version: object) -> tuple[int, ...]:
    """Returns (12, 5) of "12.5.1"; () of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", str(version or ""))
    return (int(found[1]), int(found[2])) if found else ()


def _named(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
