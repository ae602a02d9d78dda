"""What is to be measured, checked before anything is started."""

import dataclasses
import pathlib

from toolkit.errors import RequestError

__all__ = ["KINDS", "Request"]

KINDS = ("mirrored", "workers")
_MOST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe at several sizes.

    Attributes:
        replicas: The sizes, the first of which is what others are compared with.
        weak: Whether each replica's batch stays the same, rather than the global batch.
        kind: "mirrored": replicas of one process, by --gpus; "workers": a process each, by `toolkit launch`.
        rounds: Times that each size is run, in turn.
        module: The recipe.
        flags: Its own.
        out: Directory for run directories, logs and the result.

    Raises:
        RequestError: A value is none that it can be.
    """

    replicas: tuple[int, ...]
    weak: bool = False
    kind: str = "mirrored"
    rounds: int = 1
    module: str
    flags: tuple[str, ...] = ()
    out: pathlib.Path

    def __post_init__(self) -> None:
        text = ",".join(map(str, self.replicas))
        if not self.replicas or any(not 1 <= size <= _MOST for size in self.replicas):
            raise RequestError(
                asked=f"--replicas={text} lists sizes",
                found=f"sizes are whole numbers from 1 to {_MOST:,}",
                remedy="Write such as --replicas=1,2,4",
            )
        if list(self.replicas) != sorted(set(self.replicas)):
            raise RequestError(
                asked=f"--replicas={text} lists sizes", found="they don't grow", remedy="List each once, smallest first"
            )
        if self.kind not in KINDS:
            raise RequestError(
                asked=f"--kind={self.kind}", found="there is no such kind", remedy=f"Choose {' or '.join(KINDS)}"
            )
        if self.rounds < 1:
            raise RequestError(asked=f"--rounds={self.rounds}", found="it is less than 1", remedy="Give 1 or more")
        if any(self.out.glob("replicas-*")):
            raise RequestError(
                asked=f"--out={self.out} is where runs go",
                found="it holds runs of an earlier measurement",
                remedy="Name another directory, or leave --out out",
            )
        for flag in self.flags:
            name = flag.lstrip("-").partition("=")[0]
            if name in ("run_dir", "resume", *(["gpus"] if self.kind == "mirrored" else [])):
                raise RequestError(
                    asked=f"{flag} is for the recipe",
                    found=f"toolkit scaling gives it --{name} itself",
                    remedy="Leave it out",
                )

    def has(self, name: str) -> bool:
        """Whether a flag of the recipe is given."""
        return any(flag.lstrip("-").partition("=")[0] == name for flag in self.flags)
