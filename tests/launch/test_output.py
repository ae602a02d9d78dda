"""What tasks write: whole lines to whoever watches, every byte into the log."""

import re
import time

import limits
import pytest

from toolkit.launch import events


@pytest.mark.slow
def test_each_task_has_a_log_of_its_own(launcher):
    code, out, _, _ = launcher.run("--workers=2", "--show=worker:1", body="print('mine', me)")
    assert code == 0
    assert "worker:1 | mine 1" in out
    assert "worker:0 |" not in out
    assert (launcher.logs() / "worker-0.log").read_text() == "mine 0\n"
    _, out, _, _ = launcher.run("--workers=2", "--show=none", "--log_dir=else where", body="print('mine', me)")
    assert "mine" not in out
    assert (next((launcher.folder / "else where").glob("launch-*/worker-1.log"))).read_text() == "mine 1\n"


@pytest.mark.slow
def test_output_without_line_ends_is_shown_whole(launcher):
    body = "sys.stdout.write('no end'); sys.stdout.flush(); time.sleep(2); sys.stdout.write('the rest')"
    code, out, _, _ = launcher.run("--workers=1", body=body)
    assert code == 0
    assert out.splitlines()[1:-1] == ["worker:0 | no end", "worker:0 | the rest"]


@pytest.mark.slow
def test_a_progress_bar_is_one_line(launcher):
    body = "for n in range(50): sys.stdout.write(f'{n}/50 \\b\\b\\r'); sys.stdout.flush()\nprint('50/50')"
    _, out, _, _ = launcher.run("--workers=1", body=body)
    assert out.splitlines()[1:-1] == ["worker:0 | 50/50"]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["b'x' * 99 + b'\\n'", "b'x' * 100"], ids=["lines", "one line"])
def test_100_mb_of_output_end_up_in_the_log(launcher, line):
    body = f"data = ({line}) * 10000\nfor _ in range(100): sys.stdout.buffer.write(data)"
    code, _, _, seconds = launcher.run("--workers=1", "--show=none", body=body)
    assert code == 0
    assert (launcher.logs() / "worker-0.log").stat().st_size == 100_000_000
    limits.keep(seconds, 40)


@pytest.mark.slow
def test_bytes_that_are_no_text_are_passed_on(launcher):
    code, _, _, _ = launcher.run("--workers=1", body="sys.stdout.buffer.write(b'\\xff\\x00\\xfe\\n')")
    assert code == 0
    assert (launcher.logs() / "worker-0.log").read_bytes() == b"\xff\x00\xfe\n"


@pytest.mark.slow
def test_a_full_disk_costs_the_log_and_not_the_job(launcher):
    body = "print('x' * 100_000); print('ran on')"
    code, out, err, _ = launcher.run("--workers=1", body=body, largest_file=50_000)
    assert code == 0, err
    assert (launcher.logs() / "worker-0.log").stat().st_size == 50_000
    assert "worker:0 | ran on" in out
    assert "can't be written any more" in out + err


@pytest.mark.slow
def test_a_terminal_that_is_paused_stops_neither_tasks_nor_launcher(launcher):
    """Ctrl-S, or `| less`: whoever reads stops reading."""
    body = "for _ in range(200): print('x' * 100_000, flush=True)\ntime.sleep(1)\nopen(f'done{me}', 'w').close()"
    process = launcher.start("--workers=2", "--heartbeat_timeout=5", body=body)
    deadline = time.monotonic() + limits.patient(40)
    record = None
    while record is None or record.read_text().count('"event": "ended"') < 2:
        assert time.monotonic() < deadline
        record = record or next(launcher.folder.glob("runs/*/events.jsonl"), None)
        time.sleep(0.1)
    assert {path.name for path in launcher.folder.glob("done*")} == {"done0", "done1"}
    assert process.poll() is None, "it still has lines to show"
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"lines are left out here; the logs have them" in out
    assert (launcher.logs() / "worker-1.log").stat().st_size == 200 * 100_001
    assert out.rstrip().splitlines()[-1].startswith(b"launch: done in")


NATIVE = '''
lines = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795370327.416749   17060 port.cc:153] oneDNN custom operations are on.
2026-11-22 17:24:28.607656: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow
W0000 00:00:1795370327.416749   17060 gpu_device.cc:2344] Cannot dlopen some GPU libraries.
E0000 00:00:1795370331.375137   17060 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error
I0000 00:00:1795370331.800610   17239 eager_service_impl.cc:355] SessionOptions: goo.gle/debugstr
device_count {
  key: "CPU"
  value: 1
}
allow_soft_placement: true
experimental {
  collective_group_leader: "/job:ps/replica:0/task:0"
}

loss: 0.5 {
I0000 00:00:1795370331.800610   17239 coordination_service.cc:355] The tasks are
/job:worker/replica:0/task:1
E0000 00:00:1795370331.375137   17060 collective_ops.cc:52] connection reset"""
print(lines, flush=True)
'''


@pytest.mark.slow
def test_notes_of_tensorflows_are_in_the_log_only_and_its_errors_are_shown(launcher):
    _, out, _, _ = launcher.run("--workers=1", body=NATIVE)
    shown = [line.removeprefix("worker:0 | ") for line in out.splitlines()[1:-1]]
    error = "E0000 00:00:1795370331.375137   17060 collective_ops.cc:52] connection reset"
    assert shown == ["", "loss: 0.5 {", error]
    assert all(word in (launcher.logs() / "worker-0.log").read_text() for word in ("oneDNN", "device_count", "task:0"))
    _, out, _, _ = launcher.run("--workers=1", "--native_logs", "--log_dir=again", body=NATIVE)
    assert "oneDNN" in out
    assert "device_count" in out


@pytest.mark.slow
def test_the_chiefs_lines_are_shown_or_the_first_workers_unless_others_are_asked_for(launcher):
    body = "print('it is', os.environ['TF_CONFIG'][-30:]); time.sleep(0.5); print('more')"
    _, out, _, _ = launcher.run("--workers=2", "--evaluator", show=None, body=body)
    said, *lines = [line for line in out.splitlines()[1:-1] if not line.startswith("note:")]
    assert said == "launch: these are the lines of worker:0; --show=all shows those of all tasks"
    assert len(lines) == 2
    assert all(line.startswith("worker:0 | ") for line in lines)
    _, out, _, _ = launcher.run("--chief", "--workers=1", "--log_dir=b", show=None, body=body)
    assert {line.partition(" ")[0] for line in out.splitlines() if " | " in line} == {"chief:0"}
    _, out, _, _ = launcher.run("--workers=2", "--evaluator", "--log_dir=c", "--show=worker:1,evaluator:0", body=body)
    assert {line.partition(" ")[0] for line in out.splitlines() if " | " in line} == {"worker:1", "evaluator:0"}
    assert "these are the lines" not in out


@pytest.mark.slow
def test_what_survivors_write_of_a_failure_is_in_their_logs_only(launcher):
    body = """
def told(*_):
    print(*(f"trace {number}" for number in range(60)), sep="\\n", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, told)
print("up", flush=True)
while me == 0 or not os.path.exists("go"): time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = launcher.start("--workers=2", "--max_restarts=1", body=body)
    text = b""
    while text.count(b"| up") < 2:
        text += process.stdout.readline()
    (launcher.folder / "go").touch()
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert b"trace" not in rest
    # In the second attempt worker:1 may be gone before worker:0 is up.
    assert (
        len(re.findall(rb"launch: 6[01] lines that worker:0 wrote after worker:1 had failed: see its log", rest)) == 2
    )
    assert b"worker:1 | up" in rest, "the next attempt's lines are shown again"
    assert (launcher.logs() / "worker-0.log").read_text().count("trace") == 60
    assert b"worker:1 failed first: it was ended by SIGKILL" in err


def test_a_long_line_is_put_together_from_its_pieces():
    reader = events.Reader()
    text = events.line(events.event("result", data="x" * 1_000_000))
    found = [each for start in range(0, len(text), 7777) for each in reader.events(text[start : start + 7777])]
    assert [len(each["data"]) for each in found] == [1_000_000]
    assert reader.events(b"{}\n" + text + text[:5]) == found
    assert reader.events(text[5:]) == found
