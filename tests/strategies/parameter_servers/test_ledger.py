"""What a ps's ledger holds of each update."""

import tensorflow as tf

from toolkit.strategies.parameter_servers.ledger import APPLIED, CAPACITY, INTERRUPTED, NOTHING, Ledger


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
