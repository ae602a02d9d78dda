"""How layers are divided, and what a training step then costs a replica of a machine: exchanges, memory and time.

A machine is the speed of its devices, and the bandwidth and latency of the links between them. Bytes of an exchange are
those that a replica receives; over all replicas as many are sent. In an all-reduce each element arrives 2 (R-1)/R
times, in a ring as well as by halving and doubling, which needs 2 log2 R messages one after another (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.5). In the
other exchanges each replica's shard goes to each other replica once, all at the same time.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from toolkit.errors import StrategyError
from toolkit.parallel.plan.count import LayerCost

# Makers' data sheets: float32 operations per second without tensor cores, and bytes per second of memory.
DEVICES: dict[str, tuple[float, float]] = {
    "K20": (3.52e12, 208e9),
    "P100": (9.3e12, 732e9),
    "V100": (14e12, 900e9),
    "T4": (8.1e12, 320e9),
    "RTX3090": (35.6e12, 936e9),
    "A100": (19.5e12, 1555e9),
    "L4": (30.3e12, 300e9),
    "RTX4090": (82.6e12, 1008e9),
    "H100": (67e12, 3350e9),
    "H200": (67e12, 4800e9),
}
# The share of a data sheet's operations that convolutions reach in training. It is an assumption, and results say so.
_REACHED = 0.5
# Seconds in which `fit` starts the operations of a step, however small it is. It is an assumption, too.
LEAST_STEP = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between replicas.

    Attributes:
        bandwidth: Bytes a second in each direction.
        latency: Seconds that a message takes however short it is.
        reducing: Bytes a second at which a replica receives gradients that are summed on the way; None for bandwidth.
        smallest: Seconds that an all-reduce of gradients takes however few they are.
    """

    bandwidth: float
    latency: float = 0.0
    reducing: float | None = None
    smallest: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and the network between them.

    Attributes:
        name: In words.
        speed: Operations a second of a device; math.nan where `seconds` has each layer's time.
        memory: Bytes a second that an optimizer reads and writes weights at; math.inf to leave that out.
        inside: What joins replicas of a host.
        between: What joins hosts, shared by a host's replicas; None for a link like `inside`.
        hosts: How many there are, among which replicas are divided evenly.
        seconds: Measured seconds of a training step for one example, by layer.
        fixed: Seconds of a step beside its layers.
        sharing: How many devices computed on the same cores when they were measured; 1 for devices of their own.
    """

    name: str = "a machine"
    speed: float
    inside: Link
    between: Link | None = None
    hosts: int = 1
    memory: float = math.inf
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fixed: float = 0.0
    sharing: int = 1

    def exchange_seconds(self, received: float, rounds: int, *, replicas: int) -> float:
        """Returns how long an exchange takes on its slowest link, inside a host or between hosts.

        Args:
            received: Bytes that a replica receives.
            rounds: Messages that wait for one another.
            replicas: How many exchange.
        """
        return max(
            share * received / link.bandwidth + rounds * link.latency
            for link, share in self._ways(replicas, ring=False)
        )

    def all_reduce_seconds(self, received: float, rounds: int, *, replicas: int) -> float:
        """Returns the time of an all-reduce of gradients, without the latency of messages (rounds=0) or with it."""
        return max(
            received / (link.reducing or link.bandwidth)
            + (max(rounds * link.latency, link.smallest) if rounds else 0.0)
            for link, _ in self._ways(replicas, ring=True)
        )

    def _ways(self, replicas: int, *, ring: bool) -> list[tuple[Link, float]]:
        """The links of a replica's exchange, each with its bytes for each byte that a replica receives.

        A ring passes from host to host once, whatever the number of replicas there. What everybody sends to everybody
        comes, for each of a host's replicas, from all replicas of other hosts.
        """
        hosts = min(self.hosts, replicas)
        if hosts <= 1:
            return [(self.inside, 1.0)]
        local = math.ceil(replicas / hosts)
        outside = 1.0 if ring else local * (replicas - local) / (replicas - 1)
        ways = [(self.between or self.inside, outside)]
        if local > 1:
            ways.append((self.inside, 1.0 if ring else (local - 1) / (replicas - 1)))
        return ways


def device(text: str) -> tuple[str, float, float]:
    """Returns (name, operations per second, bytes per second of memory) of a device.

    Args:
        text: A name of DEVICES, or billions of operations a second that it reaches, such as "500" or "500GFLOPS".
            Of a data sheet's figure half is taken; a number is taken as it is.

    Raises:
        StrategyError: It is neither.
    """
    known = {name.lower(): name for name in DEVICES}
    if name := known.get(text.lower().replace(" ", "")):
        speed, memory = DEVICES[name]
        return f"{name} at {_REACHED:.0%} of its {speed / 1e12:g} TFLOPS", speed * _REACHED, memory
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([GT])FLOPS)?", text.strip(), re.IGNORECASE)
    speed = _number(match[1]) if match else 0.0
    if not match or not 0 < speed < math.inf:
        raise StrategyError(
            asked=f"device {text!r}",
            found="it is neither a device known here nor a number of GFLOPS",
            remedy="Give one of " + ", ".join(DEVICES) + ", or such as 500 (billions of operations a second)",
        )
    billions = speed * (1000 if (match[2] or "G").upper() == "T" else 1)
    return f"{billions:,g} GFLOPS", billions * 1e9, math.inf


def bandwidth(text: str, *, what: str = "bandwidth") -> float:
    """Parses bytes, per second or of memory, such as "1Gbit", "100 Mbit/s", "16GB/s" or "12GiB".

    Raises:
        StrategyError: It isn't so many, or has no unit.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)(bit|b|B)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    size = _number(match[1]) if match else 0.0
    if not match or not 0 < size < math.inf:
        plain = re.fullmatch(r"[0-9.]+\s*[kmgtKMGT]?", text.strip())
        raise StrategyError(
            asked=f"{what} {text!r}",
            found="it has no unit: bits or bytes" if plain else f"that isn't a {what}",
            remedy="Give a number with a unit: 1Gbit for a network, 16GB for memory, or 16GB for PCIe (per second)",
        )
    prefix = match[2].lower()
    unit = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    return size * unit / (1 if match[3] == "B" or (match[3] == "b" and prefix.endswith("i")) else 8)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


SUMS = ("inputs", "heads", "rows")  # Splits with which each replica has a term of the outputs' sum.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a layer is divided.

    Attributes:
        split: One of the names in `LayerCost.splits`, such as "outputs"; None where each replica has all of it.
        keep_split: Its output stays sharded by features.
        comes_split: Its input is sharded by features already.
    """

    split: str | None = None
    keep_split: bool = False
    comes_split: bool = False

    def __str__(self) -> str:
        if self.split is None:
            return "replicated"
        return f"by {self.split}" + (", kept" if self.keep_split else "")


REPLICATED = Choice()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how.

    Attributes:
        replicas: How many replicas train.
        global_batch: Examples of all replicas together in a step.
        gradient_dtype: The communication dtype of gradients; "float32" for the dtype that they have.
        gradient_rank: Columns of the factors that PowerSGD sends in the place of gradients; None for whole gradients.
        activation_dtype: The communication dtype of activations of sharded layers; "float32" as above.
        slots: Elements that the optimizer keeps for each element of a weight: 1 for momentum, 2 for Adam.
        shards: Replicas that hold a sharded layer between them, a group; None for all replicas.
        optimizer_state: "replicated", or "sharded" where each replica keeps the slots of its part.
        weights: "replicated", or "sharded" where each replica of a group keeps its part of replicated layers' weights.
        micro_steps: How many parts a replica's batch is computed in, whose gradients are added up.
        recompute: Whether what only a block reads is computed again in the backward pass, instead of kept until then.
        batch_statistics: "batch" where BatchNormalization normalises the whole batch; "replica" for each replica's
            share.
    """

    replicas: int
    global_batch: float
    gradient_dtype: str = "float32"
    gradient_rank: int | None = None
    activation_dtype: str = "float32"
    slots: int = 1
    shards: int | None = None
    optimizer_state: str = "replicated"
    weights: str = "replicated"
    micro_steps: int = 1
    recompute: bool = False
    batch_statistics: str = "batch"

    @property
    def per_replica_batch(self) -> float:
        """Examples of each replica in a step."""
        return self.global_batch / self.replicas

    @property
    def group(self) -> int:
        """How many replicas a group has."""
        return self.shards or self.replicas


def shard(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """Returns a replica's number of units or heads: the largest shard, to which others are padded."""
    return -(-layer.splits[str(choice.split)] // setting.group)


def parameters_of(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """Returns the number of elements of a layer's trained weights that a replica holds."""
    if choice.split is None:
        return layer.parameters
    whole = layer.whole if choice.split in SUMS else 0
    size = layer.splits[choice.split]
    return (layer.parameters - whole) // size * shard(layer, choice, setting) + whole


def gathered_of(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """Returns the number of elements of a layer's weights that replicas keep in shards, and gather to use them."""
    from toolkit.strategies.step.sharded_weights import SMALLEST

    if setting.weights != "sharded" or setting.group == 1 or choice.split is not None or "rows" in layer.splits:
        return 0
    return sum(size for size in map(math.prod, layer.shapes) if size >= SMALLEST)


def bytes_of(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes of a layer's trained weights that a replica holds, and of their gradients."""
    elsewhere = gathered_of(layer, choice, setting) * (1 - 1 / setting.group)
    return (parameters_of(layer, choice, setting) - elsewhere) * layer.weight_bytes


def updated_bytes(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes of a layer's trained weights that a replica updates, and for which it has slots."""
    held = bytes_of(layer, choice, setting)
    if setting.optimizer_state != "sharded" or choice.split is not None:
        return held
    shards = gathered_of(layer, choice, setting) / setting.group * layer.weight_bytes  # Their slots are as they are.
    return shards + (held - shards) / setting.replicas


# Bytes per element in float32; activations and gradients otherwise keep their dtype.
_SHORT = {"float16": 2, "bfloat16": 2}
_EXACT = 8  # Bytes of an element of a batch's statistics, which travel in float64.


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange between replicas.

    Attributes:
        kind: "gradients", which may be sent while others are computed; "activations" and "weights", for which replicas
            wait.
        received: Bytes that a replica receives.
        rounds: Messages that wait for one another.
        among: "all" replicas, those of a "group", or those with the same part of each of the "groups".
    """

    kind: str
    received: float
    rounds: int
    among: str = "all"


def exchanges(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns a replica's exchanges for a layer in a training step."""
    replicas, group, batch = setting.replicas, setting.group, setting.per_replica_batch
    found = []
    size = _SHORT.get(setting.gradient_dtype) or layer.weight_bytes
    whole = _sent(layer, setting) if choice.split is None else layer.whole if choice.split in SUMS else 0
    if cut := gathered_of(layer, choice, setting):
        found += _of_shards(layer, cut, setting)
        whole = max(0, whole - cut)
    if choice.split is None and "rows" in layer.splits:
        # For a table: the rows that were looked up, and their indices.
        found.append(Exchange("gradients", (replicas - 1) * batch * (layer.outputs * size + layer.inputs * 4), 1))
    else:
        found.append(all_reduce("gradients", setting.micro_steps * whole * size, replicas))
    if choice.split is not None:
        parts = parameters_of(layer, choice, setting) - whole
        parts_alike = all_reduce("gradients", setting.micro_steps * parts * size, replicas // group)
        found.append(dataclasses.replace(parts_alike, among="groups"))
    # Elements that are summed in the forward pass, and elements of gradients that are summed in the backward pass.
    if setting.batch_statistics == "batch" or layer.synchronized:
        found += [all_reduce("activations", layer.statistics * _EXACT, replicas)] * 2
    if choice.split is not None:
        found += [dataclasses.replace(each, among="group") for each in _within_group(layer, choice, setting)]
    return [each for each in found if each.received]


def _of_shards(layer: LayerCost, cut: int, setting: Setting) -> list[Exchange]:
    """Returns the exchanges of weights in shards.

    They are gathered for the forward pass, and again for gradients, in the dtype in which the layer computes. The
    gradients' shards are summed in the group, and then over the groups.
    """
    group, times = setting.group, setting.micro_steps
    size = _SHORT.get(setting.gradient_dtype) or layer.weight_bytes
    others = times * cut * (group - 1) / group
    gather = Exchange("weights", others * layer.activation_bytes, times, "group")
    shards = all_reduce("gradients", times * cut / group * size, setting.replicas // group)
    return [
        *[gather] * (2 if layer.passes_gradient else 1),  # Nobody asks for a gradient of the first layer's input.
        Exchange("gradients", others * size, 1, "group"),
        dataclasses.replace(shards, among="groups"),
    ]


def _sent(layer: LayerCost, setting: Setting) -> int:
    """Returns the number of elements that the gradients of a replicated layer have."""
    rank = setting.gradient_rank
    if rank is None:
        return layer.parameters
    from toolkit.strategies.step.powersgd import matrix_shape, shrinks

    return sum(rank * sum(matrix_shape(each)) if shrinks(each, rank) else math.prod(each) for each in layer.shapes)


def _within_group(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns the exchanges of a sharded layer: its activations, and their gradients."""
    others, batch, found = setting.group - 1, setting.per_replica_batch, []
    if not choice.comes_split:
        found.append(Exchange("activations", 4 * others, 1))  # The number of examples of each replica.
    size = _SHORT.get(setting.activation_dtype) or layer.activation_bytes
    inputs_both_ways = 2 if layer.passes_gradient else 1
    if choice.split in ("columns", "rows"):
        found.append(Exchange("activations", others * batch * layer.inputs * 4, 1))  # Indices of rows.
    elif choice.split in ("outputs", "heads"):
        found += [Exchange("activations", others * batch * layer.inputs * size, 1)] * inputs_both_ways
    elif not choice.comes_split:
        size_of_part = shard(layer, choice, setting) * (layer.inputs // layer.splits["inputs"])
        found += [Exchange("activations", others * batch * size_of_part * size, 1)] * inputs_both_ways
    if choice.split in SUMS:
        return [*found, *[Exchange("activations", others * batch * layer.outputs * size, 1)] * 2]
    if not choice.keep_split:
        size_of_part = shard(layer, choice, setting) * (layer.outputs // layer.splits[str(choice.split)])
        found += [Exchange("activations", others * batch * size_of_part * size, 1)] * 2
    return found


def all_reduce(kind: str, size: float, replicas: int) -> Exchange:
    """Returns an all-reduce of this many bytes."""
    return Exchange(kind, 2 * (replicas - 1) / replicas * size, 2 * (replicas - 1).bit_length())


# Temporary values for the largest weights: the optimizer updates two of them at once, in two threads.
_UPDATED_AT_ONCE = 2


def memory_of(layers: Sequence[LayerCost], choices: Mapping[str, Choice], setting: Setting) -> dict[str, float]:
    """Returns the most bytes that a replica holds in a training step, by their purpose.

    "weights", with those that aren't trained; "optimizer": its slots, the sums of micro-steps, and what PowerSGD hasn't
    sent yet; "step": what layers keep for the backward pass and compute with, and gradients, where together they are
    most; "workspace": what updates and exchanges of gradients, and libraries, take beside.
    """
    weights = optimizer = kept = most = largest = workspace = 0.0
    # A layer computes with its whole weights, and their whole gradient, while those of the next are gathered.
    cuts = [gathered_of(layer, choices.get(layer.name, REPLICATED), setting) * layer.weight_bytes for layer in layers]
    gradients = [bytes_of(layer, choices.get(layer.name, REPLICATED), setting) for layer in layers]
    later, again, block = sum(gradients), 0.0, ""
    own = setting.per_replica_batch / setting.micro_steps
    for layer, gradient, cut, before in zip(layers, gradients, cuts, [0, *cuts][:-1], strict=True):
        choice = choices.get(layer.name, REPLICATED)
        weights += gradient + layer.state * layer.weight_bytes
        compressed = setting.gradient_rank is not None and choice.split is None
        sums = gradient * ((setting.micro_steps > 1) + compressed)
        optimizer += setting.slots * updated_bytes(layer, choice, setting) + sums
        stays, inside, works = _activations(layer, choice, setting)
        kept, later = kept + stays, later - gradient
        if layer.block != block:
            block, again = layer.block, 0.0
            if setting.recompute:  # A copy of its input.
                again = own * layer.inputs * layer.activation_bytes
        again += inside
        most = max(most, kept + again + works + later + 2 * cut + before)
        largest = max(largest, gradient)
        workspace = max(workspace, layer.workspace)
    packed = 0.0
    if setting.replicas > 1:  # Gradients of shards travel by themselves.
        packed = sum(gradients) - sum(cuts) / setting.group
    beside = max(_UPDATED_AT_ONCE * largest, packed)
    return {
        "weights": weights,
        "optimizer": optimizer,
        "step": max(most, sum(gradients)),
        "workspace": workspace + beside,
    }


def recomputed(layers: Sequence[LayerCost], choices: Mapping[str, Choice], setting: Setting) -> frozenset[str]:
    """Returns the names of the recomputed blocks: layers, and layers that contain others."""
    inside = ((each.block, _activations(each, choices.get(each.name, REPLICATED), setting)[1]) for each in layers)
    return frozenset(block for block, size in inside if size)


def layer_memory(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes that a replica keeps for a layer: weights, gradients, the optimizer's slots, activations."""
    alone = memory_of([dataclasses.replace(layer, working=0.0)], {layer.name: choice}, setting)
    return alone["weights"] + alone["optimizer"] + alone["step"]


def _activations(layer: LayerCost, choice: Choice, setting: Setting) -> tuple[float, float, float]:
    """Returns the bytes that a layer keeps until the backward pass and in it, and its temporary bytes.

    A sharded layer has a part of the features of everybody's examples, which are as many as all of its own. Gathered
    inputs come to that, and what is exchanged back.
    """
    own = setting.per_replica_batch / setting.micro_steps
    inputs, outputs = (own * size * layer.activation_bytes for size in (layer.inputs, layer.outputs))
    more, working, everybody = 0.0, own * layer.working, setting.group
    if choice.split is not None:
        if not choice.keep_split:
            more += outputs
        if choice.split in ("outputs", "heads"):
            more += everybody * inputs
            working += everybody * inputs  # Their gradients.
        elif choice.split == "inputs" and not choice.comes_split:
            more += inputs
            working += inputs
        if choice.split in SUMS:
            working += 2 * everybody * outputs  # The terms of all replicas' sums, forward or backward.
    if setting.recompute and layer.block:
        return own * layer.passed, own * layer.inside + more, working
    return own * layer.kept + more, 0.0, working


# How often PowerSGD reads or writes a tensor of a gradient's size: adding the error, both products, their result
# and the new error.
_COMPRESSING = 9
# An element of an output is moved twice in the forward pass and three times in the backward pass. A third of the
# rate of a data sheet's memory gives what was measured of small_cnn on an H200 with XLA (docs/measured.md).
_FORTH, _BACK = 6, 9


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of each replica.

    Attributes:
        computing: Seconds of layers, forward and backward.
        updating: Seconds of the optimizer.
        exchanging: Seconds of the exchanges. How much of them overlaps with computing isn't predicted.
        fixed: Seconds beside all of that.
        received: Bytes that a replica receives.
        memory: Bytes that a replica holds.
        parameters: Elements of trained weights that a replica holds.
    """

    computing: float
    updating: float
    exchanging: float
    fixed: float
    received: float
    memory: float
    parameters: int

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.computing + self.updating + self.exchanging + self.fixed


def step(layers: Sequence[LayerCost], choices: Mapping[str, Choice], machine: Machine, setting: Setting) -> Step:
    """Returns the predicted training step.

    Layers whose operations aren't known, and whose time wasn't measured, count with nothing.

    Args:
        layers: As `costs` returns them.
        choices: By layer's name; layers that aren't there are replicated.
        machine: The devices, and the network between them.
        setting: What is trained, and how.
    """
    computing = updating = waiting = received = 0.0
    parameters, gradients = 0, collections.defaultdict[str, list[Exchange]](list)
    again = recomputed(layers, choices, setting)
    for layer in layers:
        choice = choices.get(layer.name, REPLICATED)
        forth, back = _computing(layer, choice, machine, setting)
        twice = layer.block in again
        back += forth if twice else 0.0
        computing += forth + back
        parameters += parameters_of(layer, choice, setting)
        updating += _updating(layer, choice, machine, setting)
        for exchange in exchanges(layer, choice, setting):
            times = 1.5 if twice and exchange.kind == "activations" else 1.0  # Half of them are in the forward pass.
            received += times * exchange.received
            if exchange.kind == "gradients":
                gradients[exchange.among].append(exchange)
            else:
                waiting += times * _waiting(exchange, machine, setting)
    # All gradients go in one pack, so its messages count once.
    packs = [
        Exchange("gradients", sum(e.received for e in each), max(e.rounds for e in each), among)
        for among, each in gradients.items()
    ]
    reducing = sum(_waiting(pack, machine, setting) for pack in packs)
    # PowerSGD exchanges its factors when all gradients are known, in two exchanges.
    if setting.gradient_rank is not None:
        reducing += sum(_waiting(dataclasses.replace(pack, received=0), machine, setting) for pack in packs)
    exchanging = waiting + reducing
    memory = sum(memory_of(layers, choices, setting).values())
    fixed = machine.fixed * setting.micro_steps
    return Step(computing, updating, exchanging, fixed, received, memory, parameters)


def _waiting(exchange: Exchange, machine: Machine, setting: Setting) -> float:
    """Returns the time of an exchange. A group is within a host if it fits."""
    local = math.ceil(setting.replicas / machine.hosts)
    count, received = setting.replicas, exchange.received
    if exchange.among == "group":
        count = setting.group
        machine = dataclasses.replace(machine, hosts=math.ceil(count / local))
    elif exchange.among == "groups":
        count = setting.replicas // setting.group
        if machine.hosts > 1:  # Replicas of one host with different shards share the link between hosts.
            received *= min(setting.group, local)
    takes = machine.all_reduce_seconds if exchange.kind == "gradients" else machine.exchange_seconds
    return takes(received, exchange.rounds, replicas=count)


def exchanges_of(
    layer: LayerCost, choice: Choice, machine: Machine, setting: Setting
) -> dict[tuple[str, bool], tuple[float, float]]:
    """Returns what a layer exchanges in a step: by kind and whether it goes between hosts, bytes and seconds."""
    local = math.ceil(setting.replicas / machine.hosts)
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for each in exchanges(layer, choice, setting):
        key = each.kind, machine.hosts > 1 and (each.among != "group" or setting.group > local)
        received, seconds = found.get(key, (0.0, 0.0))
        found[key] = received + each.received, seconds + _waiting(each, machine, setting)
    return found


def layer_seconds(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Returns the cost of a choice for one layer: its computation, update and exchanges."""
    found = exchanges(layer, choice, setting)
    # Gradients share messages with those of other layers.
    alone = [dataclasses.replace(each, rounds=0) if each.kind == "gradients" else each for each in found]
    return (
        sum(_computing(layer, choice, machine, setting))
        + _updating(layer, choice, machine, setting)
        + sum(_waiting(each, machine, setting) for each in alone)
    )


def _computing(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> tuple[float, float]:
    """Seconds forward and backward: a sharded layer computes 1/R of all examples."""
    if layer.name in machine.seconds:
        measured = machine.seconds[layer.name]
        shares = (1 / 3, 2 / 3)
        if layer.operations:
            shares = ((layer.forward or 0) / layer.operations, (layer.backward or 0) / layer.operations)
        forth, back = (measured * share for share in shares)
    else:
        moved = layer.outputs * layer.activation_bytes / machine.memory
        forth = (layer.forward or 0) / machine.speed + _FORTH * moved
        back = (layer.backward or 0) / machine.speed + _BACK * moved
    # If units don't divide evenly, shards are padded.
    padding = 1.0
    if choice.split is not None:
        padding = shard(layer, choice, setting) * setting.group / layer.splits[choice.split]
    return forth * setting.per_replica_batch * padding, back * setting.per_replica_batch * padding


def _updating(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Seconds of the optimizer: it reads gradient, weight and slots, and writes weight and slots."""
    passes = 3 + 2 * setting.slots
    if setting.gradient_rank is not None and choice.split is None:
        passes += _COMPRESSING
    return updated_bytes(layer, choice, setting) * passes / machine.memory
