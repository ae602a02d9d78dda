import subprocess
import sys
import unittest.mock

import limits
import pytest


def test_what_takes_too_long_fails_in_ci_only(monkeypatch):
    monkeypatch.setattr(limits, "IN_CI", False)
    limits.keep(61.2, 60, what="processor time:")
    limits.keep(59, 60)
    assert limits.passed() == ["processor time: 61.2 s, of 60"]
    limits.start()
    monkeypatch.setattr(limits, "IN_CI", True)
    with pytest.raises(pytest.fail.Exception, match=r"it took 61\.2 s, of 60: make it cheaper"):
        limits.keep(61.2, 60, remedy="make it cheaper")


def test_limits_against_hangs_are_longer_where_the_machine_is_unknown(monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE", 10)
    item = unittest.mock.Mock()
    item.get_closest_marker.return_value = None
    limits.make_tests_patient([item], 300)
    assert item.add_marker.call_args.args[0].args == (3000,)


def test_waits_for_a_process_are_patient_and_waits_of_the_toolkit_are_not(monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE", 10)
    wait, communicate = unittest.mock.Mock(), unittest.mock.Mock()
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    limits.make_waits_patient()
    for timeout in (None, 2, 40):
        subprocess.Popen.wait("a process", timeout)
        subprocess.Popen.communicate("a process", timeout=timeout)
    assert [call.args[-1] for call in wait.call_args_list] == [None, 2, 400]
    assert [call.args[-1] for call in communicate.call_args_list] == [None, 2, 400]


@pytest.mark.slow
def test_a_test_that_takes_longer_than_in_ci_is_named_at_the_end(tmp_path):
    """Its own pytest, with the hooks of tests/conftest.py and a share that nothing keeps."""
    (tmp_path / "test_slow.py").write_text("def test_sums():\n    assert sum(range(3_000_000)) > 0\n")
    program = f"""
import sys; sys.path.insert(0, {str(limits.__file__.rpartition("/")[0])!r})
import conftest, limits, pytest
conftest.SHARES["unmarked"] = 0.001
limits.IN_CI = False
conftest.four_devices = conftest.work_is_noted = None
sys.exit(pytest.main(["-p", "no:cacheprovider", "-q", "test_slow.py"], plugins=[conftest]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slower than allowed in CI, which fails nothing here: test_sums (processor time: " in done.stdout
