"""Daemons that begin with their imports done: forked from a server that has imported what they do, and does nothing else.

Importing torch and the rest costs a daemon 2 to 3 seconds of CPU, and the tests start about a hundred. What is forked is a
process like any other: it has its own pid, is killed alone, and ends as the interpreter ends. The ranks of a torchrun are
forked from it likewise, and a member's host from a process beside the member. That `python -m` starts all of them, too, is
seen where edit-lab and the examples do so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, TextIO

REPOSITORY = Path(__file__).parents[2]
IMPORTED = (
    "aggregator.cli",
    "aggregator.server",
    "aggregator.swarm.commands",
    "aggregator.swarm.process",
    "numba",
    "peers.cli",
    "peers.daemon",
    "peers.regions.daemon",
    "peers.swarm.daemon",
    "torch._dynamo",  # the first call of an optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "typer._adapters",  # what reading a command line imports
)


class Forked:
    """`python -m ARGUMENTS` as a process of its own, as `subprocess.Popen` has it. stderr: a pipe.

    output: a file that stdout and stderr are written to instead, in a session of its own.
    """

    def __init__(self, arguments: Sequence[str], output: IO[bytes] | None = None) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self._ended, ends = os.pipe()
        self.stderr: TextIO = os.fdopen(reading)
        if output is not None:
            self.stderr.close()
        request = json.dumps([self.args, _environment(), os.fspath(REPOSITORY), output is not None]).encode()
        server = _server()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [writing if output is None else output.fileno(), ends])
        server.sendall(request)
        os.close(writing)
        os.close(ends)
        self.pid = int.from_bytes(_exactly(server, 4), "big")

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """`poll`, after waiting so long; None: for as long as it runs."""
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = int.from_bytes(os.read(self._ended, 4), "big", signed=True)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def read_to_end(self) -> str:
        """What it still says, until it has ended."""
        rest = self.stderr.read()
        self.stderr.close()
        self.wait()
        return rest


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start() -> None:
    """Start this process's server now, with the environment of now, rather than with the first that is forked."""
    _server()


@cache
def _server() -> socket.socket:
    """The connection to this process's server, which ends with it."""
    return _given.pop() if _given else servers(1)[0]


_given: list[socket.socket] = []


def use(connection: socket.socket) -> None:
    """This process's server is this one, from `servers`."""
    _given.append(connection)


def compile_kernels() -> None:
    """Have the user's cache folder hold the kernels, which every process reads that loads them. Here they are not loaded."""
    kernels = importlib.import_module("edit.kernels")
    kernels._compile(importlib.import_module("numba"), kernels._cache_folder()[0])


def servers(count: int) -> list[socket.socket]:
    """Start so many servers, which import once; the connections to them. Each ends with its connection."""
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [server.fileno() for _, server in pairs]
    command = [sys.executable, "-m", __name__, *map(str, theirs)]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=_environment(), pass_fds=theirs, stdin=subprocess.DEVNULL)
    atexit.register(process.wait)
    for ours, server in pairs:
        server.close()
        atexit.register(ours.close)
    return [ours for ours, _ in pairs]


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _own(connections: Sequence[socket.socket]) -> socket.socket:
    """Fork a server for each further connection; return the one of this process."""
    own = connections[0]
    for further in connections[1:]:
        if os.fork() == 0:
            own = further
            break
    for connection in connections:
        if connection is not own:
            connection.close()
    return own


def _serve(connection: socket.socket) -> list[str]:
    """Fork until the connection ends; return in each child, with its arguments."""
    children: dict[int, int] = {}  # what its exit code is written to, by pid
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(children):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    os.write(children[pid], os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "big", signed=True))
                    os.close(children.pop(pid))
        if connection in ready:
            length, pipes, _, _ = socket.recv_fds(connection, 4, 2)
            if not length:
                raise SystemExit
            arguments, environment, folder, apart = json.loads(_exactly(connection, int.from_bytes(length, "big")))
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(pipes[0], 2)
                if apart:
                    os.dup2(pipes[0], 1)
                    os.setsid()
                for descriptor in (woken, wakes, *pipes, *children.values()):
                    os.close(descriptor)
                connection.close()
                os.environ.update(environment)
                path = environment.get("PYTHONPATH", "").split(os.pathsep)
                sys.path[1:1] = [each for each in path if each and each not in sys.path]  # as an interpreter does that starts
                os.chdir(folder)
                return _with_hosts(arguments)
            os.close(pipes[0])
            children[pid] = pipes[1]
            connection.sendall(pid.to_bytes(4, "big"))


class Rank:
    """What torchrun holds of a rank, as `subprocess.Popen` has it: `python -u -m ARGUMENTS`, forked from torchrun.

    torchrun has started no thread in Python and computes nothing, so there is no lock that the fork could leave taken.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], start_new_session: bool, **_: object) -> None:
        self.args = list(args)
        if self.args[:3] != [sys.executable, "-u", "-m"]:
            raise NotImplementedError(f"only {sys.executable} -u -m MODULE is forked, and not {self.args}")
        self.returncode: int | None = None
        gc.collect()  # what is left of sockets must not close a descriptor of the rank
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            _become(self.args[3:], env)
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def _name_of_caller(depth: int = 2) -> str:
    """Return what torchrun's `get_method_name` does, for its log: without reading the sources of all frames, for which all
    modules are searched, and here there are thousands."""
    return sys._getframe(depth).f_code.co_name


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """What is within is all that this process does from now on; it ends with it as the interpreter ends."""
    code: Any = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does that ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run this as a new interpreter would, with nothing of torchrun's open, and end. Never returns."""
    with interpreter():
        gc.freeze()  # torchrun's objects are never freed: their descriptors are closed here
        os.closerange(3, 1 << 16)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = _with_hosts(arguments)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


ZYGOTE = "zygote"  # the name of a process that forks hosts
_PR_SET_CHILD_SUBREAPER = 36
_OF_A_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[2:]  # type: ignore[attr-defined]


class Host(subprocess.Popen):  # type: ignore[type-arg]
    """`python -m aggregator.swarm ARGUMENTS`, forked: a child of this process, as any other that it starts.

    This process has threads, so it cannot fork one itself. Its zygote, which does nothing else, forks twice, and what is forked
    becomes this process's child when the one between ends.
    """

    zygote: socket.socket
    _one_at_a_time = threading.Lock()

    def _execute_child(self, args: Any, *more: Any) -> None:
        words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else [args]
        if words[:2] != [sys.executable, "-m"] or words[2:3] != ["aggregator.swarm"]:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        given = dict(zip(_OF_A_CHILD, more, strict=True))
        pipes = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        told = [words[2:], environment, os.fspath(given["cwd"] or Path.cwd()), given["process_group"]]
        request = json.dumps(told).encode()
        with self._one_at_a_time:
            _adopt(True)
            try:
                socket.send_fds(
                    self.zygote,
                    [len(request).to_bytes(4, "big")],
                    [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)],
                )
                self.zygote.sendall(request)
                self.pid = int.from_bytes(_exactly(self.zygote, 4), "big")
            finally:
                _adopt(False)
        self._child_created = True
        of_pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in of_pipes))  # type: ignore[attr-defined]


def _adopt(whether: bool) -> None:
    """Have this process be the parent of whatever below it loses its own."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _with_hosts(arguments: Sequence[str]) -> list[str]:
    """Return what this process is to run. A member of a swarm has a zygote from now on; return in each host, too."""
    if list(arguments[:2]) != ["peers", "swarm"]:
        return list(arguments)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        return _fork_hosts(theirs)
    theirs.close()
    _exactly(ours, 1)
    Host.zygote = ours
    setattr(subprocess, "Popen", Host)  # noqa: B010
    return list(arguments)


def _fork_hosts(connection: socket.socket) -> list[str]:
    """Fork until the connection ends; return in each host, with its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its member
    Path("/proc/self/comm").write_text(ZYGOTE)
    connection.sendall(b"!")
    while True:
        length, pipes, _, _ = socket.recv_fds(connection, 4, 3)
        if not length:
            os._exit(0)
        arguments, environment, folder, group = json.loads(_exactly(connection, int.from_bytes(length, "big")))
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(writing, pid.to_bytes(4, "big"))
                os._exit(0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Path("/proc/self/comm").write_text(Path(sys.executable).name)
            if group is not None and group >= 0:
                os.setpgid(0, group)
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
            for descriptor in (reading, writing, *pipes):
                os.close(descriptor)
            connection.close()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            return list(arguments)
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 4))
        for descriptor in (reading, writing, *pipes):
            os.close(descriptor)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as `edit-peer` does; read when grpc is first imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests end their processes themselves
    gc.disable()
    for name in IMPORTED:
        if "._" not in name or importlib.util.find_spec(name) is not None:  # another version may lack what is private
            importlib.import_module(name)
    compile_kernels()
    gc.freeze()  # what is imported stays: a daemon that looked through it for garbage would copy all of it, too
    gc.enable()
    sys.argv[:] = _serve(_own([socket.socket(fileno=int(number)) for number in sys.argv[1:]]))
    if sys.argv[0] == "torch.distributed.run":
        handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
        setattr(handler, "Popen", Rank)  # noqa: B010
        rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        setattr(rendezvous, "get_method_name", _name_of_caller)  # noqa: B010
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
