"""A real Slurm of two nodes on this machine: munge, a controller and two node daemons, all of this test's own."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket

import daemons
import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")


def lacking():
    """Why there can be no Slurm here, or ""."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None and not pathlib.Path("/usr/sbin", name).exists()]
    if missing:
        return f"no {', '.join(missing)} on this machine: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "Slurm's daemons start tasks as their users, and need to be root for it"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"this machine's name, {socket.gethostname()}, can't be resolved"
    if socket.gethostname() == "localhost":
        return "both nodes need a name that can be resolved, and this machine has one only"
    return ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=10
MinJobAge=300
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host},localhost Default=YES MaxTime=INFINITE State=UP
"""


class Slurm(daemons.Daemons):
    """Attributes: nodes, their names."""

    def __init__(self, folder):
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/sbin"}
        super().__init__(folder, {**os.environ, **own})
        self.nodes = (socket.gethostname(), "localhost")

    def start(self):
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        ports = dict(zip(("controller", "first", "second"), (free_port() for _ in range(3)), strict=True))
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, host=self.nodes[0], **ports))
        munge = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        names = ("munge.socket", "munge.key", "munge.pid", "munge.log", "munge.seed")
        files = [f"--{flag}={self.folder / name}" for flag, name in zip(munge, names, strict=True)]
        self.start_daemon("munge", "munged", "-F", "--force", *files)
        self.until((self.folder / "munge.socket").exists, "munge's socket")
        self.start_daemon("controller", "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.states() == {"idle"}, "idle nodes")

    def start_node(self, node):
        """As a daemon, so that it is nobody's child: a test that starts it may end before."""
        self.run("slurmd", "-N", node)

    def end_node(self, node, number=signal.SIGTERM):
        """Ends a node's daemon; what it has started goes on."""
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            daemon = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
            daemon.send_signal(number)
            daemon.wait(10)

    def states(self):
        done = self.run("sinfo", "-h", "-N", "-o", "%T", check=False)
        return set(done.stdout.split())

    def stop(self):
        self.run("scancel", "--user=root", "--full", check=False)
        self.until(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), "empty queue", limit=30)
        for node in self.nodes:
            self.end_node(node)
        super().stop()


@contextlib.contextmanager
def slurm(folder):
    """Starts one in an empty folder, with a path of at most 60 characters for munge's socket; ends all of it."""
    made = Slurm(pathlib.Path(folder))
    try:
        made.start()
        yield made
    finally:
        made.stop()
