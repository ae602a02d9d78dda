"""Writes an HTML page about one run, or comparing several: curves, time, tasks, plan, staleness, command.

    toolkit report runs/cifar_mirrored-20260719-140512
    toolkit report runs/first runs/second --out=compared.html

The page holds everything itself, and asks nothing of any network. Recipes write it at the end of a run.
"""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR", help="a run directory; several are compared")
    parser.add_argument("--out", metavar="FILE", help="where to [RUN_DIR/report.html, or ./report.html for several]")


def run(arguments: argparse.Namespace) -> None:
    """Writes the page, and prints its path."""
    from toolkit.observe import report

    print(report.write(arguments.directories, arguments.out))
