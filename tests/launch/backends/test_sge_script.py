"""What `toolkit launch --on=sge --dry_run` prints, and what is read of Grid Engine's answers, without a Grid Engine."""

import subprocess

import pytest

from toolkit.cli.main import main
from toolkit.launch import JobSpec, queues


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--on=sge", "--dry_run", *arguments, "-m", "x"])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_script_asks_for_a_slot_for_each_core(capsys):
    flags = ("--nodes=2", "--tasks_per_node=2", "--cpus_per_task=4", "--pe=mpi", "--time=1:00:00", "--qsub=l=h_vmem=4G")
    code, out, _ = printed(capsys, *flags, "--partition=all.q", "--gpus_per_node=2")
    assert code == 0
    lines = out.splitlines()
    for line in ("-N toolkit", "-q all.q", "-l h_rt=3600,gpu=0.25", "-pe mpi 16", "-l h_vmem=4G", "-r y", "-notify"):
        assert f"#$ {line}" in lines


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes=2"], "no parallel environment says how the job's slots fall on hosts"),
        (["--qsub=t=1-3"], "every task of an array would be this job once more"),
        (["--qsub=o=/x"], "the launcher sets that one itself"),
    ],
)
def test_what_can_not_be_is_refused(capsys, flags, said):
    code, _, err = printed(capsys, *flags)
    assert (code, said in err) == (2, True), err


LISTED = """<job_info><queue_info>
<job_list state="running"><JB_job_number>9</JB_job_number><JB_name>mine</JB_name><state>dr</state></job_list>
</queue_info><job_info>
<job_list state="pending"><JB_job_number>10</JB_job_number><JB_name>mine</JB_name><state>{}</state></job_list>
</job_info></job_info>"""
ACCOUNT = "====\njobname      mine\nfailed       {}\nexit_status  {}\npe_taskid    NONE\n"
ACCOUNT += "====\njobname      mine\nfailed       0\nexit_status  7\npe_taskid    1.b\n"


@pytest.mark.parametrize(
    ("listed", "account", "state"),
    [
        (LISTED.format("qw"), "", ("PENDING", 0)),
        (LISTED.format("hqw"), "", ("HELD", 0)),
        (LISTED.format("Eqw"), "", ("ERROR", 0)),
        (LISTED.format("Rr"), "", ("RUNNING", 0)),
        (LISTED.format("S"), "", ("SUSPENDED", 0)),
        (LISTED.format("?"), "", ("UNKNOWN", 0)),
        ("", ACCOUNT.format(0, 0), ("COMPLETED", 0)),
        ("", ACCOUNT.format(0, 137), ("FAILED", 137)),
        ("", ACCOUNT.format("26  : opening input/output file", 0), ("FAILED", 0)),
        ("", "", ("FORGOTTEN", 0)),
    ],
)
def test_a_state_is_the_newest_jobs_of_that_name(monkeypatch, listed, account, state):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, {"qstat": listed, "qacct": account}[command[0]], "")

    monkeypatch.setattr(subprocess, "run", run)
    assert queues.find("sge").state("mine") == state


def test_hosts_are_those_of_the_parallel_environment(tmp_path):
    (tmp_path / "hosts").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\na 1 more.q@a UNDEFINED\n")
    assert queues.find("sge").nodes({"PE_HOSTFILE": str(tmp_path / "hosts")}) == ["a", "b"]


def test_its_time_is_nearly_up_before_it_is():
    clock = queues.find("sge").clock
    assert clock(JobSpec(command=("x",), on="sge", time="1:00:00", notice=100)) == 3500
    assert clock(JobSpec(command=("x",), on="sge")) is None
