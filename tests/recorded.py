"""NVML as two recorded machines answer it: what `pynvml` returns and raises, without a card.

Written after NVIDIA's NVML API reference and the pynvml module: most machines that run the tests have none.
"""

import types


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    def __str__(self):
        return "Not Supported"


A100 = {
    "name": "NVIDIA A100-SXM4-40GB",
    "uuid": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "capability": [8, 0],
    "memory": (40960 << 20, 31000 << 20),
    "bus": b"00000000:07:00.0",
    "busy": 97,
    "temperature": 61,
    "power": (312_400, 400_000),
    "compute": [(4242, 30 << 30), (1, None)],
}
FREE = {
    **A100,
    "uuid": "GPU-aa000000-0000-0000-0000-000000000001",
    "memory": (40960 << 20, 450 << 20),
    "bus": "00000000:0F:00.0",
    "busy": 0,
    "compute": [],
}
MIG = {**FREE, "uuid": "GPU-bb000000-0000-0000-0000-000000000002", "mig": ["MIG-1111", None, "MIG-2222"], "busy": None}
H200 = {**FREE, "name": "NVIDIA H200", "uuid": "GPU-dd000000-0000-0000-0000-000000000003", "capability": [9, 0]}
RTX_5090 = {
    **FREE,
    "name": "NVIDIA GeForce RTX 5090",
    "uuid": "GPU-ee000000-0000-0000-0000-000000000004",
    "capability": [12, 0],
}
LAPTOP = {"name": b"Quadro M620", "uuid": b"GPU-cc000000", "memory": (2048 << 20, 100 << 20), "bus": "00000000:01:00.0"}


def nvml(*cards, cuda=13000):
    """A module like pynvml, for a machine with these cards and a driver that takes CUDA up to 13.0 (13000)."""

    def of(card, key):
        if card.get(key) is None:
            raise NotSupported
        return card[key]

    def memory(card):
        total, used = of(card, "memory")
        return types.SimpleNamespace(total=total, used=used, free=total - used)

    def mig(card, slot):
        if card["mig"][slot] is None:
            raise NVMLError("Not Found")
        return {"uuid": card["mig"][slot]}

    def running(key):
        return lambda card: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in of({key: [], **card}, key)
        ]

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda index: cards[index],
        nvmlDeviceGetName=lambda card: card["name"],
        nvmlDeviceGetUUID=lambda card: card["uuid"],
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=lambda card: of(card, "capability"),
        nvmlDeviceGetMigMode=lambda card: (1 if of(card, "mig") else 0, 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda card: len(card["mig"]),
        nvmlDeviceGetMigDeviceHandleByIndex=mig,
        nvmlDeviceGetPciInfo=lambda card: types.SimpleNamespace(busId=of(card, "bus")),
        nvmlDeviceGetUtilizationRates=lambda card: types.SimpleNamespace(gpu=of(card, "busy"), memory=0),
        nvmlDeviceGetTemperature=lambda card, _: of(card, "temperature"),
        nvmlDeviceGetPowerUsage=lambda card: of(card, "power")[0],
        nvmlDeviceGetEnforcedPowerLimit=lambda card: of(card, "power")[1],
        nvmlDeviceGetComputeRunningProcesses=running("compute"),
        nvmlDeviceGetGraphicsRunningProcesses=running("graphics"),
    )
