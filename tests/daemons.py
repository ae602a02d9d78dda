"""Daemons that belong to one test: started in a folder that keeps their output, asked by commands, ended together."""

import contextlib
import subprocess
import time

import limits


class Daemons:
    """Attributes: folder; environ, of the daemons and of the commands."""

    def __init__(self, folder, environ):
        self.folder, self.environ = folder, environ
        self.daemons = []

    def run(self, *command, limit=30, check=True, **more):
        """A command, to its end."""
        done = subprocess.run(
            command, env={**self.environ, **more}, cwd=self.folder, capture_output=True, text=True, timeout=limit
        )
        assert not check or done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def start_daemon(self, name, *command, **more):
        """Its output is in NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env={**self.environ, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def until(self, holds, what, limit=40):
        """Waits until something holds; what the daemons have said is in the error."""
        deadline = time.monotonic() + limits.patient(limit)
        while not holds():
            logs = [path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.out")]
            assert time.monotonic() < deadline, f"no {what} in {limit} s: {logs}"
            time.sleep(0.1)

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
