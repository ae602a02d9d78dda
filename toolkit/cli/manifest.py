"""What a cluster manager is to start, as it wants it written.

    toolkit manifest kubernetes --name=a --workers=2 --image=IMAGE -m recipes.cifar_multi_worker | kubectl apply -f -
    toolkit manifest kubernetes --name=a --workers=4 --kind=jobset --gpus=1 --volume=runs:/runs --image=IMAGE -m ...

It prints YAML and starts nothing. Tasks that are started again go on from the checkpoint in --run_dir, where that is on
a volume.
"""

import argparse
import sys

from toolkit.cli.launch_flags import add_command, add_counts, counted
from toolkit.errors import RequestError
from toolkit.support import redaction

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the managers, of which there is one."""
    managers = parser.add_subparsers(metavar="MANAGER", required=True)
    own = managers.add_parser("kubernetes", help="an Indexed Job, a JobSet or a TFJob, as YAML")
    own.description = (
        "Print YAML for kubectl: the job, a headless service, and a policy that lets only its pods reach it."
    )
    own.add_argument("--name", required=True, help="of the job, and of what goes with it")
    own.add_argument("--kind", default="job", help="job (an Indexed Job), jobset or tfjob [job]")
    add_counts(own)
    own.add_argument("--image", required=True, help="container image with this toolkit in it")
    own.add_argument("--namespace", help="[kubectl's]")
    own.add_argument("--gpus", type=int, default=0, metavar="N", help="NVIDIA GPUs of each chief and worker [0]")
    own.add_argument("--cpu", metavar="CORES", help="of each task, such as 4 or 500m")
    own.add_argument("--memory", metavar="SIZE", help="of each task, such as 8Gi")
    own.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:/PATH", help="mount a volume claim in every task"
    )
    own.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every task")
    own.add_argument("--port", type=int, default=2222, help="that tasks reach one another at [2222]")
    own.add_argument("--max_restarts", type=int, default=3, metavar="N", help="[3]")
    own.add_argument("--user", type=int, default=1000, metavar="UID", help="that the container runs as, never 0 [1000]")
    own.add_argument("--python", default="python", metavar="PROGRAM", help="the interpreter in the image [python]")
    add_command(own)
    # A -- ends the REMAINDER that -m takes: argparse gives the rest of the module's arguments to the next argument.
    own.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    own.set_defaults(action=_kubernetes)


def run(arguments: argparse.Namespace) -> None:
    """Prints what was asked for."""
    arguments.action(arguments)


def _kubernetes(given: argparse.Namespace) -> None:
    import yaml

    from toolkit.launch.backends import kubernetes

    jobs = counted(given)
    if not jobs:
        raise RequestError(
            asked="`toolkit manifest kubernetes`",
            found="nothing says how many tasks there are",
            remedy="Give --workers=2",
        )
    same = ("name", "kind", "image", "namespace", "gpus", "cpu", "memory", "port", "max_restarts", "user", "python")
    spec = kubernetes.ManifestSpec(
        jobs=jobs,
        command=("-m", *(given.module or ()), *given.rest),
        volumes=tuple(map(kubernetes.Volume.parse, given.volume)),
        environment=tuple((name, value) for name, _, value in (pair.partition("=") for pair in given.env)),
        **{name: getattr(given, name) for name in same},
    )
    print(yaml.safe_dump_all(kubernetes.manifest(spec), sort_keys=False), end="")
    for name in [name for name, _ in spec.environment if redaction.is_secret(name)]:
        print(f"note: {name} can be read by whoever can read the manifest; Kubernetes has Secrets.", file=sys.stderr)
    if not spec.volumes:
        print("note: without --volume, checkpoints are lost with their pod.", file=sys.stderr)
    elif not any(part.startswith("--run_dir") for part in spec.command):
        print(f"note: give --run_dir={spec.volumes[0].path}/{spec.name} to keep checkpoints.", file=sys.stderr)
