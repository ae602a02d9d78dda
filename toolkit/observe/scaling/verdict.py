"""What bounds the speed, and what to do: in words."""

from collections.abc import Sequence

from toolkit.observe.scaling.law import Size, serial_share, speed_ups

__all__ = ["bound", "verdict"]

_NOTABLE = 0.2  # Of a step: less than this isn't what bounds it.
_ADVICE = {
    "communication": "Give each replica more examples (--global_batch_size), send gradients in 16 bits "
    "(--gradient_dtype=float16), or look at `toolkit plan`: sharded FC layers exchange less.",
    "input": "Make batches faster: read from memory or a faster disk, do less work for each example in Python, or "
    "prefetch more; more replicas won't help.",
    "other": "Python between steps takes its time: fewer callbacks that act on every batch, or "
    "compile(steps_per_execution=10).",
    "compute": "More replicas, or faster ones, help; nothing else is in the way.",
}


def bound(size: Size) -> str | None:
    """Returns what bounds a size: "communication", "input", "other" or "compute"; None where a step wasn't profiled."""
    if not size.step or not size.step.get("milliseconds"):
        return None
    shares = {
        part: size.step.get(part, 0.0) / size.step["milliseconds"] for part in ("communication", "input", "other")
    }
    worst = max(shares, key=shares.__getitem__)
    return worst if shares[worst] >= _NOTABLE else "compute"


def verdict(sizes: Sequence[Size], *, weak: bool) -> list[str]:
    """Returns sentences: how well it scales, what bounds it, what to do, and what the figures don't say.

    Args:
        sizes: As measured, smallest first.
        weak: Whether each replica's batch was kept, rather than the global batch.
    """
    last, up = sizes[-1], speed_ups(sizes)[-1]
    said = []
    share = serial_share(sizes, weak=weak)
    shared = last.emulated and last.replicas > 1
    if share is not None:
        efficiency = f"an efficiency of {up / last.replicas:.0%}"
        said.append(f"{last.replicas} replicas are {up:.2f} times as fast as one: {efficiency}.")
        law = "Gustafson" if weak else "Amdahl"
        if share >= 1:
            said.append("More replicas don't make it faster.")
        else:
            said.append(f"{share:.0%} of one replica's time can't be parallelised ({law}'s law).")
            if share > 0 and not weak:
                said.append(f"With this batch, no number of replicas is more than {1 / share:.1f} times as fast.")
    what = bound(last)
    if what is not None and last.step is not None:
        part = last.step.get(what, 0.0) / last.step["milliseconds"]
        name = "Python" if what == "other" else what
        advice = "The cores are in use." if what == "compute" and shared else _ADVICE[what]
        said.append(f"At {last.replicas} replicas {name} bounds it ({part:.0%} of a step). {advice}")
    if len(sizes) > 1:
        said.append(_batch(sizes, weak=weak))
    if shared:
        said.append(
            "These replicas share the same CPU cores: the figures show that it runs, and nothing of how several "
            "GPUs or hosts would scale."
        )
    return said


def _batch(sizes: Sequence[Size], *, weak: bool) -> str:
    first, last = sizes[0], sizes[-1]
    if weak:
        return (
            f"The global batch grew from {first.global_batch:,} to {last.global_batch:,}: the recipes raise the "
            "learning rate in proportion and warm it up (Goyal et al., arXiv 1706.02677); look at the accuracy too "
            "before you keep it."
        )
    each = last.global_batch / last.replicas
    return (
        f"The global batch stayed {last.global_batch:,}, so each replica has {each:g} examples, and the same learning "
        "rate fits; --weak keeps each replica's batch instead."
    )
