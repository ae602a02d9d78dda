"""What a ps notes of each update."""

import tensorflow as tf

from toolkit.strategies.parameter_servers.ledger import APPLIED, CAPACITY, INTERRUPTED, NOTHING, Ledger


def functions(ledger):
    @tf.function
    def begin(place, version):
        return ledger.begin(place, version)

    @tf.function
    def finish(place, note):
        ledger.finish(place, note)

    return begin, finish


def place(step):
    return tf.constant(step % CAPACITY, tf.int64)


def test_staleness_counts_updates_begun_since_the_parameters_were_read():
    ledger = Ledger("CPU:0")
    begin, finish = functions(ledger)
    read = ledger.version()  # Step 0 and step 1 read the same parameters.
    first, second = begin(place(0), read), begin(place(1), read)
    assert list(ledger.look([0, 1, 2])) == [INTERRUPTED, INTERRUPTED, NOTHING]
    finish(place(0), first)
    late = ledger.version()  # Step 2 reads while step 1 is being applied: it may have missed that.
    finish(place(1), second)
    finish(place(2), begin(place(2), late))
    assert list(ledger.look([0, 1, 2])) == [APPLIED, APPLIED + 1, APPLIED + 1]


def test_steps_beyond_its_capacity_take_the_places_of_the_first():
    ledger = Ledger("CPU:0")
    begin, finish = functions(ledger)
    finish(place(CAPACITY + 3), begin(place(CAPACITY + 3), ledger.version()))
    assert list(ledger.look([CAPACITY + 3])) == [APPLIED]
    assert int(ledger.version()) == 1
    ledger.clear()
    assert list(ledger.look([CAPACITY + 3])) == [NOTHING]
