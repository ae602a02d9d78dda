"""What tasks write: whole lines to whoever watches, every byte into the log."""

import pytest


def test_each_task_has_a_log_of_its_own(launcher):
    code, out, _, _ = launcher.run("--workers=2", "--only=worker:1", body="print('mine', me)")
    assert code == 0
    assert "worker:1 | mine 1" in out
    assert "worker:0 |" not in out
    assert (launcher.logs() / "worker-0.log").read_text() == "mine 0\n"
    _, out, _, _ = launcher.run("--workers=2", "--no-tee", "--log_dir=else where", body="print('mine', me)")
    assert "mine" not in out
    assert (launcher.folder / "else where" / "worker-1.log").read_text() == "mine 1\n"


@pytest.mark.slow
def test_output_without_line_ends_is_shown_whole(launcher):
    body = "sys.stdout.write('no end'); sys.stdout.flush(); time.sleep(2); sys.stdout.write('the rest')"
    code, out, _, _ = launcher.run("--workers=1", body=body)
    assert code == 0
    assert out.splitlines()[1:] == ["worker:0 | no end", "worker:0 | the rest"]


def test_a_progress_bar_is_one_line(launcher):
    body = "for n in range(50): sys.stdout.write(f'{n}/50 \\b\\b\\r'); sys.stdout.flush()\nprint('50/50')"
    _, out, _, _ = launcher.run("--workers=1", body=body)
    assert out.splitlines()[1:] == ["worker:0 | 50/50"]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["b'x' * 99 + b'\\n'", "b'x' * 100"], ids=["lines", "one line"])
def test_100_mb_of_output_end_up_in_the_log(launcher, line):
    body = f"data = ({line}) * 10000\nfor _ in range(100): sys.stdout.buffer.write(data)"
    code, _, _, seconds = launcher.run("--workers=1", "--no-tee", body=body)
    assert code == 0
    assert (launcher.logs() / "worker-0.log").stat().st_size == 100_000_000
    assert seconds < 40


def test_bytes_that_are_no_text_are_passed_on(launcher):
    code, _, _, _ = launcher.run("--workers=1", body="sys.stdout.buffer.write(b'\\xff\\x00\\xfe\\n')")
    assert code == 0
    assert (launcher.logs() / "worker-0.log").read_bytes() == b"\xff\x00\xfe\n"


@pytest.mark.slow
def test_a_full_disk_costs_the_log_and_not_the_job(launcher):
    code, out, _, _ = launcher.run("--workers=1", "--log_dir=logs", body="print('ran on')", command=None)
    assert code == 0
    full = launcher.folder / "full"
    full.mkdir()
    (full / "worker-0.log").symlink_to("/dev/full")
    code, out, err, _ = launcher.run("--workers=1", f"--log_dir={full}", body="print('ran on')")
    assert code == 0, err
    assert "worker:0 | ran on" in out
    assert "can't be written any more" in out + err
