"""What a ps's ledger holds of each update."""

import threading
import types

import tensorflow as tf

from toolkit.strategies.parameter_servers.ledger import APPLIED, CAPACITY, INTERRUPTED, NOTHING, Ledger, collect
from toolkit.strategies.parameter_servers.session import Session
from toolkit.strategies.parameter_servers.worker_step import WorkerStep


def functions(ledger):
    @tf.function
    def begin(slot, version):
        return ledger.begin(slot, version)

    @tf.function
    def finish(slot, entry):
        ledger.finish(slot, entry)

    return begin, finish


def slot(step):
    return tf.constant(step % CAPACITY, tf.int64)


def test_staleness_counts_updates_begun_since_the_parameters_were_read():
    ledger = Ledger("CPU:0")
    begin, finish = functions(ledger)
    read = ledger.version()  # Step 0 and step 1 read the same parameters.
    first, second = begin(slot(0), read), begin(slot(1), read)
    assert list(ledger.entries([0, 1, 2])) == [INTERRUPTED, INTERRUPTED, NOTHING]
    finish(slot(0), first)
    late = ledger.version()  # Step 2 reads while step 1 is being applied: it may have missed that.
    finish(slot(1), second)
    finish(slot(2), begin(slot(2), late))
    assert list(ledger.entries([0, 1, 2])) == [APPLIED, APPLIED + 1, APPLIED + 1]


def test_steps_beyond_its_capacity_take_the_slots_of_the_first():
    ledger = Ledger("CPU:0")
    begin, finish = functions(ledger)
    finish(slot(CAPACITY + 3), begin(slot(CAPACITY + 3), ledger.version()))
    assert list(ledger.entries([CAPACITY + 3])) == [APPLIED]
    assert int(ledger.version()) == 1
    ledger.clear()
    assert list(ledger.entries([CAPACITY + 3])) == [NOTHING]


def test_what_was_collected_is_not_counted_again():
    ledger = Ledger("CPU:0")
    begin, finish = functions(ledger)
    finish(slot(0), begin(slot(0), ledger.version()))
    assert collect([ledger], 0, 2) == ([0], 1), "of two steps one was applied"
    assert collect([ledger], 0, 1) == ([], 1)


def test_a_step_of_a_worker_that_died_is_applied_by_those_ps_only_that_have_not_applied_it():
    ledgers = {device: Ledger(device) for device in ("CPU:0", "CPU:1")}
    begin, finish = functions(ledgers["CPU:0"])
    finish(slot(5), begin(slot(5), ledgers["CPU:0"].version()))  # The worker died before the other ps got its gradient.
    asked = []

    def steps(stream, items, first, since, *, only):
        asked.append((first, only))
        return lambda _: (tf.zeros(1), {})

    session = Session.__new__(Session)
    session._variables = types.SimpleNamespace(ledgers=ledgers, applied_on=set(ledgers))
    session._functions, session._first = types.SimpleNamespace(steps=steps), 0
    session._lock, session.recovered, session.interrupted = threading.Lock(), 0, 0
    session._run_again(None, [(5, None), (6, None)])
    assert asked == [(5, frozenset({"CPU:1"})), (6, None)]
    assert session.recovered == 1
    slots = dict.fromkeys(ledgers, slot(5))
    versions = {device: ledger.version() for device, ledger in ledgers.items()}
    step = WorkerStep(session._variables, None, versions, slots, asked[0][1])
    for device in ledgers:
        step.begin(device)
    assert list(step.entries) == ["CPU:1"]
