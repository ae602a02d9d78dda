"""Where everything ran: operations, copies between devices, and variables."""

import collections
import dataclasses

from toolkit.observe.placement.names import short

__all__ = ["Copy", "Operation", "Report", "Variable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a traced function.

    Attributes:
        name: Its name in the function, such as "fc1/MatMul".
        kind: The kind of operation, such as "MatMul".
        asked: The device that tf.device named, in full or in part; "" where none was.
        ran: The full name of the device that it runs on; None where TensorFlow folded it into others beforehand.
        because: Why `ran` is another device than asked; "" where it isn't.
        added: Whether TensorFlow put it there, for a loop or a faster form; copies aren't listed.
    """

    name: str
    kind: str
    asked: str = ""
    ran: str | None = None
    because: str = ""
    added: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that is copied from one device to another, once for each copy.

    Attributes:
        tensor: Its name in the function, such as "fc1/MatMul:0".
        source: Full name of the device it is made on.
        target: Full name of the device it is needed on.
        bytes: The tensor's size; None where its shape isn't known before it runs.
    """

    tensor: str
    source: str
    target: str
    bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable that the function reads or writes.

    Attributes:
        name: The name that TensorFlow or Keras gives it.
        device: Full name of the device that holds it.
        bytes: The size of its value.
    """

    name: str
    device: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `observe`; `print` it."""

    operations: tuple[Operation, ...]
    copies: tuple[Copy, ...]
    variables: tuple[Variable, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of operations on each device, by the device's full name."""
        return dict(collections.Counter(each.ran for each in self.operations if each.ran is not None))

    @property
    def moved(self) -> tuple[Operation, ...]:
        """Returns the operations that soft placement moved to another device than asked."""
        return tuple(each for each in self.operations if each.because)

    def __str__(self) -> str:
        lines = []
        for where in sorted({*self.counts, *(each.device for each in self.variables)}):
            kinds = collections.Counter(each.kind for each in self.operations if each.ran == where)
            most = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(4))
            held = [each.bytes for each in self.variables if each.device == where]
            holds = f"; {len(held)} variables, {sum(held) / 2**10:,.1f} KiB" if held else ""
            lines.append(f"{short(where)}: {self.counts.get(where, 0)} operations ({most}){holds}")
        lines += [
            f"moved: {each.name} ({each.kind}), asked for {each.asked}, ran on {short(each.ran or '')}: {each.because}"
            for each in self.moved
        ]
        for copy in self.copies:
            size = "size unknown" if copy.bytes is None else f"{copy.bytes:,} bytes"
            lines.append(f"copied: {copy.tensor} from {short(copy.source)} to {short(copy.target)}, {size}")
        folded = sum(each.ran is None for each in self.operations)
        if folded:
            lines.append(f"{folded} operations were folded into others before running")
        return "\n".join(lines)
