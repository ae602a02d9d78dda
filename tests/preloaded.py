"""Python programs started as children of this process by a fork of one that has imported TensorFlow and Keras.

The import takes four seconds of a core, and most of what a short test of several processes costs. A server imports both
once, runs nothing, and forks when it is asked: what it forks is a child of whoever asked, has the arguments, the
environment, the directory and the files that it would have had otherwise, and ends as any Python program does. What
differs: modules that the server has imported are there from the start, and the seed of Python's hashes is the server's.
Tests that look at how a process starts, or at what it imports, use `subprocess`.
"""

import atexit
import builtins
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

__all__ = ["Popen", "run", "servers"]

_Plain = subprocess.Popen  # A forked program finds `Popen` in its place.
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_NAMESPACES = ("user", "net")
_ROOM = 1 << 16  # Bytes that a child's environment may have in /proc.
# What is read once, when Python starts or TensorFlow is imported.
_READ_AT_START = ("PYTHON", "LC_", "LANG", "KERAS_", "TF_CPP_", "TF_ENABLE", "LD_", "MPL")
_READ_HERE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_LONGEST = 1 << 20

forks = True  # False: programs start as a user starts them.
_server: "_Server | None" = None


class Popen(subprocess.Popen):
    """As `subprocess.Popen`; what can't be forked is started as ever."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rights, new_session = rest[:15]
        plain = forks and close_fds and not (executable or preexec_fn or pass_fds or shell)
        plain = plain and rights[1:] == [None, None, None, -1] and rest[15:] in {(), (-1,)}  # No user, umask or group.
        given = dict(os.environ if env is None else env)
        server = _serving(given) if plain and _is_program(args) else None
        if server is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        files = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "arguments": [os.fspath(part) for part in args],
            "directory": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "environment": given,
            "umask": _umask(),
            "new_session": new_session,
        }
        self.pid = server.start(request, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(arguments, *, timeout, **how):
    """As `subprocess.run` with output captured as text."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    with Popen(arguments, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def servers():
    """The ids of processes that live on between tests."""
    return {_server.pid} if _server else set()


def _is_program(arguments):
    if isinstance(arguments, (str, bytes)) or len(arguments) < 2 or arguments[0] != sys.executable:
        return False
    first = str(arguments[1])
    return first in {"-m", "-c"} or not first.startswith("-")


def _at_start(environment):
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name not in _READ_HERE
    }


def _serving(environment):
    """A server for programs with this environment, None where there is none."""
    global _server
    if _server is None and sys.platform.startswith("linux"):
        if _at_start(environment) != {**_at_start(os.environ), **_QUIET}:
            return None
        _server = _Server.new()
    return _server if _server is not None and _at_start(environment) == _server.at_start else None


class _Server:
    """The side of the process that asks."""

    def __init__(self, ours, pid, at_start):
        self.pid = pid
        self.at_start = at_start
        self._socket = ours
        self._lock = threading.Lock()
        self._namespaces = _namespaces()

    @classmethod
    def new(cls):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, **_QUIET}
        process = _Plain(
            [sys.executable, "-u", "-c", f"import preloaded; preloaded._main({theirs.fileno()})"],
            env={**environ, "PYTHONPATH": os.path.dirname(__file__), "_ROOM": "-" * _ROOM},
            stdin=subprocess.PIPE,  # Python's files keep what they find at first: whether one can seek in them.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        made = cls(ours, process.pid, _at_start(environ))
        atexit.register(made._close, process)
        return made

    def _close(self, process):
        self._socket.close()
        process.communicate()

    def start(self, request, files):
        now = _namespaces()
        entered = [name for name in _NAMESPACES if now[name] != self._namespaces[name]]
        opened = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in entered]
        try:
            with self._lock:
                _adopt_orphans(True)
                try:
                    socket.send_fds(self._socket, [pickle.dumps(request)], [*files, *opened])
                    answer = self._socket.recv(100)
                finally:
                    _adopt_orphans(False)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if not answer:
            raise RuntimeError("the process that has TensorFlow imported has ended")
        return int(answer)


def _namespaces():
    return {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES}


def _adopt_orphans(wanted):
    """What the server forks is left by its parent at once, and becomes a child of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(wanted), 0, 0, 0)


def _umask():
    now = os.umask(0)
    os.umask(now)
    return now


def _main(descriptor):
    """The server; in the children that it forks, the program."""
    import keras  # noqa: F401 - Imported, and nothing computed: a device that is in use doesn't outlive a fork.
    import psutil  # noqa: F401
    import wrapt  # noqa: F401

    sys.path.remove(os.path.dirname(__file__))
    path = sys.path[1:]
    request = _serve(socket.socket(fileno=descriptor))
    _become(request)
    while request["arguments"][1:3] == ["-m", "toolkit"] and (others := _fork_server()):
        request = others
        _become(request)
    _run(request["arguments"][1:], path)


def _serve(asked):
    """Forks for each request; returns it in the child."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # Or the collector writes to every page that is shared.
    while True:
        message, files, _, _ = socket.recv_fds(asked, _LONGEST, 3 + len(_NAMESPACES))
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        between = _fork()
        if between == 0:
            middle = os.getpid()
            for descriptor in files[3:]:
                if ctypes.CDLL(None).setns(descriptor, 0):
                    os._exit(1)
            if _fork():
                os._exit(0)
            asked.close()
            os.close(reading)
            while os.getppid() == middle:
                time.sleep(0.0005)
            request = pickle.loads(message)
            _take_signals()
            if request["new_session"]:
                os.setsid()
            os.write(writing, b"%d" % os.getpid())  # Whoever reads it may signal it at once.
            os.close(writing)
            for target, descriptor in enumerate(files[:3]):
                os.dup2(descriptor, target)
            for descriptor in files:
                os.close(descriptor)
            return request
        os.close(writing)
        os.waitpid(between, 0)
        asked.send(os.read(reading, 100))
        os.close(reading)
        for descriptor in files:
            os.close(descriptor)


def _take_signals():
    """As Python does; until then they are ignored, as by the server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads start again by themselves.
        return os.fork()


def _become(request):
    """Takes over what a program gets from whoever starts it."""
    os.umask(request["umask"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment(request["environment"])
    if not os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = open(  # noqa: SIM115
            1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False
        )
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _show_environment(environment):
    """Writes it to where /proc looks for it; the C library has copies of its own by now."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    block = block[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block, len(block))


def _fork_server():
    """Gives this process, which is to start others, a server of its own; returns a request in what that forks."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork()
    if pid == 0:
        ours.close()
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        return _serve(theirs)
    theirs.close()
    _server = _Server(ours, pid, _at_start(os.environ))
    subprocess.Popen = Popen
    return None


def _run(arguments, path):
    """Runs it as `python ARGUMENTS` does."""
    sys.orig_argv = [sys.executable, *arguments]
    added = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    first, rest = arguments[0], arguments[1:]
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __builtins__=builtins, __doc__=None, __package__=None, __spec__=None)
    if first == "-m":
        sys.argv, sys.path = ["-m", *rest[1:]], [os.getcwd(), *added, *path]
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv, sys.path = ["-c", *rest[1:]], ["", *added, *path]
        exec(compile(rest[0], "<string>", "exec"), namespace)
    else:
        sys.argv, sys.path = [first, *rest], [os.path.dirname(os.path.realpath(first)), *added, *path]
        namespace["__file__"] = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
        exec(code, namespace)
