"""What steps exchange is what tests/conformance/exchanges/ says: whoever changes it sees what else it changes."""

import batteries
import exchanges
import processes
import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", batteries.rows(exchanges.LISTS, ["replicated_8", "sharded_weights_8"]))
def test_a_step_exchanges_what_its_list_says(tmp_path, name):
    done = processes.python(tmp_path, exchanges.__file__, f"--folder={tmp_path / 'seen'}", name, limit=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "seen" / f"{name}.txt").read_text() == (exchanges.FOLDER / f"{name}.txt").read_text(), (
        f"python tests/conformance/exchanges.py {name} writes the list anew"
    )


def test_every_list_is_one_of_the_program():
    assert {each.stem for each in exchanges.FOLDER.iterdir()} == set(exchanges.LISTS)
