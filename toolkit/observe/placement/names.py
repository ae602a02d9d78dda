"""Parses device names as people write them: "GPU:0", "/gpu:1", "/job:worker/task:1/device:CPU:0"."""

import re

from toolkit.errors import DeviceError

__all__ = ["device", "short"]

_LOCAL = re.compile(r"/?(?:device:)?(?P<kind>[A-Za-z]+):(?P<number>\d+)")


def device(name: str) -> str:
    """Returns the name of an existing logical device, as in `tf.config.list_logical_devices`.

    Args:
        name: Such as "GPU:0", "/CPU:1", "/device:GPU:0", or with job and task.

    Raises:
        DeviceError: There is no such device; the message lists those that are there.
    """
    import tensorflow as tf

    there = [logical.name for logical in tf.config.list_logical_devices()]
    local = _LOCAL.fullmatch(name) if isinstance(name, str) else None
    wanted = f"/device:{local['kind'].upper()}:{int(local['number'])}" if local else name
    found = [full for full in there if full == wanted or (local and full.endswith(wanted))]
    if not found:
        raise DeviceError(
            asked=f"device {name!r}",
            found=f"the logical devices of this process are {', '.join(map(short, there))}",
            remedy="Name one of them, or make more with toolkit.devices.configure(gpus=...)",
        )
    return found[0]  # This process's own devices come first.


def short(name: str) -> str:
    """Returns a device's short name: "GPU:0", or "worker:1 CPU:0" for another task's."""
    parts = dict(part.split(":", 1) for part in name.strip("/").split("/") if ":" in part)
    here = parts.get("job", "localhost") == "localhost"
    where = "" if here else f"{parts['job']}:{parts.get('task', '0')} "
    return where + parts.get("device", name)
