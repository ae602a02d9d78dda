"""GPUs as nvidia-smi shows them, with TensorFlow's names for them; cores and memory where there is none.

    toolkit devices
    toolkit devices --watch
    toolkit devices --json

The column TF says what TensorFlow would call a card in a process started with the present environment.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.cli.console import table
from toolkit.devices.inventory import Host, Usage, host, look, tensorflow_names
from toolkit.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from toolkit.devices import Inventory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again every so many seconds [2]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch a line for each look")


def run(arguments: argparse.Namespace) -> None:
    """Reads the devices and prints them."""
    if arguments.watch is not None and not 0.1 <= arguments.watch <= 3600:
        raise RequestError(
            asked=f"--watch={arguments.watch:g}",
            found="it must be from 0.1 to 3600 seconds",
            remedy="Give, for example, 2",
        )
    host()  # The CPU load is measured from here on.
    import rich
    from rich.live import Live

    console = rich.get_console()
    if arguments.json or arguments.watch is None or not console.is_terminal:
        if not arguments.json:
            time.sleep(0.1)
        while True:
            if arguments.json:
                print(json.dumps(_data(), indent=None if arguments.watch else 2))
            else:
                console.print(_table())
            sys.stdout.flush()
            if arguments.watch is None:
                return
            time.sleep(arguments.watch)
    with Live(_table(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(arguments.watch)
            live.update(_table(), refresh=True)


def _names(environ: Mapping[str, str], inventory: "Inventory") -> tuple[dict[int, str], str]:
    """Returns TensorFlow's names of cards by nvidia-smi's numbers, and a note if there are none."""
    try:
        names = tensorflow_names(environ, inventory)
    except DeviceError as error:
        return {}, f"TensorFlow would see no GPU: {error}"
    if names is None:
        return {}, (
            "CUDA numbers GPUs fastest first, not as nvidia-smi does. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to get "
            "nvidia-smi's numbers; recipes set it with --visible_devices."
        )
    return names, ""


def _data() -> dict[str, Any]:
    inventory, usage = look()
    names, remark = _names(os.environ, inventory)
    return {
        "gpus": [{**dataclasses.asdict(each), "tensorflow": names.get(each.gpu.index)} for each in usage],
        "without_gpus": inventory.without_gpus,
        "unreadable": inventory.unreadable,
        "remark": remark,
        "host": dataclasses.asdict(host()),
    }


def _table() -> Any:
    from rich.console import Group

    inventory, usage = look()
    names, remark = _names(os.environ, inventory)
    parts: list[Any] = []
    if usage:
        parts += [_gpus(usage, names), _uuids(usage)]
        if any(each.processes for each in usage):
            parts += [_processes(usage)]
    else:
        parts += [f"No GPU ({inventory.without_gpus or 'NVML lists none'})."]
    parts += [f"NVML can't read {each}." for each in inventory.unreadable if usage]
    return Group(*parts, *([remark] if usage and remark else []), _words(host()))


def _gpus(usage: tuple[Usage, ...], names: dict[int, str]) -> Any:
    shown = table("GPU>", "TF", "name", "PCI", "memory, MiB>", "busy>", "temp.>", "power, W>")
    for each in usage:
        watts = f"{_or_dash(each.watts, '.0f')} / {_or_dash(each.watts_limit, '.0f')}"
        shown.add_row(
            str(each.gpu.index),
            names.get(each.gpu.index, "-"),
            each.gpu.name,
            (each.pci or "-").removeprefix("00000000:"),
            f"{_or_dash(each.memory_used_mib, ',d')} / {each.gpu.memory_mib:,}",
            "-" if each.utilisation is None else f"{each.utilisation} %",
            "-" if each.temperature is None else f"{each.temperature} C",
            watts,
        )
    return shown


def _uuids(usage: tuple[Usage, ...]) -> Any:
    shown = table("GPU>", "UUID")
    for each in usage:
        for number, uuid in enumerate((each.gpu.uuid, *each.gpu.mig_uuids)):
            shown.add_row("" if number else str(each.gpu.index), uuid)
    return shown


def _processes(usage: tuple[Usage, ...]) -> Any:
    shown = table("GPU>", "process>", "name", "memory, MiB>")
    for each in usage:
        for process in each.processes:
            shown.add_row(
                str(each.gpu.index), str(process.pid), process.name or "?", _or_dash(process.memory_mib, ",d")
            )
    return shown


def _or_dash(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _words(seen: Host) -> str:
    cores = f"{seen.cores} cores" if seen.cores == seen.cores_in_all else f"{seen.cores} of {seen.cores_in_all} cores"
    return (
        f"{cores}, {seen.cpu_percent:.0f} % busy; memory {seen.memory_used_mib / 1024:.1f} of "
        f"{seen.memory_mib / 1024:.1f} GiB used."
    )
