"""Milliseconds and bytes per step on two hosts with a slow network, beside PyTorch's DDP and tensor parallel API.

    sudo python -m benchmarks.two_hosts [--network=fc] [--rate=1gbit] [--json]

Two network namespaces stand for the hosts, with one core each. All rows in turn, three rounds in one go; medians over
the rounds, and ratios to one host's arithmetic alone and to DDP in the same round. For DDP and data parallelism, the
exposed exchange is a step's time less that of the same library without an exchange. Beside this toolkit's ways stands
what the plan predicts, and beside PowerSGD's bytes those of the paper's formula. Of local steps the times are those of
whole rounds, with their average. Needs PyTorch: pip install '.[bench]'.
"""

import json
import statistics
import sys

from absl import flags

from benchmarks.exchange_worker import NETWORK, PACK, ROWS, STEPS
from benchmarks.namespaces import measured_on, two_hosts
from toolkit.parallel.plan.step_cost import bandwidth

_RATE = flags.DEFINE_string("rate", "1gbit", "Of the link, as tc writes it.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", list(ROWS), "Rows to measure: " + ", ".join(ROWS) + ".")
flags.register_validator(_ONLY, lambda given: set(given) <= set(ROWS), "--only names rows that there are.")
_JSON = flags.DEFINE_boolean("json", False, "Print the figures as JSON.")
_LIMIT = 240  # Seconds for one row.


def main() -> None:
    """Prints a line for each row."""
    name = NETWORK.value
    seen: dict[str, list[dict]] = {row: [] for row in _ONLY.value if name != "fc" or not row.startswith("tp")}
    with two_hosts(_RATE.value) as names:
        for number in range(_ROUNDS.value):
            for row, measured in seen.items():
                how = [f"--network={name}", f"--row={row}", f"--steps={STEPS.value}"]
                how += [f"--bytes_per_pack={PACK.value}"] * (PACK.value is not None)
                worker = "benchmarks.exchange_worker"
                measured.append(measured_on(names, worker, how, port=2300 + number, limit=_LIMIT))
                print(f"round {number + 1}, {row}: {shown(measured[-1:])}", file=sys.stderr, flush=True)
    if _JSON.value:
        print(json.dumps({"network": name, "rate": _RATE.value, "rounds": _ROUNDS.value, "rows": seen}))
        return
    heading = f"{'':18} {'ms/step':>24} {'MB received':>11} {'of 1':>7} {'of DDP':>7} {'of fp16':>7} {'predicted':>10}"
    print(f"{heading} {'MB':>6}  loss")
    for row, measured in seen.items():
        ratios = " ".join(f"{ratio(seen, row, base):>7}" for base in ("alone float32", "ddp float32", "ddp float16"))
        print(f"{row:18} {shown(measured)} {ratios} {predicted(measured)}  {measured[-1]['losses'][-1]:.4f}")
    for row, measured in seen.items():
        if "formula_megabytes" in measured[0]:
            of = statistics.median(each["megabytes"] / each["formula_megabytes"] for each in measured)
            print(f"{row}: {of:.3f} of the bytes of the paper's formula")
        base = "torch float32" if row.startswith("ddp") else "alone float32"
        if row.startswith(("ddp", "data", "tensorflow")) and base in seen:
            print(exposed(row, measured, seen[base]))


def exposed(row: str, measured: list[dict], alone: list[dict]) -> str:
    """The exposed exchange: a step's time less that of the same library alone, beside its bytes' time on the wire.

    Of the exposed time, the processor's part is what a step's threads compute more than alone, such as copies.
    """
    times = [mine["milliseconds"] - base["milliseconds"] for mine, base in zip(measured, alone, strict=True)]
    used = statistics.median(mine["processor"] - base["processor"] for mine, base in zip(measured, alone, strict=True))
    wire = 1e9 * statistics.median(each["megabytes"] for each in measured) / bandwidth(_RATE.value)
    middle = statistics.median(times)
    return (
        f"{row}: {middle:.0f} ms exposed ({min(times):.0f} to {max(times):.0f}), {middle / wire:.2f} of the wire's "
        f"{wire:.0f}; {used:.0f} ms more of processor time"
    )


def shown(measured: list[dict]) -> str:
    """Median and range of the rounds."""
    times = [each["milliseconds"] for each in measured]
    size = statistics.median(each["megabytes"] for each in measured)
    return f"{statistics.median(times):7.0f} ({min(times):5.0f} to {max(times):5.0f}) {size:11.2f}"


def ratio(seen: dict[str, list[dict]], row: str, base: str) -> str:
    """The median over rounds of a row's time to another's."""
    if base not in seen:
        return "-"
    pairs = zip(seen[row], seen[base], strict=True)
    return f"{statistics.median(mine['milliseconds'] / theirs['milliseconds'] for mine, theirs in pairs):.3f}"


def predicted(measured: list[dict]) -> str:
    """The medians over rounds of what the plan predicted, to what was measured: time, and bytes."""
    if "predicted" not in measured[0]:
        return f"{'-':>10} {'-':>6}"
    time, size = (
        statistics.median(each[of] / each[to] for each in measured)
        for of, to in (("predicted", "milliseconds"), ("predicted_megabytes", "megabytes"))
    )
    return f"{time:10.3f} {size:6.3f}"


if __name__ == "__main__":
    from absl import app

    app.run(lambda _: main())
