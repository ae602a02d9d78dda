"""What every test may rely on: a clean environment, four logical CPU devices, and no process left behind."""

import collections
import math
import os
import pathlib
import re
import signal
import subprocess
import sys

import hypothesis
import limits
import preloaded
import psutil
import pytest

pytest_plugins = ["s3_server"]
ROOT = pathlib.Path(__file__).parent.parent
_VARIABLES = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "KERAS_BACKEND", "TFDS_DATA_DIR")
# Seconds of processor time that a test may take in CI; several times what it should, for machines that are busy.
SHARES = {"unmarked": 10, "slow": 60}
_CIRCLES = ("soak", "fault", "gpu", "long", "slow")
_LIMIT = "limit"  # The name under which a test's report has the limits that it has passed.
_WORK = []  # What the test that runs has done that scripts/check has no time for.
_LAUNCHERS = ("SLURM_", "OMPI_", "JOB_COMPLETION_INDEX", "TOOLKIT_")

# The reasons for which .ci/run may skip a test: what it can't install. Any other skip fails it.
ALLOWED_SKIPS = re.compile(
    "|".join(
        (
            r"\bGPU",  # Only some machines have one.
            r"^no (mount|network) namespaces?\b",  # A container may forbid them.
            r"\busers (can't|may not)\b",
            r"\broot's\b",
            r"of Keras 3\.12 (fails|sums|is missing)",  # What the oldest Keras can't do, or does otherwise.
            r"^the session sends no dispatch as long as that$",  # A draw of Hypothesis's that says nothing.
            r"^Grain isn't installed$",  # Its wheels lag behind Python's releases.
            r"is not on this machine$|^the preparation script needs Pillow$",  # A data set that some developers have.
        )
    )
)

# Started in the background by a shell, or by nohup: the programs that tests start would ignore the signal, too.
for _number, _plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _plain)


# How long an example takes depends on who else is at work on the machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Nothing of the user's own settings or data reaches a test, nor the network."""
    launchers = [name for name in os.environ if name.startswith(_LAUNCHERS)]
    for name in (*_VARIABLES, *launchers):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # Where the launcher lists its jobs.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # Nobody listens on the discard port.
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")  # Or TensorFlow looks for the other tasks through that proxy.
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.fixture(scope="session", autouse=True)
def own_state_home(tmp_path_factory):
    """Jobs that tests launch are not listed among those of whoever tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_process_left():
    """Fails a test that leaves a child process running, and ends it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before and _runs(p)]
    left = [p for p in left if p.pid not in preloaded.servers()]
    for process in left:
        process.kill()
    assert not left, f"left running: {left}"


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It has ended between the two.
        return False


@pytest.fixture
def plain_starts(monkeypatch):
    """Programs start as a user starts them, and import TensorFlow themselves."""
    monkeypatch.setattr(preloaded, "forks", False)


@pytest.fixture(scope="session", autouse=True)
def four_devices():
    """TensorFlow in this process, with four logical CPU devices: set before any test lets it start."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # Those that wait for work spin, beside other tests.
    # A test that collects an earlier one's iterator can wait a minute for its tuning thread (toolkit/data/pipeline.py).
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    assert hasattr(tf.data.Dataset, "_apply_debug_options"), "TensorFlow asks each data set for its options elsewhere"
    tf.data.Dataset._apply_debug_options = lambda dataset: dataset.with_options(untuned)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    return tuple(f"CPU:{i}" for i in range(4))


@pytest.fixture
def regularizers_are_means():
    """Skips where an activity regularizer of a layer isn't what today's Keras has."""
    import keras

    if keras.__version__.startswith("3.12."):
        pytest.skip("an activity regularizer of Keras 3.12 sums over the batch, which nobody can tell from a mean")


@pytest.fixture(scope="session", autouse=True)
def work_is_noted(four_devices):
    """Notes what scripts/check has no time for: a program in Python that is started, and `fit`."""
    import keras

    start, fit = subprocess.Popen.__init__, keras.Model.fit

    def starting(process, args, *rest, **settings):
        if not isinstance(args, (str, bytes)) and next(iter(args), None) == sys.executable:
            _WORK.append("starts a process")
        start(process, args, *rest, **settings)

    def fitting(*args, **settings):
        _WORK.append("trains")
        return fit(*args, **settings)

    subprocess.Popen.__init__ = starting
    # Where it is defined: Keras looks whether a model's class has another one.
    next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind)).fit = fitting


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Has faults start their programs plainly: their figures are of what users start."""
    preloaded.forks = not (item.get_closest_marker("fault") or item.get_closest_marker("soak"))
    _WORK.clear()
    limits.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test that does more than its circle has time for: see SHARES, in CI only, and `work_is_noted`."""
    before = sum(os.times()[:4])
    result = yield
    seconds = sum(os.times()[:4]) - before
    circle = next((name for name in _CIRCLES if item.get_closest_marker(name)), "unmarked")
    remedy = "make it cheaper, or mark it slow or long"
    limits.keep(seconds, SHARES.get(circle, math.inf), what="processor time:", remedy=remedy)
    if circle == "unmarked" and _WORK:
        pytest.fail(f"this test {_WORK[0]}: mark it slow, so that scripts/check leaves it out")
    item.user_properties += [(_LIMIT, said) for said in limits.passed()]  # Its report carries them to other processes.
    return result


def pytest_configure():
    """What ends a hang is longer outside of CI."""
    limits.make_waits_patient()


def pytest_collection_modifyitems(config, items):
    """Whole files with many slow tests come first, so that two processes that share the files end together."""
    limits.make_tests_patient(items, config.getoption("timeout", None))
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One where seconds are measured; otherwise four, which two cores carry, as some tests always wait."""
    return 1 if re.search(r"(?<!not )\b(fault|soak)\b", config.option.markexpr) else 4


def pytest_terminal_summary(terminalreporter):
    """Prints why tests were skipped, a line for each reason, and which took longer than in CI, in one line."""
    reasons = _skip_reasons(terminalreporter)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    passed = terminalreporter.stats.get("passed", [])
    slower = [
        f"{report.location[2]} ({said})" for report in passed for name, said in report.user_properties if name == _LIMIT
    ]
    if slower:
        terminalreporter.write_line(f"slower than allowed in CI, which fails nothing here: {', '.join(slower)}")


def _skip_reasons(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    return collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """In .ci/run a skip for a reason that isn't allowed fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    refused = [reason for reason in _skip_reasons(reporter) if not ALLOWED_SKIPS.search(reason)]
    for reason in refused:
        reporter.write_line(f"\nnot allowed in .ci/run (tests/conftest.py): skipped: {reason}")
    if refused and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Recipe:
    """Runs a recipe as a user does, with a hard limit."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory

    def start(self, *flags: str, name: str = "cifar_mirrored", **environment: str) -> subprocess.Popen:
        return preloaded.Popen(
            [sys.executable, "-m", f"recipes.{name}", *flags],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *flags: str, limit: float = 240, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(*flags, **environment)
        try:
            out, err = process.communicate(timeout=limit)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def recipe(tmp_path):
    return Recipe(tmp_path)
