"""What `toolkit.observe` finds, on the command line: `toolkit doctor`, `toolkit report` and `toolkit scaling`."""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.cli.console import echo, save, table
from toolkit.errors import RequestError
from toolkit.support.words import counted

if TYPE_CHECKING:
    from toolkit.observe.doctor import Finding
    from toolkit.observe.scaling import Size

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


class Doctor:
    """Finds what keeps TensorFlow from training here, and prints the command that fixes it.

        toolkit doctor
        toolkit doctor --cluster=tf_configs/two_hosts.json
        toolkit doctor --self_test

    Exit code 0: no failure was found, with or without warnings; 1: at least one failure.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("--cluster", metavar="FILE", help="look at the hosts and ports of this cluster too")
        parser.add_argument(
            "--self_test",
            action="store_true",
            help="train ten steps on one device, on all devices, in two processes, and stopped and resumed [1 min]",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Examines the machine, prints each finding at once, and returns the exit code."""
        from toolkit.observe import doctor

        situation = doctor.Situation.of_this_process(arguments.cluster)
        findings: Iterator[Finding] = doctor.examine(situation)
        if arguments.self_test:
            findings = itertools.chain(findings, doctor.self_test(os.environ))
        seen = []
        for finding in findings:
            seen.append(finding)
            if not arguments.json:
                _show_finding(finding)
        failures, warnings = (sum(each.level == level for each in seen) for level in ("failure", "warning"))
        if arguments.json:
            print(
                json.dumps({"healthy": not failures, "findings": [dataclasses.asdict(each) for each in seen]}, indent=2)
            )
        elif failures or warnings:
            print(f"{counted(failures, 'failure')}, {counted(warnings, 'warning')}.")
        else:
            print("Nothing is wrong.")
        return 1 if failures else 0


class Report:
    """Writes an HTML page about one run, or comparing several: curves, time, tasks, plan, staleness, command.

        toolkit report runs/cifar_mirrored-20260719-140512
        toolkit report runs/first runs/second --out=compared.html

    The page holds everything itself, and asks nothing of any network. Recipes write it at the end of a run.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("directories", nargs="+", metavar="RUN_DIR", help="a run directory; several are compared")
        parser.add_argument(
            "--out", metavar="FILE", help="where to [RUN_DIR/report.html, or ./report.html for several]"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> None:
        """Writes the page, and prints its path."""
        from toolkit.observe import report

        print(report.write(arguments.directories, arguments.out))


class Scaling:
    """Runs a recipe with several numbers of replicas in turn, and shows speed-up and bottleneck.

        toolkit scaling --replicas=1,2,4 -m recipes.cifar_mirrored
        toolkit scaling --replicas=1,2 --weak --kind=workers -m recipes.cifar_multi_worker --gradient_dtype=float16

    The flags of scaling come before -m, the recipe's own after it. Each run is short, 60 steps, unless --epochs or
    --steps_per_epoch say otherwise.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("--replicas", required=True, metavar="N,N,...", help="the sizes, smallest first")
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--strong", action="store_true", help="the same global batch at every size [default]")
        how.add_argument("--weak", action="store_true", help="the same batch on each replica")
        parser.add_argument(
            "--kind", default="mirrored", metavar="KIND", help="mirrored (one process) or workers [mirrored]"
        )
        parser.add_argument("--rounds", type=int, default=1, metavar="N", help="run all sizes N times in turn [1]")
        parser.add_argument("--out", metavar="DIR", help="for runs, chart and result [runs/scaling-TIME]")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "-m",
            dest="recipe",
            nargs=argparse.REMAINDER,
            metavar="RECIPE",
            help="such as recipes.cifar_mirrored, and its flags",
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> None:
        """Measures, and prints table, chart and conclusion."""
        from toolkit.observe import report, scaling

        if not arguments.recipe:
            raise RequestError(
                asked="`toolkit scaling`",
                found="the recipe is missing",
                remedy="End the command with a recipe, such as -m recipes.cifar_mirrored",
            )
        request = scaling.ScalingRequest(
            replicas=_sizes(arguments.replicas),
            weak=arguments.weak,
            kind=arguments.kind,
            rounds=arguments.rounds,
            module=arguments.recipe[0],
            flags=tuple(arguments.recipe[1:]),
            out=pathlib.Path(arguments.out or f"runs/scaling-{time.strftime('%Y%m%d-%H%M%S')}"),
        )
        try:
            sizes = scaling.measure(request, show=(lambda _: None) if arguments.json else print)
        except OSError as error:
            raise RequestError(
                asked=f"runs and results go to {request.out}",
                found=f"that can't be written ({(error.strerror or str(error)).lower()})",
                remedy="Name another directory with --out",
            ) from error
        words = scaling.verdict(sizes, weak=request.weak)
        result = {
            "weak": request.weak,
            "kind": request.kind,
            "rounds": request.rounds,
            "sizes": [dataclasses.asdict(size) for size in sizes],
            "serial_share": None if scaling.share_cores(sizes) else scaling.serial_share(sizes, weak=request.weak),
            "verdict": words,
        }
        text = json.dumps(result, indent=2)
        (request.out / "scaling.json").write_text(text + "\n", encoding="utf-8")
        chart = request.out / "scaling.png"
        _draw(sizes, str(chart), title=f"{request.module}, {'weak' if request.weak else 'strong'} scaling")
        page = report.write(
            [request.out / f"replicas-{size.replicas}-round-1" for size in sizes], request.out / "report.html"
        )
        if arguments.json:
            print(text)
            return
        _show_sizes(sizes)
        for sentence in words:
            echo(sentence)
        print(f"Chart: {chart}\nReport: {page}")


def _show_finding(finding: "Finding") -> None:
    import rich
    from rich.table import Table
    from rich.text import Text

    console = rich.get_console()
    level = Text(f"{finding.level:7}", style=_STYLES[finding.level])
    words = Text.assemble((f"{finding.check}: ", "bold"), finding.found)
    if console.is_terminal:
        row = Table.grid(padding=(0, 1))
        row.add_row(level, words)
        console.print(row)
    else:
        console.print(level, words, soft_wrap=True)
    if finding.cure:
        # Not wrapped, so that it can be copied.
        console.print(Text(f"        {finding.cure}", style="cyan"), soft_wrap=True)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(
            asked=f"--replicas={text} lists sizes", found="that isn't a list of numbers", remedy="Write such as 1,2,4"
        ) from None


def _show_sizes(sizes: "Sequence[Size]") -> None:
    import rich

    from toolkit.observe.scaling import speed_ups

    shown = table(
        "replicas>", "batch>", "examples/s>", "ms/step>", "speed-up>", "efficiency>", "comp.>", "comm.>", "input>"
    )
    for size, up in zip(sizes, speed_ups(sizes), strict=True):
        step = size.step or {}
        parts = [
            f"{step[name] / step['milliseconds']:.0%}" if step else "-"
            for name in ("compute", "communication", "input")
        ]
        shown.add_row(
            f"{size.replicas:,}",
            f"{size.global_batch:,}",
            f"{size.examples_per_second:,.0f}",
            f"{size.milliseconds:,.1f}",
            f"{up:.2f}",
            f"{up / size.replicas:.0%}",
            *parts,
        )
    rich.get_console().print(shown)


def _draw(sizes: "Sequence[Size]", path: str, *, title: str) -> None:
    from matplotlib.figure import Figure

    from toolkit.observe.scaling import speed_ups

    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axes = figure.subplots()
    counts = [size.replicas for size in sizes]
    axes.plot(counts, speed_ups(sizes), color="#0072b2", marker="o", label="measured")
    axes.plot(counts, counts, color="grey", linestyle=":", label="as many times as replicas")
    axes.set_xticks(counts)
    axes.set_xlabel("replicas")
    axes.set_ylabel("speed-up over one replica")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(title)
    save(figure, path)
