"""The launcher, with real processes: what tasks are given, and several jobs at once."""

import json
import os
import re
import shlex
import socket
import subprocess

import limits
import pytest


@pytest.mark.smoke
@pytest.mark.slow
def test_every_task_gets_its_tf_config_and_arguments(launcher):
    code, out, err, _ = launcher.run(
        "--workers=2",
        "--chief",
        "--evaluator",
        command=[
            str(launcher.write('print(os.environ["TF_CONFIG"], sys.argv[1:])')),
            "-m",
            "--workers=9",
            "a b",
            "$(x)",
        ],
    )
    assert code == 0, err
    lines = dict(line.split(" | ") for line in out.splitlines() if " | " in line)
    assert sorted(name.strip() for name in lines) == ["chief:0", "evaluator:0", "worker:0", "worker:1"]
    configs = [json.loads(text.partition(" [")[0]) for text in lines.values()]
    assert all(c["cluster"] == configs[0]["cluster"] for c in configs)
    assert {f"{c['task']['type']}:{c['task']['index']}" for c in configs} == {name.strip() for name in lines}
    assert all(text.endswith("['-m', '--workers=9', 'a b', '$(x)']") for text in lines.values())
    addresses = [a for job in configs[0]["cluster"].values() for a in job]
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)


@pytest.mark.slow
def test_a_task_knows_how_long_it_gets_to_end(launcher):
    code, out, err, _ = launcher.run("--workers=1", "--grace=7.5", body="print('GRACE', os.environ['TOOLKIT_GRACE'])")
    assert code == 0, err
    assert "GRACE 7.5" in out


@pytest.mark.slow
def test_dry_run_prints_what_a_shell_can_run(launcher):
    code, out, _, _ = launcher.run("--workers=2", "--dry_run", body="print('ran', me, len(sys.argv))")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 2
    assert not (launcher.folder / "runs").exists()
    done = subprocess.run(lines[1], shell=True, capture_output=True, text=True, timeout=30, cwd=launcher.folder)
    assert done.stdout == "ran 1 1\n", done.stderr
    assert "TF_CONFIG=" in shlex.split(lines[0])[1]


@pytest.mark.slow
def test_tasks_know_whether_other_launchers_start_the_rest_of_the_job(launcher):
    file = launcher.cluster_file(["127.0.0.1:23771", "127.0.0.1:23772"])
    assert "TOOLKIT_PARTIAL=1" in launcher.run(file, "--task=worker:1", "--dry_run", body="pass")[1]
    assert "TOOLKIT_PARTIAL" not in launcher.run(file, "--dry_run", body="pass")[1]


@pytest.mark.slow
def test_threads_are_divided_unless_the_user_has_said(launcher):
    body = "print(os.environ['OMP_NUM_THREADS'], os.environ['TF_NUM_INTRAOP_THREADS'])"
    _, out, _, _ = launcher.run("--workers=1", body=body, OMP_NUM_THREADS="7")
    assert re.search(rf"worker:0 \| 7 {len(os.sched_getaffinity(0))}$", out, re.MULTILINE), out


@pytest.mark.slow
def test_labels_in_the_order_of_a_set_have_one_number_in_all_tasks_and_jobs(launcher, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    body = "print('ORDER', *set('cat dog emu fox gnu hen ibis jay'.split()))"
    both = "".join(launcher.run("--workers=2", body=body)[1] for _ in range(2))
    orders = re.findall("ORDER (.*)", both)
    assert len(orders) == 4
    assert len(set(orders)) == 1, orders
    assert (
        "ORDER random"
        in launcher.run("--env=PYTHONHASHSEED=random", body="print('ORDER', os.environ['PYTHONHASHSEED'])")[1]
    )


@pytest.mark.slow
def test_a_directory_of_logs_that_is_removed_between_two_attempts_is_made_again(launcher):
    body = "import shutil\nif os.environ['TOOLKIT_ATTEMPT'] == '1':\n    shutil.rmtree('runs')\n    sys.exit(3)"
    code, out, err, _ = launcher.run("--workers=1", "--max_restarts=1", body=body)
    assert (code, "restart 1 of 1" in out, "launch: done" in out) == (0, True, True), out + err


@pytest.mark.long
@pytest.mark.slow
def test_fifty_tasks_start_log_and_stop(launcher):
    code, out, err, seconds = launcher.run("--workers=50", body="print('here', me)")
    assert code == 0, err
    assert len([line for line in out.splitlines() if "| here" in line]) == 50
    assert len(list(launcher.logs().glob("worker-*.log"))) == 50
    limits.keep(seconds, 50)  # It takes 3 to 4 on two idle cores; the target is 20.


@pytest.mark.slow
def test_two_launches_at_once_do_not_meet(launcher):
    first = launcher.start("--workers=3", body="print(os.environ['TF_CONFIG']); time.sleep(1)")
    second = launcher.start("--workers=3", body="print(os.environ['TF_CONFIG']); time.sleep(1)")
    outs = [process.communicate(timeout=40)[0].decode() for process in (first, second)]
    assert first.returncode == second.returncode == 0
    ports = [set(re.findall(r"127\.0\.0\.1:(\d+)", out)) for out in outs]
    assert len(ports[0]) == len(ports[1]) == 3
    assert not ports[0] & ports[1]
    assert len(list((launcher.folder / "runs").iterdir())) == 2


@pytest.mark.slow
def test_ports_stay_the_jobs_while_it_runs(launcher):
    body = """
import socket
port = int(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][me].split(":")[1])
try:
    socket.create_server(("127.0.0.1", port)).close()
except OSError as error:
    print("taken for others")
with socket.socket() as mine:
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    mine.bind(("", port))
    mine.listen()
    print("free for the task", os.environ["TF_GRPC_REUSE_PORT"])
"""
    code, out, _, _ = launcher.run("--workers=1", body=body)
    assert code == 0
    assert "taken for others" in out
    assert "free for the task 1" in out


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_a_cluster_file_starts_this_machines_tasks(launcher):
    flag = launcher.cluster_file([f"127.0.0.1:{free_port()}", "192.0.2.7:2222"])
    code, out, err, _ = launcher.run(flag, body="print('task', me)")
    assert code == 0, err
    assert "1 task here, 1 elsewhere" in out
    assert "worker:0 | task 0" in out
    code, out, _, _ = launcher.run(flag, "--task=worker:1", body="print('task', me)")
    assert code == 0
    assert "worker:1 | task 1" in out
