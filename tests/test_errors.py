import pickle
import re

import processes
import pytest

from toolkit import errors


def test_the_message_says_what_was_asked_what_was_found_and_what_to_do():
    error = errors.DeviceError(asked="gpus=4 asks for 4 GPUs", found="this machine has 2", remedy="Ask for gpus=2")
    assert str(error) == "gpus=4 asks for 4 GPUs, but this machine has 2. Ask for gpus=2."
    assert error.exit_code == 2


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (1, 129)])
def test_a_signal_gives_the_exit_code_a_shell_expects(number, code):
    assert errors.StoppedBySignal(number, step=3).exit_code == code


def test_every_exception_is_in_the_tree_of_the_docstring():
    for name in errors.__all__:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    "error",
    [
        errors.StrategyError(asked="two", found="one", remedy="Ask for one"),
        errors.RunDirectoryError(asked="two", found="one", remedy="Ask for one"),
        errors.Diverged("NaN"),
    ],
)
def test_an_error_arrives_in_another_process_as_it_was(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert again.exit_code == error.exit_code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [((), r"error: two, but one\. Ask for one\. \(in .*script.py, line 3; "), (("-X", "dev"), "Traceback")],
)
def test_a_script_ends_in_the_sentence_and_where_it_is(tmp_path, flags, said):
    script = tmp_path / "script.py"
    script.write_text(
        "import toolkit.errors\n"
        "def ask():\n"
        "    raise toolkit.errors.StrategyError(asked='two', found='one', remedy='Ask for one')\n"
        "ask()\n"
    )
    ended = processes.python(tmp_path, *flags, str(script), limit=60)
    assert re.search(said, ended.stderr)
    assert ("Traceback" in ended.stderr) == bool(flags)
    assert ended.returncode == (1 if flags else 2)
