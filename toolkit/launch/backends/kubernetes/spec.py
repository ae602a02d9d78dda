"""What the job is to be, checked against Kubernetes's rules for names and quantities.

https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import dataclasses
import re

from toolkit.errors import LaunchError

__all__ = ["KINDS", "ManifestSpec", "Volume"]

KINDS = ("job", "jobset", "tfjob")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, which services ask for.
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST = 63


@dataclasses.dataclass(frozen=True, kw_only=True)
class Volume:
    """A persistent volume claim, and where it is mounted."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """Reads "CLAIM:/PATH".

        Raises:
            LaunchError: It is written otherwise.
        """
        claim, colon, path = text.partition(":")
        _check("--volume", text, bool(colon and _is_name(claim) and path.startswith("/")), "Write it as CLAIM:/PATH")
        return cls(claim=claim, path=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestSpec:
    """A job on Kubernetes.

    Attributes:
        name: The name of all its objects.
        kind: "job" (an Indexed Job), "jobset" or "tfjob".
        jobs: How many tasks of each job, none of them 0.
        image: The container's image.
        command: What it runs after the interpreter: ("-m", "recipes.cifar_multi_worker", ...).
        namespace: None for kubectl's own.
        gpus: GPUs of each task that trains.
        cpu: Cores of each task, as Kubernetes writes them; None for whatever is free.
        memory: Memory of each task, such as "8Gi".
        volumes: Claims to mount in every task.
        environment: Variables for every task.
        port: The port at which tasks reach one another.
        max_restarts: Restarts of the whole job, or of its pods: see `objects`.
        user: Number of the user that the container runs as; never 0.
        python: The interpreter in the image.

    Raises:
        LaunchError: A value is none that Kubernetes takes.
    """

    name: str
    kind: str = "job"
    jobs: tuple[tuple[str, int], ...]
    image: str
    command: tuple[str, ...]
    namespace: str | None = None
    gpus: int = 0
    cpu: str | None = None
    memory: str | None = None
    volumes: tuple[Volume, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    port: int = 2222
    max_restarts: int = 3
    user: int = 1000
    python: str = "python"

    def __post_init__(self) -> None:
        tasks = sum(number for _, number in self.jobs)
        longest = _LONGEST - 1 - len(str(tasks)) - (len("-evaluator-0") if self.kind != "job" else 0)
        _check("--kind", self.kind, self.kind in KINDS, f"Choose one of {', '.join(KINDS)}")
        name_remedy = f"Use up to {longest} of a-z, 0-9 and -, a letter first: pods' names are made of it"
        _check("--name", self.name, _is_name(self.name) and len(self.name) <= longest, name_remedy)
        _check("--namespace", self.namespace, self.namespace is None or _is_name(self.namespace), "Use a-z, 0-9 and -")
        is_image = bool(self.image) and not re.search(r"\s|^-", self.image)
        _check("--image", self.image, is_image, "Name it as `docker pull` does, best with a tag or digest")
        _check("-m", " ".join(self.command), len(self.command) > 1, "Name a module, such as recipes.cifar_multi_worker")
        _check("--gpus", self.gpus, self.gpus >= 0, "Give 0 or more for each task")
        _check("--cpu", self.cpu, _is_quantity(self.cpu), "Write such as 4 or 500m")
        _check("--memory", self.memory, _is_quantity(self.memory), "Write such as 8Gi")
        _check("--port", self.port, 1024 <= self.port <= 65535, "Give 1024 to 65535: the container isn't root")
        _check("--max_restarts", self.max_restarts, self.max_restarts >= 0, "Give 0 or more")
        _check("--user", self.user, self.user > 0, "Give a number above 0: the container isn't to be root")
        for variable, _ in self.environment:
            _check("--env", variable, bool(_VARIABLE.fullmatch(variable)), "Write it as NAME=VALUE")
        for flag, text in (
            *(("--env", f"{name}={value}") for name, value in self.environment),
            *(("--volume", volume.path) for volume in self.volumes),
            *(("-m", argument) for argument in self.command),
            ("--python", self.python),
        ):
            _check(flag, text, _is_text(text), "Give UTF-8 text without a NUL")
        paths = [volume.path for volume in self.volumes]
        _check("--volume", ", ".join(paths), len(set(paths)) == len(paths), "Mount each volume at a place of its own")


def _check(flag: str, value: object, fits: bool, remedy: str) -> None:
    if not fits:
        raise LaunchError(asked=f"{flag}={value!s:.80}", found="Kubernetes doesn't take that", remedy=remedy)


def _is_name(text: str) -> bool:
    return bool(_LABEL.fullmatch(text)) and len(text) <= _LONGEST


def _is_text(text: str) -> bool:
    # Python's texts hold half a surrogate pair for each byte that isn't UTF-8.
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_quantity(text: str | None) -> bool:
    return text is None or bool(_QUANTITY.fullmatch(text))
