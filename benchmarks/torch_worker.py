"""The networks of `benchmarks.networks` in PyTorch, and how they are trained there by two processes over gloo."""

import datetime
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel
from torch.nn import functional

from benchmarks import networks

__all__ = ["train"]


def train(name: str, how: str, *, rank: int, addresses: list[str], steps: int, clock: Any) -> None:
    """Trains, each step between `clock.begin` and `clock.end`.

    Args:
        name: Of a network.
        how: "torch float32" without an exchange, "ddp float32", "ddp float16" with DDP's compression hook, or
            "tp float32": PyTorch's tensor parallel API, where both processes have all examples.
        rank: Which of the two this is.
        addresses: Of both.
        steps: How many.
        clock: Told of each step, and of its loss.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    host, port = addresses[0].split(":")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    library, _, dtype = how.partition(" ")
    model: Any = _network(name)
    if library == "tp":
        model = _tensor_parallel(model)
        each = [networks.examples(name, of) for of in (0, 1)]
        x, y = (torch.cat([torch.from_numpy(part) for part in parts]) for parts in zip(*each, strict=True))
    else:
        if library == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        if dtype == "float16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        x, y = (torch.from_numpy(part) for part in networks.examples(name, rank))
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        clock.begin(step)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        clock.end(step, float(loss.detach()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads  # Of a head.
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        heads = [part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        y = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, stride=4)
        self.places = nn.Conv2d(128, 128, 3, padding=1, groups=128)

    def forward(self, x: Any) -> Any:
        x = self.patches(x / 64 - 1.9)
        return (x + self.places(x)).flatten(2).transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.mean(1)


def _network(name: str) -> nn.Sequential:
    if name == "vit":
        blocks = [_Block(128, 4, 512) for _ in range(4)]
        return nn.Sequential(_Patches(), *blocks, nn.LayerNorm(128), _Mean(), nn.Linear(128, 10))
    if name == "wide_ffn":
        blocks = [_Block(networks.WIDTH, networks.HEADS, networks.FFN) for _ in range(networks.BLOCKS)]
        table = nn.Embedding(networks.VOCABULARY, networks.WIDTH)
        return nn.Sequential(table, *blocks, _Mean(), nn.Linear(networks.WIDTH, 10))
    parts: list[nn.Module] = []
    all_filters = networks.FILTERS[name]
    for inputs, filters in zip((3, *all_filters), all_filters, strict=False):
        parts += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    if name == "conv":
        parts[-1] = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(all_filters[-1], 10))
    parts += [nn.Flatten(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return nn.Sequential(*parts)


def _tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Blocks divided as Megatron-LM has it; everything else is computed by both."""
    among = init_device_mesh("cpu", (2,))
    columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
    for block in model:
        if isinstance(block, _Block):
            plan = {each: columns() for each in ("query", "key", "value", "up")} | {"out": rows(), "down": rows()}
            parallel.parallelize_module(block, among, plan)
    return model
