"""The processes of a job's tasks, from the launcher's record."""

import dataclasses
from typing import Any

from toolkit.observe.report.reading import RunData
from toolkit.support import signals

__all__ = ["Span", "spans_of"]


@dataclasses.dataclass(frozen=True)
class Span:
    """A process of a task; its code is None while it runs, as far as is known."""

    task: str
    start: float
    end: float
    code: int | None
    dismissed: bool

    @property
    def ending(self) -> str:
        """How it ended, in words: "done", "ended by the launcher", "running when this was written", or a failure."""
        if self.code is None:
            return "running when this was written"
        if self.code == 0:
            return "done"
        if self.dismissed:
            return "ended by the launcher"
        return signals.name(-self.code) if self.code < 0 else f"exit code {self.code}"

    @property
    def failed(self) -> bool:
        """Whether it ended before its work was done, and not by the launcher."""
        return bool(self.code) and not self.dismissed


def spans_of(run: RunData, *, prefix: str) -> list[Span]:
    """Returns the processes of a run's tasks, in the order in which they were started.

    Args:
        run: A run directory with the launcher's record.
        prefix: What each task's name begins with, where several runs are shown.
    """
    started: dict[tuple[str, Any], float] = {}
    found = []
    for event in run.events:
        key = (event["task"], event.get("pid"))
        if event["event"] == "started":
            started[key] = event["at"]
        elif event["event"] == "ended" and key in started:
            code = event.get("code")
            dismissed = bool(event.get("dismissed"))
            found.append(
                Span(prefix + key[0], started.pop(key), event["at"], code if isinstance(code, int) else None, dismissed)
            )
    # A process that still runs ends, for the chart, at its last event or at the run's last written file.
    latest = max([run.written, *(event["at"] for event in run.events)])
    found += [Span(prefix + task, at, max(latest, at), None, False) for (task, _), at in started.items()]
    return sorted(found, key=lambda span: span.start)
