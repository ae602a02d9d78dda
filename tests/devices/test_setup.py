"""GPU paths without a GPU: TensorFlow's `tf.config` is the seam, NVML's answer is given."""

import subprocess
import sys
import types

import processes
import pytest

from toolkit.devices import Gpu, Inventory, inventory, setup
from toolkit.errors import DeviceError

CARDS = Inventory(gpus=tuple(Gpu(index=i, name="A100", uuid=f"GPU-{i}", memory_mib=40960) for i in range(4)), cores=8)
BARE = Inventory(without_gpus="NVML: Driver Not Loaded", cores=2)


class FakeTensorFlow(types.ModuleType):
    """Records what is asked of tf.config, and refuses it once `started`."""

    def __init__(self, gpus):
        super().__init__("tensorflow")
        self.calls = []
        self.started = False
        named = types.SimpleNamespace
        physical = {
            "GPU": [named(name=f"/physical_device:GPU:{i}") for i in range(gpus)],
            "CPU": [named(name="/physical_device:CPU:0")],
        }

        def record(name):
            def call(*arguments):
                if self.started:
                    raise RuntimeError("cannot be modified after being initialized")
                self.calls.append((name, *arguments))

            return call

        self.config = named(
            list_physical_devices=lambda kind: list(physical[kind]),
            list_logical_devices=lambda: [named(name="/device:CPU:0")],
            set_visible_devices=record("visible"),
            set_logical_device_configuration=record("logical"),
            LogicalDeviceConfiguration=lambda memory_limit=None: memory_limit,
            set_soft_device_placement=record("soft"),
            experimental=named(set_memory_growth=record("growth")),
            threading=named(
                set_inter_op_parallelism_threads=record("inter"), set_intra_op_parallelism_threads=record("intra")
            ),
        )
        self.debugging = named(set_log_device_placement=record("log"))
        self.physical = physical

    def did(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def machine(monkeypatch):
    def make(inventory, *, gpus=None, **environment):
        fake = FakeTensorFlow(len(inventory.gpus) if gpus is None else gpus)
        monkeypatch.setitem(sys.modules, "tensorflow", fake)
        monkeypatch.setattr("toolkit.devices.inventory.take", lambda: inventory)
        monkeypatch.setattr(setup, "_done", None)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return fake

    return make


def test_gpus_are_taken_in_order_with_growth(machine):
    fake = machine(CARDS, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    done = setup.configure(gpus=2)
    first_two = fake.physical["GPU"][:2]
    assert fake.did("visible") == [(first_two, "GPU")]
    assert fake.did("growth") == [(first_two[0], True), (first_two[1], True)]
    assert done.logical_devices == ("GPU:0", "GPU:1")
    assert not done.emulated
    assert done.gpus == ("card 0: A100, 40960 MiB", "card 1: A100, 40960 MiB")


def test_all_gpus_unless_a_number_is_given(machine):
    machine(CARDS)
    assert setup.configure().replicas == 4


STEP = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_LOCALID": "1"}
RANK = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("launcher", "own"),
    [
        (STEP, [2, 3]),
        (STEP | {"SLURM_NODEID": "0"}, [1]),
        (STEP | {"SLURM_GPU_BIND": "none"}, [2, 3]),
        (STEP | {"SLURM_GPUS_PER_TASK": "4"}, [0, 1, 2, 3]),
        (STEP | {"TOOLKIT_STATUS": "worker:1@/some/socket"}, [0, 1, 2, 3]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4,8"}, [0, 1, 2, 3]),
        (RANK, [1]),
        (STEP | RANK, [1]),  # mpirun in an allocation: srun has started its daemons.
    ],
)
def test_of_a_nodes_gpus_each_of_its_tasks_takes_its_part(machine, launcher, own):
    machine(CARDS, CUDA_DEVICE_ORDER="PCI_BUS_ID", **launcher)
    assert setup.configure().gpus == tuple(f"card {number}: A100, 40960 MiB" for number in own)


def test_gpus_that_can_not_be_divided_among_a_nodes_tasks_are_refused(machine):
    machine(CARDS, **STEP | {"SLURM_STEP_TASKS_PER_NODE": "4,3"})
    with pytest.raises(DeviceError, match=r"3 tasks .* all of its 4 GPUs.*--gpus-per-task=1"):
        setup.configure()


def test_a_strategy_without_configure_takes_its_part_too(machine, monkeypatch):
    fake = machine(CARDS)
    fake.config.get_visible_devices = lambda kind: list(fake.physical[kind])
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    inventory.take_own_gpus()
    assert fake.did("visible") == [([fake.physical["GPU"][1]], "GPU")]
    fake.started = True
    with pytest.raises(DeviceError, match="TensorFlow has started"):
        inventory.take_own_gpus()


@pytest.mark.parametrize(("memory", "limit"), [(0.4, 16384), (4096, 4096), ("0.5", 20480)])
def test_a_limit_is_the_same_for_every_gpu(machine, memory, limit):
    fake = machine(CARDS)
    setup.configure(gpus=2, memory=memory)
    assert [limits for _, limits in fake.did("logical")] == [[limit], [limit]]
    assert not fake.did("growth")


def test_all_memory_sets_nothing(machine):
    fake = machine(CARDS)
    setup.configure(gpus=4, memory="all")
    assert not fake.did("logical")
    assert not fake.did("growth")


def test_one_gpu_is_split_into_several_logical_ones(machine):
    fake = machine(CARDS)
    done = setup.configure(gpus=3, split=3, memory=4096)
    assert fake.did("logical") == [(fake.physical["GPU"][0], [4096] * 3)]
    assert done.logical_devices == ("GPU:0", "GPU:1", "GPU:2")


def test_a_visible_subset_by_nvidia_smis_numbers(machine):
    fake = machine(CARDS, gpus=3, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="3,1,0")
    done = setup.configure(visible_devices="0,3")
    assert fake.did("visible") == [([fake.physical["GPU"][2], fake.physical["GPU"][0]], "GPU")]
    assert done.gpus[0].startswith("card 0")


@pytest.mark.parametrize(
    ("inventory", "seen", "environment", "request_", "word"),
    [
        (CARDS, 4, {}, {"gpus": 5}, "at most gpus=4"),
        (CARDS, 4, {}, {"gpus": 0}, "must be at least 1"),
        (CARDS, 4, {}, {"gpus": -1}, "must be at least 1"),
        (CARDS, 4, {}, {"gpus": "two"}, "isn.t a whole number"),
        (CARDS, 4, {}, {"gpus": True}, "isn.t a whole number"),
        (CARDS, 4, {}, {"visible_devices": "7"}, "4 GPUs"),
        (CARDS, 4, {}, {"visible_devices": "1"}, "restart"),
        (
            CARDS,
            1,
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"},
            {"visible_devices": "2"},
            "sees 1",
        ),
        (CARDS, 4, {}, {"split": 2}, "memory=growth"),
        (CARDS, 4, {}, {"emulate": "maybe"}, "auto, never, always"),
        (CARDS, 4, {}, {"inter_op_threads": -1}, "must be at least 0"),
        (CARDS, 0, {}, {"gpus": 2}, r"tf-strategy-toolkit\[gpu\]"),
        (BARE, 0, {}, {"gpus": 2, "emulate": "never"}, "Driver Not Loaded"),
        (BARE, 0, {}, {"gpus": 65}, "at most gpus=64"),
        (BARE, 0, {}, {"visible_devices": "0"}, "no GPU"),
    ],
)
def test_what_can_not_be_done_is_said(machine, inventory, seen, environment, request_, word):
    machine(inventory, gpus=seen, **environment)
    with pytest.raises(DeviceError, match=word):
        setup.configure(**request_)


def test_cpu_devices_stand_in_where_there_is_no_gpu(machine):
    fake = machine(BARE)
    done = setup.configure(gpus=3, inter_op_threads=2, intra_op_threads=1, soft_placement=False, log_placement=True)
    assert done.emulated
    assert done.logical_devices == ("CPU:0", "CPU:1", "CPU:2")
    assert fake.did("logical") == [(fake.physical["CPU"][0], [None] * 3)]
    assert (fake.did("inter"), fake.did("intra")) == ([(2,)], [(1,)])
    assert (fake.did("soft"), fake.did("log")) == ([(False,)], [(True,)])


def test_emulation_on_request_hides_the_gpus(machine):
    fake = machine(CARDS)
    assert setup.configure(gpus=2, emulate="always").emulated
    assert fake.did("visible") == [([], "GPU")]


def test_hidden_gpus_count_as_none(machine):
    machine(CARDS, gpus=0, CUDA_VISIBLE_DEVICES="-1")
    assert setup.configure(gpus=2).emulated


def test_the_same_request_twice_does_nothing(machine):
    fake = machine(BARE)
    first = setup.configure(gpus=2)
    calls = len(fake.calls)
    assert setup.configure(gpus=2) is first
    assert len(fake.calls) == calls


def test_another_request_says_where_the_first_was(machine):
    machine(BARE)
    setup.configure(gpus=2)
    with pytest.raises(DeviceError, match=r"gpus=3.*test_setup\.py:\d+"):
        setup.configure(gpus=3)


def test_too_late_says_what_is_fixed_and_where_to_move_the_call(machine):
    fake = machine(BARE)
    fake.started = True
    with pytest.raises(DeviceError, match=r"logical devices CPU:0.*before the first operation"):
        setup.configure(gpus=2)


def test_the_value_prints_as_a_table(machine):
    import rich.console

    machine(BARE)
    console = rich.console.Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(setup.configure(gpus=2))
    console.file.close()
    text = console.export_text()
    assert "logical devices" in text
    assert "CPU:0, CPU:1" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_too_late_with_tensorflow_itself(tmp_path):
    program = (
        "import tensorflow as tf, toolkit\n"
        "tf.constant(1)\n"
        "try:\n    toolkit.devices.configure(gpus=2)\n"
        "except toolkit.errors.DeviceError as error:\n    print(error)\n"
    )
    done = processes.python(tmp_path, "-c", program, limit=120)
    assert "already fixed them (logical devices CPU:0" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_a_real_gpu_is_limited():
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU on this machine")
    program = (
        "import toolkit, tensorflow as tf\n"
        "print(toolkit.devices.configure(gpus=2, split=2, memory=512))\n"
        "print(len(tf.config.list_logical_devices('GPU')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("2"), done.stderr
