"""Flags, exit codes, and the `toolkit` command.

console    messages, tables and charts: what a program shows
flags      the flags that every recipe shares
program    a recipe as a program: its flags parsed, `--help`, exit codes, and the last word on standard error
from_flags  what every recipe does with its flags before its strategy and after training
comparing  one model trained in several ways to divide its layers
parser     the command line of a `toolkit` command
devices    `toolkit devices`
launch     `toolkit launch`: its command line
jobs       `toolkit jobs`, `logs`, `attach`, `stop`, `stacks`
observe    `toolkit doctor`, `report`, `scaling`
plan_scaling  a plan's model on other numbers of replicas, and what that comes to, in sentences
plan       `toolkit plan`: its command line, tables and chart
scripts    `toolkit init`, `recipe`
tf_config  `toolkit tf-config`: TF_CONFIG generated, checked and explained
main       `toolkit COMMAND`: the table of commands
"""

import lazy_loader

from toolkit.cli import flags
from toolkit.cli.console import check_chart, say, show_devices, show_seconds, show_variables
from toolkit.cli.program import run

__all__ = [
    "check_chart",
    "create_strategy",
    "flags",
    "learning_rate",
    "load_batches",
    "open_run",
    "run",
    "say",
    "show_devices",
    "show_seconds",
    "show_variables",
    "train_ways",
]

# They import `training`, which the commands don't need.
__getattr__, _, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "comparing": ["train_ways"],
        "from_flags": ["create_strategy", "learning_rate", "load_batches", "open_run"],
    },
)
