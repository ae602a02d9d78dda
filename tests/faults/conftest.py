"""What the fault tests share: undisturbed runs, and a table row for each test."""

import faulty
import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The weights of each kind of job when nothing happens to it."""
    found = {}

    def weights(kind):
        if kind not in found:
            with faulty.faulty(tmp_path_factory.mktemp(f"undisturbed-{kind}"), kind) as job:
                found[kind] = job.finish()
        return found[kind]

    return weights


@pytest.fixture
def measured(record_property):
    """Takes a row's name and its figures, which benchmarks/reliability.py puts into a table."""

    def record(row, **figures):
        record_property("row", row)
        for name, value in figures.items():
            record_property(name, round(value, 2) if isinstance(value, float) else value)

    return record
