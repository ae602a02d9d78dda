"""How much is tried, and what may come of it: what was asked for, or a sentence about what is wrong. In time.

    TOOLKIT_FUZZ_CASES=10000 python -m pytest tests/fuzz --timeout=0

tries so many cases of each test; without it 100.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from toolkit.errors import RequestError

CASES = int(os.environ.get("TOOLKIT_FUZZ_CASES", "100"))
_SECONDS = 3.0
_HANGS = 20.0
_MEMORY = 4 << 30  # Bytes that a case may take; a list without end shall fail, and not the machine.
_LONGEST = 20_000  # Characters of a message: somebody is to read it.


def fuzzed(share=1.0):
    """Settings of a test, which tries this share of all cases."""
    return settings(
        max_examples=max(10, int(CASES * share)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


@contextlib.contextmanager
def limited(seconds=_SECONDS):
    """Fails what computes for longer, or takes memory without end."""

    def stop(*_):
        raise AssertionError(f"it still computes after {_HANGS:g} s")

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)  # SIGALRM is pytest-timeout's.
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, _HANGS)
    gc.disable()  # A collection, of all that TensorFlow has made, takes a second and comes at any time.
    began = time.thread_time()
    try:
        yield
        took = time.thread_time() - began
        assert took < seconds, f"it took {took:.1f} s"
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


@contextlib.contextmanager
def refused():
    """Takes a refusal for an answer, where it says what was asked, what was found and what to do."""
    said = None
    try:
        yield
    except RequestError as error:
        said = error
    if said is not None:
        assert all(part.strip() for part in (said.asked, said.found, said.remedy)), repr(said)
        assert len(str(said)) < _LONGEST, len(str(said))
        str(said).encode(errors="backslashreplace")


@contextlib.contextmanager
def answered():
    """A case: it comes to an end in time, with a result or a refusal."""
    with limited(), refused():
        yield


class Pairs(list):
    """An object of JSON that may have a key more than once."""


def dumped(value):
    """JSON, with NaN, keys given twice, and letters that are half of a pair."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{dumped(each)}" for name, each in value) + "}"
    if isinstance(value, dict):
        return dumped(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return value.text if isinstance(value, Raw) else json.dumps(value)


class Raw:
    """A piece of JSON that Python wouldn't write."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return f"Raw({self.text[:40]!r}...)"


ODD_TEXTS = (
    "", " ", "\0", "\n", "\ud800", "\udcff", "-", "--", "%", "%s", "{}", "~", "~nobody-of-that-name", "..",
    "/", "'", '"', "$(x)",
    "`x`", "é", "\u202e", "٣", "nan", "-1", "1e999", "0x1f", "9" * 30, "9" * 5000, "x" * 300, "a." * 200,
    "x" * 100_000,
    "[" * 100_000,
)  # fmt: skip
texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(st.characters(), max_size=20))
numbers = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63, -(2**63), 10**20, 10**400, -0.0, 0.5, 1e308, float("nan"), float("inf")]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, texts, st.sampled_from([Raw("9" * 5000), Raw("1e9999"), Raw("[" * 3000)])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(st.tuples(texts, inner), max_size=4).map(Pairs)),
    max_leaves=8,
)


@st.composite
def damaged(draw, text):
    """A text in which something is left out, put twice, or replaced."""
    made = draw(text)
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, min(len(made), 400)))
        end = min(len(made), start + draw(st.integers(0, 10)))
        piece = draw(st.one_of(texts, st.sampled_from(list('{}[],:"\\0-')), st.just(made[start:end] * 2)))
        made = made[:start] + piece + made[end:]
    return made
