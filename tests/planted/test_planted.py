"""The table of planted faults is true of the code, and what plants them notices."""

import pathlib

import faults
import pytest

from tests.planted import __main__ as plant

QUICK = ("a restart counts twice", "the first shares of a batch aren't the larger ones")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_line_of_the_code(fault):
    text = (plant.ROOT / fault.path).read_text(encoding="utf-8")
    assert plant.planted(fault, text) != text
    for each in fault.tests:
        assert (plant.ROOT / each.split()[0]).exists(), each


def test_every_fault_that_was_planted_was_noticed():
    assert [name for name, (by, _) in plant.read().items() if not by] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_noticed(tmp_path, name):
    fault = next(each for each in faults.FAULTS if each.name == name)
    tree = plant.copied(tmp_path / "tree")
    before = pathlib.Path(tree, fault.path).read_text(encoding="utf-8")
    assert plant.noticed_by(fault, tree)
    assert pathlib.Path(tree, fault.path).read_text(encoding="utf-8") == before
