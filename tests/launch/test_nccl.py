"""NCCL is a second witness of a job that hangs: asked where tasks use it, shown beside our cause, and it may be mute.

The server here speaks the text that NCCL documents; a machine with several GPUs isn't needed.
"""

import socket
import threading
import time

import limits
import pytest
import simulation

from toolkit.launch import nccl
from toolkit.launch.agent.program import Agent

SUMMARY = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         2         4         4   RUNNING  {}

"""
WELL = SUMMARY.format("OK") + "Errors\n======\n\nWarnings\n========\n\n"
DEAD = f"""{SUMMARY.format("INCOMPLETE")}Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 1003 on node 172.16.64.213 managing GPU 1

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 1 managed by process 1003 on node 172.16.64.213

Warnings
========

"""
UNEQUAL = f"""{SUMMARY.format("MISMATCH")}Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 6650
  Rank 2 has launched up to operation 6649 -- GPU 0 managed by process 1002 on node 172.16.64.213

"""
TASKS = {f"worker:{number}": 1000 + number for number in range(4)}


class Server:
    """NCCL's RAS socket: answers each connection with the next of these texts, None for silence."""

    def __init__(self, *texts):
        self.asked, self._texts, self._silent = [], texts, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        for text in self._texts:
            connection, _ = self._listener.accept()
            self._silent.append(connection)
            if text is None:
                continue
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    self.asked.append(line.decode().strip())
                    if line.upper().endswith(b"STATUS\n"):
                        lines.write(text.encode())
                        break
                    lines.write(b"SERVER PROTOCOL 2\n" if line.startswith(b"CLIENT") else b"OK\n")
                    lines.flush()

    def close(self):
        for each in (self._listener, *self._silent):
            each.close()


def heard(address):
    """Returns what an agent hears of the NCCL at this address."""
    agent = Agent()
    agent._environment = {"NCCL_RAS_ADDR": address}
    try:
        agent.send("nccl")
        deadline = time.monotonic() + limits.patient(20)
        while time.monotonic() < deadline:
            for event in agent.read():
                if event["event"] == "nccl":
                    return event["text"]
            time.sleep(0.01)
    finally:
        agent.close()
    raise AssertionError("the agent didn't answer")


@pytest.fixture
def serve():
    servers = []

    def start(*texts):
        servers.append(Server(*texts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_where_all_is_well_one_line_says_so(serve):
    server = serve(WELL)
    found = nccl.findings(heard(server.address), TASKS)
    assert found == "NCCL reports that all ranks answer, and have launched the same operations."
    assert server.asked == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "VERBOSE STATUS"]


def test_a_dead_rank_is_shown_with_its_task(serve):
    found = nccl.findings(heard(serve(DEAD).address), TASKS).splitlines()
    assert found[0] == "NCCL reports:"
    assert "    Process 1003 (worker:3) on node 172.16.64.213 managing GPU 1" in found
    assert found[-1] == "    Rank 3 -- GPU 1 managed by process 1003 (worker:3) on node 172.16.64.213"


def test_unequal_counts_are_shown_and_said_to_be_usual_where_training_goes_on(serve):
    found = nccl.findings(heard(serve(UNEQUAL).address), TASKS)
    assert found.startswith("NCCL reports (where training goes on, such counts differ for moments):\n")
    assert "3 ranks have launched up to operation 6650" in found
    assert "Rank 2 has launched up to operation 6649 -- GPU 0 managed by process 1002 (worker:2)" in found


def test_a_process_that_is_stopped_is_passed_over(serve, monkeypatch):
    monkeypatch.setattr(nccl, "_FIRST", 0.2)
    assert "DEAD" in heard(serve(None, DEAD).address)


def test_where_nobody_answers_nothing_is_said(serve, monkeypatch):
    monkeypatch.setattr(nccl, "_FIRST", 0.2)
    gone = serve()
    gone.close()
    assert [heard(each) for each in (gone.address, serve(None, None, None).address, "no address")] == ["", "", ""]
    assert nccl.findings("", TASKS) == ""


def test_what_answers_but_is_another_jobs_or_no_nccl_says_nothing():
    assert nccl.findings(DEAD, dict(list(TASKS.items())[:2])) == ""
    assert nccl.findings("HTTP/1.1 400 Bad Request\r\n\r\n", TASKS) == ""
    assert nccl.findings(WELL.partition("Communicators")[0], TASKS) == ""


def test_a_pid_that_two_hosts_have_names_no_task():
    assert "Process 1003 on node" in nccl.findings(DEAD, dict.fromkeys(TASKS, 1003))


def stalled(folder, monkeypatch, *, communication, answer=None):
    world = simulation.World(0, hosts=2, tasks=2, faults=0, communication=communication, nccl=answer)
    world.later(20.0, lambda: world.inject("hang"))
    _, error = simulation.run(monkeypatch, folder, world, max_restarts=0)
    return world, str(error)


def test_a_stalls_report_has_it_after_the_cause(tmp_path, monkeypatch):
    world, said = stalled(tmp_path, monkeypatch, communication="nccl", answer=UNEQUAL)
    hung = world.faults[0].target
    assert f"{hung}, which is at train.py, line 31, in step.\nNCCL reports" in said
    assert "\n    3 ranks have launched up to operation 6650\n" in said
    assert 1 <= world.asked_nccl <= 4  # On two hosts, for a hint and at the end.


def test_a_job_without_nccl_is_not_asked_and_a_mute_one_changes_nothing(tmp_path, monkeypatch):
    world, said = stalled(tmp_path / "ring", monkeypatch, communication="ring", answer=UNEQUAL)
    assert world.asked_nccl == 0
    assert "which is at train.py, line 31" in said
    assert "NCCL" not in said
    _, mute = stalled(tmp_path / "mute", monkeypatch, communication="nccl")
    assert mute.splitlines()[0] == said.splitlines()[0]
    assert "NCCL" not in mute
