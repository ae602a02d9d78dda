"""Flags, exit codes, and the `toolkit` command.

tables     tables and charts of one style
plan_scaling  a plan's model on other numbers of replicas
plan_verdict  what a plan comes to, in sentences
plan_table  a plan as tables and as a chart, and what was measured of it
log        the toolkit's messages on the console
native     TensorFlow's notes, kept off the terminal of a recipe
ending     exit codes, and the last word on standard error
flags      the flags that every recipe shares
program    a recipe as a program: parsing its flags, and `--help`
from_flags  what every recipe does with its flags before its strategy and after training
comparing  one model trained in several ways to divide its layers
parser     the command line of a `toolkit` command
devices    `toolkit devices`
doctor     `toolkit doctor`
launch     `toolkit launch`: its command line
jobs       `toolkit jobs`
logs       `toolkit logs`
attach     `toolkit attach`
stop       `toolkit stop`
stacks     `toolkit stacks`
report     `toolkit report`
scaling    `toolkit scaling`
plan       `toolkit plan`: its command line
recipe     `toolkit recipe`
init       `toolkit init`
tf_config  `toolkit tf-config`: TF_CONFIG generated, checked and explained
main       `toolkit COMMAND`: the table of commands
"""

import lazy_loader

from toolkit.cli import flags
from toolkit.cli.log import say, show_devices, show_variables
from toolkit.cli.plan_table import show_comparisons
from toolkit.cli.program import run
from toolkit.cli.tables import check_chart, show_seconds

__all__ = [
    "check_chart",
    "create_strategy",
    "flags",
    "learning_rate",
    "load_batches",
    "open_run",
    "run",
    "say",
    "show_comparisons",
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
