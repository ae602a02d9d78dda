import pickle

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
