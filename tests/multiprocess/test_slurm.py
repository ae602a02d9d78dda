"""Tasks that Slurm starts find their cluster in its environment, and train."""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time

import limits
import processes
import psutil
import pytest
from slurm_cluster import lacking, slurm

REASON = lacking()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
FLAGS = ("--data=shapes", "--epochs=1", "--steps_per_epoch=8")
ENVIRONMENT = {
    "PYTHONPATH": str(processes.ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "no_grpc_proxy": f"localhost,{os.uname().nodename}",
}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(folder) as made:
        yield made


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.long
def test_workers_by_srun(cluster, tmp_path):
    command = (sys.executable, "-m", "recipes.cifar_multi_worker", *FLAGS, f"--run_dir={tmp_path / 'it is'}")
    done = cluster.run("srun", "--nodes=2", "--ntasks=2", "--label", *command, limit=150, **ENVIRONMENT)
    found = re.findall(r"^(\d): Done: .* weights (\w+)", done.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout[-2000:] + done.stderr[-2000:]
    assert len({weights for _, weights in found}) == 1
    hosts = [address.rpartition(":")[0] for address in summary(tmp_path / "it is")["cluster"]["worker"]]
    assert sorted(hosts) == sorted(cluster.nodes)


@pytest.mark.long
def test_chief_workers_and_ps_by_srun(cluster, tmp_path):
    command = (sys.executable, "-m", "recipes.cifar_parameter_server", *FLAGS, f"--run_dir={tmp_path / 'run'}")
    tasks = {"TOOLKIT_TASKS": "chief:1,worker:2,ps:1"}
    done = cluster.run("srun", "--nodes=2", "--ntasks=4", "--label", *command, limit=150, **ENVIRONMENT, **tasks)
    assert summary(tmp_path / "run")["steps"] == 8, done.stdout[-2000:] + done.stderr[-2000:]
    assert set(summary(tmp_path / "run")["cluster"]) == {"chief", "worker", "ps"}


STEPS = ("--data=shapes", "--epochs=2", "--steps_per_epoch=30", "--checkpoint_steps=5")


class Launched(processes.Job):
    """`toolkit launch --on=slurm`, with what it has printed so far."""

    LIMIT = 150

    def __init__(self, cluster, folder, *flags):
        super().__init__(folder, ["--on=slurm", "--nodes=2"], flags, environ={**cluster.environ, **ENVIRONMENT})

    @property
    def job(self):
        return re.search(r"launch: Slurm job (\d+),", self.text)[1]

    def end(self, limit=200):
        try:
            return self.process.wait(limit)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    launched = Launched(cluster, folder, "-m", "recipes.cifar_multi_worker", *STEPS, f"--run_dir={folder / 'run'}")
    assert launched.end() == 0, launched.text[-3000:]
    return folder, launched.text


def test_a_job_is_submitted_followed_and_completed(undisturbed):
    folder, text = undisturbed
    assert re.search(r"^(worker:1|all) +\| Done: ", text, re.MULTILINE)
    assert re.search(r"^launch: done in ", text, re.MULTILINE)
    assert summary(folder / "run")["steps"] == 60
    assert "#SBATCH --signal=B:USR1@120" in next((folder / "logs").glob("*/job.sh")).read_text()


@pytest.mark.long
def test_arguments_variables_and_paths_arrive_as_they_are(cluster, tmp_path):
    folder = tmp_path / "it's a $(touch ran) directory"
    folder.mkdir()
    (folder / "tell it's.py").write_text(processes.TELL)
    launched = Launched(cluster, folder, processes.ODD_ENV, "tell it's.py", *processes.ODD)
    assert launched.end(60) == 0, launched.text
    assert processes.told(folder)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.long
def test_a_detached_job_is_listed_watched_and_stopped(cluster, tmp_path):
    (tmp_path / "it.py").write_text("import os, time; print('up', os.environ['RANK'], flush=True); time.sleep(300)")
    environ = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}

    def toolkit(*arguments, check=True):
        done = cluster.run(sys.executable, "-m", "toolkit", *arguments, limit=90, check=check, **environ)
        return done.stdout + done.stderr

    what = ("--on=slurm", "--nodes=2", "--detach", f"--log_dir={tmp_path / 'logs'}", str(tmp_path / "it.py"))
    said = toolkit("launch", "--show=all", *what)
    number = re.search(r"launch: Slurm job (\d+), 2 tasks on 2 nodes", said)[1]
    deadline = time.monotonic() + limits.patient(60)
    while "worker:1 | up 1" not in toolkit("logs", number, check=False):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert re.search(rf"running, Slurm {number} .*it.py", toolkit("jobs").replace("\n", " "))
    assert re.search(r": (stopped|dead \(cancelled\))", toolkit("stop", number))
    assert not cluster.run("squeue", "-h", "-t", "R,PD", "-j", number, check=False).stdout.strip()


def test_a_function_runs_on_its_nodes(cluster, tmp_path):
    (tmp_path / "call.py").write_text(
        "import os, toolkit.launch\n"
        "def where(factor):\n"
        "    numbers = [os.environ[f'SLURM_{name}'] for name in ('PROCID', 'LOCALID', 'NODEID', 'NTASKS')]\n"
        "    return factor * int(os.environ['RANK']), os.environ['SLURMD_NODENAME'], ' '.join(numbers)\n"
        "print('GOT', toolkit.launch.run(where, 3, on='slurm', nodes=2))\n"
    )
    environ = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = cluster.run(sys.executable, str(tmp_path / "call.py"), limit=90, **environ)
    found = re.search(r"^GOT \[\(0, '(.*)', '0 0 0 2'\), \(3, '(.*)', '1 0 1 2'\)\]$", done.stdout, re.MULTILINE)
    assert sorted(found.groups()) == sorted(cluster.nodes)


@pytest.mark.long
def test_a_job_whose_interpreter_is_missing_says_so(cluster, tmp_path):
    (tmp_path / "it.py").touch()
    code = (
        "import sys, toolkit.launch\n"
        "real, sys.executable = sys.executable, '/no/such/python'\n"
        f"toolkit.launch.start(toolkit.launch.JobSpec(command=({str(tmp_path / 'it.py')!r},), on='slurm', nodes=2))\n"
    )
    environ = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = cluster.run(sys.executable, "-c", code, limit=90, check=False, **environ)
    assert "exit code 127" in done.stderr, done.stderr
    assert re.search("Its batch script wrote last:\n.*no/such/python: (not found|No such file)", done.stderr)
    assert "no/such/python" in cluster.run(sys.executable, "-m", "toolkit", "logs", limit=60, **environ).stdout


RAISES = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"started-{os.environ['RANK']}-{time.time()}").touch()
if os.environ["RANK"] == "1":
    time.sleep(1)
    if sys.argv[2] == "2":
        raise SystemExit(2)
    raise ValueError("no such column")
time.sleep(100)
"""


def starts(folder):
    return len(list(folder.glob("started-1-*")))


@pytest.mark.parametrize(("restarts", "times"), [(0, 1), pytest.param(2, 3, marks=pytest.mark.long)])
def test_a_script_that_raises_runs_as_often_as_it_may(cluster, tmp_path, restarts, times):
    (tmp_path / "it.py").write_text(RAISES)
    launched = Launched(cluster, tmp_path, f"--max_restarts={restarts}", "it.py", str(tmp_path), "1")
    assert launched.end(60 * times) == 1, launched.text
    assert starts(tmp_path) == times
    assert "worker:1 failed first: it ended with exit code 1" in launched.text
    assert "ValueError: no such column" in launched.text


@pytest.mark.long
def test_an_agent_that_dies_while_its_node_answers_is_a_failure_like_any_other(cluster, tmp_path):
    """Queued again it would die as often as Slurm lets it."""
    (tmp_path / "it.py").write_text(RAISES.replace("raise SystemExit(2)", "os.kill(os.getppid(), 9), time.sleep(60)"))
    job = Launched(cluster, tmp_path, "--max_restarts=0", "it.py", str(tmp_path), "2")
    assert job.end() == 1, job.text
    assert starts(tmp_path) == 1
    assert "is gone" in job.text
    assert "queueing the job again" not in job.text


@pytest.mark.long
def test_what_can_not_be_done_ends_with_2_and_is_not_tried_again(cluster, tmp_path):
    (tmp_path / "it.py").write_text(RAISES)
    launched = Launched(cluster, tmp_path, "--max_restarts=2", "it.py", str(tmp_path), "2")
    assert launched.end(60) == 2, launched.text
    assert starts(tmp_path) == 1


@pytest.mark.long
def test_a_lost_terminal_costs_nothing(cluster, tmp_path):
    (tmp_path / "it.py").write_text("import pathlib, time\nwhile not pathlib.Path('finish').exists(): time.sleep(0.1)")
    launched = Launched(cluster, tmp_path, "it.py")
    launched.until(r"is RUNNING")
    launched.process.send_signal(signal.SIGHUP)
    assert launched.end(30) == 129, launched.text
    assert f"Slurm job {launched.job} runs on" in launched.text
    (tmp_path / "finish").touch()
    deadline = time.monotonic() + limits.patient(60)
    while "JobState=COMPLETED" not in (said := cluster.run("scontrol", "show", "job", launched.job).stdout):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


@pytest.mark.long
@pytest.mark.parametrize("by", ["Ctrl-C", "scancel", "scancel, an agent told first"])
def test_a_cancelled_job_writes_a_checkpoint(cluster, tmp_path, by):
    launched = Launched(cluster, tmp_path, "-m", "recipes.cifar_multi_worker", *STEPS, f"--run_dir={tmp_path / 'run'}")
    launched.until(lambda: list(tmp_path.glob("run/checkpoints/step-*")))
    if by == "Ctrl-C":
        launched.process.send_signal(signal.SIGINT)
    else:
        if by != "scancel":  # Slurm tells all processes in no order.
            agents = [p for p in psutil.process_iter() if belongs(p, launched.job, cluster.nodes[0])]
            next(p for p in agents if p.cmdline()[-1].endswith("agent.program")).terminate()
            time.sleep(0.1)
        cluster.run("scancel", launched.job)
    assert launched.end(60) == (130 if by == "Ctrl-C" else 143), launched.text[-2000:]
    assert ("cancelling Slurm job" in launched.text) == (by == "Ctrl-C")
    assert "checkpoint written" in launched.text, launched.text[-3000:]
    deadline = time.monotonic() + limits.patient(30)  # It is "completing" for a while.
    while "JobState=CANCELLED" not in cluster.run("scontrol", "show", "job", launched.job).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.fault
def test_a_node_that_fails_has_the_job_queued_again_and_resumed_to_the_same_weights(cluster, tmp_path, undisturbed):
    launched = Launched(cluster, tmp_path, "-m", "recipes.cifar_multi_worker", *STEPS, f"--run_dir={tmp_path / 'run'}")
    launched.until(lambda: list(tmp_path.glob("run/checkpoints/step-*")))
    node = sorted(cluster.nodes)[1]  # The batch script runs on the first.
    victims = [p for p in psutil.process_iter() if belongs(p, launched.job, node)]
    cluster.end_node(node, signal.SIGKILL)
    for victim in victims:  # A node that fails takes its tasks along.
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    launched.until(lambda: "queueing the job again: a node doesn't answer" in launched.text)
    cluster.start_node(node)
    assert launched.end() == 0, launched.text[-3000:]
    assert "Resumed after step" in launched.text
    assert summary(tmp_path / "run")["weights_sha256"] == summary(undisturbed[0] / "run")["weights_sha256"]


def belongs(process, job, node):
    with contextlib.suppress(psutil.Error):
        environ = process.environ()
        return environ.get("SLURM_JOB_ID") == job and environ.get("SLURMD_NODENAME") == node
    return False


@pytest.mark.fault
def test_a_job_whose_time_is_nearly_up_goes_on_in_the_next(cluster, tmp_path, undisturbed):
    flags = (
        "--time=2",
        "--notice=45",
        "-m",
        "recipes.cifar_multi_worker",
        *STEPS[:2],
        "--steps_per_epoch=600",
        STEPS[3],
    )
    launched = Launched(cluster, tmp_path, *flags, f"--run_dir={tmp_path / 'run'}")
    launched.until(lambda: "queueing the job again: its time was nearly up" in launched.text)
    launched.until(lambda: "Resumed after step" in launched.text)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end(60) == 143, launched.text[-2000:]
