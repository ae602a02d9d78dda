"""A real Grid Engine of two hosts on this machine: a master and two execution daemons, in namespaces of their own."""

import contextlib
import os
import pathlib
import signal
import time

import daemons
import psutil
import two_hosts

PROGRAMS = pathlib.Path("/usr/lib/gridengine")  # Debian's, without its wrappers.
NEEDED = ("sge_qmaster", "sge_execd", "spoolinit", "spooldefaults.bin", "qconf", "qsub", "qrsh", "qstat", "qdel")
SHARED = pathlib.Path("/usr/share/gridengine")
HOSTS = ("sge-a", "sge-b")
NOTIFY = 20  # Seconds between the notice and the signal.


def lacking():
    """Why there can be no Grid Engine here, or ""."""
    missing = [name for name in NEEDED if not (PROGRAMS / name).exists()]
    if missing:
        return (
            f"no {', '.join(missing)} on this machine: "
            "apt-get install gridengine-master gridengine-exec gridengine-client"
        )
    return "" if os.geteuid() == 0 else "Grid Engine's daemons start tasks as their users, and need to be root for it"


BOOTSTRAP = """
admin_user none
default_domain none
ignore_fqdn false
spooling_method classic
spooling_lib libspoolc
spooling_params {folder}/root/default/common;{folder}/master
binary_path {folder}/root/bin
qmaster_spool_dir {folder}/master
security_mode none
listener_threads 1
worker_threads 1
scheduler_threads 1
"""
CONFIGURATION = {
    "execd_spool_dir": "{folder}/hosts",
    "min_uid": "0",
    "min_gid": "0",
    "mailer": "/bin/true",
    "load_report_time": "00:00:02",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:00 joblog=false sharelog=00:00:00",
}
ENVIRONMENT = """
pe_name one_each
slots 100
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule 1
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
QUEUE = {"qname": "all.q", "hostlist": " ".join(HOSTS), "pe_list": "one_each", "slots": "8", "shell": "/bin/sh"}
QUEUE |= {"notify": f"00:00:{NOTIFY}", "load_thresholds": "NONE", "shell_start_mode": "unix_behavior"}


class GridEngine(daemons.Daemons):
    def __init__(self, folder, names):
        self.names = dict(zip(HOSTS, names, strict=True))
        own = {"SGE_ROOT": f"{folder}/root", "SGE_CELL": "default", "SGE_QMASTER_PORT": "6444"}
        own |= {"SGE_EXECD_PORT": "6445", "LD_LIBRARY_PATH": str(PROGRAMS), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        super().__init__(folder, {**kept, **own})

    def on(self, host, *command):
        """A command as it runs on a host: with its own name, network and table of names."""
        ready = f'mount --bind {self.folder}/names /etc/hosts && hostname {host} && exec "$@"'
        own = ["unshare", "--mount", "--uts", "sh", "-c", ready, "sh"]
        return ["ip", "netns", "exec", self.names[host], *own, *command]

    def run(self, *command, limit=30, check=True, **more):
        """A command on the first host."""
        return super().run(*self.on(HOSTS[0], *command), limit=limit, check=check, **more)

    def start(self):
        common = self.folder / "root" / "default" / "common"
        for folder in (common, self.folder / "master", self.folder / "hosts"):
            folder.mkdir(parents=True)
        for name in ("bin", "lib", "utilbin"):
            (self.folder / "root" / name).symlink_to(f"/var/lib/gridengine/{name}")
        (self.folder / "root" / "util").symlink_to(SHARED / "util")
        (self.folder / "names").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{a} {h}\n" for h, a in zip(HOSTS, two_hosts.ADDRESSES, strict=True))
        )
        (common / "bootstrap").write_text(BOOTSTRAP.format(folder=self.folder))
        (common / "act_qmaster").write_text(f"{HOSTS[0]}\n")
        settings = {name: value.format(folder=self.folder) for name, value in CONFIGURATION.items()}
        self.run("spoolinit", "classic", "libspoolc", f"{common};{self.folder / 'master'}", "init")
        configuration = self._changed((SHARED / "default-configuration").read_text(), settings)
        self.run("spooldefaults.bin", "configuration", configuration)
        self.run("spooldefaults.bin", "complexes", str(SHARED / "util/resources/centry"))
        self.run("spooldefaults.bin", "usersets", str(SHARED / "util/resources/usersets"))
        self.run("spooldefaults.bin", "managers", "root")
        self._start(HOSTS[0], "sge_qmaster")
        self.until(lambda: self.run("qconf", "-sh", check=False).returncode == 0, "master")
        for host in HOSTS:
            self.run("qconf", "-ah", host, check=False)  # The master's host is there already.
            self.run("qconf", "-as", host)
        self.run("qconf", "-Ap", self._changed(ENVIRONMENT, {}))
        for host in HOSTS:
            self._start(host, "sge_execd")
        scheduling = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        self.run("qconf", "-Msconf", self._changed(self.run("qconf", "-ssconf").stdout, scheduling))
        self.until(lambda: all(self._loaded(host) for host in HOSTS), "two hosts")
        self.run("qconf", "-Aq", self._changed(self.run("qconf", "-sq").stdout, QUEUE))

    def _loaded(self, host):
        return "lx-" in self.run("qhost", "-h", host, check=False).stdout

    def _changed(self, text, settings):
        """The path of a file with these settings in the place of the text's."""
        lines = [line for line in text.splitlines() if line and line.split()[0] not in settings]
        path = self.folder / f"settings-{time.monotonic_ns()}"
        path.write_text("\n".join([*lines, *(f"{name} {value}" for name, value in settings.items()), ""]))
        return str(path)

    def _start(self, host, program):
        self.start_daemon(f"{program}-{host}", *self.on(host, program), SGE_ND="1")  # In the foreground.

    def empty(self):
        """Ends all jobs, and waits until nothing is left of them."""
        self.run("qdel", "-u", "*", check=False)
        self.until(lambda: not self.run("qstat", "-u", "*").stdout.strip(), "empty queue")
        daemons = [psutil.Process(daemon.pid) for daemon in self.daemons]
        self.until(lambda: not any(daemon.children() for daemon in daemons), "end of the jobs' processes")

    def stop(self):
        super().stop()
        for process in psutil.process_iter():  # What a test that failed has left in its jobs.
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SGE_ROOT") == self.environ["SGE_ROOT"]:
                    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def grid_engine(folder):
    """Starts one in an empty folder; ends all of it. Skips where there can be no namespaces."""
    with two_hosts.made() as names:
        made = GridEngine(pathlib.Path(folder), names)
        try:
            made.start()
            yield made
        finally:
            made.stop()
