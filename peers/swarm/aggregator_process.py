"""The program `python -m aggregator.swarm`, which does what is a host's: a command that answers, and the host itself."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edit.command_line import CALLED_AS, EVICTED
from edit.errors import ConfigError, EditError, EvictedError, RefusedError, TransportError
from edit.plain_text import parse_json
from editpb.invitation import local_address
from editpb.run_status import RunStatus
from peers.helper_process import ends_with_this

__all__ = ["HostProcess", "ask", "command", "configured", "kept_status", "parameters_of"]

_log = logging.getLogger("peers")
ERRORS: dict[int, type[EditError]] = {2: ConfigError, 3: RefusedError, 4: EvictedError, 69: TransportError}  # by exit code
MOST_RESTARTS = 5  # within RESTARTS_S
RESTARTS_S = 600.0
AGAIN_S = 1.0  # after the system refused to start a process; then after twice as long each time
END_S = 15.0  # for a host to end; then it is killed


def command(*arguments: object) -> list[str]:
    """Return a command line of the aggregator's program."""
    return [sys.executable, "-m", "aggregator.swarm", *map(str, arguments)]


def ask(*arguments: object, told: str = "") -> list[str]:
    """Run a command, and return the lines that it prints. told: its standard input. Raises the EditError that it ended with."""
    with ends_with_this() as beside:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command(*arguments), capture_output=True, text=True, input=told, check=False, **beside
        )
    if done.returncode == 0:
        return done.stdout.splitlines()
    last = (done.stderr.splitlines() or [f"it ended with {done.returncode}"])[-1]
    if done.returncode not in ERRORS:
        print(done.stderr, file=sys.stderr, end="")  # noqa: T201
    raise ERRORS.get(done.returncode, EditError)(last.removeprefix("aggregator.swarm: ").removeprefix(EVICTED))


def configured(folder: Path) -> RunStatus:
    """Return how the swarm of a folder stands, with its settings; where nobody says more, only these. Raises as `ask`."""
    return _status("configured", folder)


def kept_status(folder: Path) -> RunStatus:
    """Return how the run stands of a coordinator's folder, or of that of a member of a swarm. Raises as `ask`."""
    return _status("kept-status", folder)


def _status(verb: str, folder: Path) -> RunStatus:
    return RunStatus.from_json(parse_json("\n".join(ask(verb, folder))))


def parameters_of(folder: Path, arguments: Sequence[str]) -> int:
    """Return how many parameters the run's model has; a folder without the run's settings gets them from other members.

    arguments: of a host's command line. The host's program says on stderr what it waits for. Exits as it does where it fails.
    """
    words = command(folder, *arguments, "--settings-only")
    with ends_with_this(**{CALLED_AS: "edit-peer swarm"}) as beside:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, **beside)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return int(parse_json(done.stdout)["parameters"])


class HostProcess:
    """The host of this peer, beside it: it ends with this process, however that ends.

    A host that is killed is started again; one that fails has said why, and ends this peer, too. So does one that was told to
    leave, but that is no failure. Raises TransportError where the system cannot start a process.

    Args:
        folder: of the member.
        arguments: more of its command line.
    """

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        self._command = command(folder, *arguments, "--who", "host: ")
        self.failure: EditError | None = None  # why it ended, and must end this peer
        self.listen = ""  # HOST:PORT at which this machine reaches it, once it serves
        self._over = False  # it ended, and is not started again
        self._told: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # of the two
        self._ending = threading.Event()
        self._starts: list[float] = []
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="host", daemon=True)
        self._watcher.start()

    def at_its_end(self, call: Callable[[], None]) -> None:
        """Call this, in a thread of the host's, when it has failed or was told to leave; at once if so already."""
        with self._lock:
            self._told = call
            over = self._over
        if over:
            call()

    @property
    def ready(self) -> str | None:
        """Where it listens, or None while it does not. Raises the EditError that it ended with."""
        if self.failure is not None:
            raise self.failure
        return self.listen or None

    def close(self, *, linger: bool = False) -> None:
        """End it. linger: only once no other member needs it any more, or at SIGINT or SIGTERM."""
        self._ending.set()
        before = {}
        try:
            if linger and self._process.poll() is None:
                before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
                with contextlib.suppress(OSError, ValueError):
                    self._stdin.write(b"\n")
                    self._stdin.flush()
                while self._process.poll() is None and not self._stdin.closed:
                    self._watcher.join(0.25)
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join(END_S)

    def _stop(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts = [*self._starts, time.monotonic()][-MOST_RESTARTS - 1 :]
        # a process group of its own: Ctrl-C is for the peer, which ends the host after it has saved
        try:
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        except OSError as error:
            raise TransportError(f"this member's host cannot be started ({error.strerror})") from error
        assert process.stdin is not None
        self._stdin = process.stdin
        return process

    def _watch(self) -> None:
        while True:
            assert self._process.stdout is not None
            with self._process.stdout as printed:
                for line in printed:
                    self.listen = local_address(parse_json(line)["listen"])
            code = self._process.wait()
            self._stop()  # its end of the pipe
            if self._ending.is_set():
                return
            if code >= 0 or self._often:
                why = (
                    f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}, {len(self._starts)} times"
                )
                if code == 0 and self.listen:
                    _log.info("this member's host has ended, as its last lines say; so does the peer")
                else:
                    kind = TransportError if code == 0 else ERRORS.get(code, EditError)
                    self.failure = kind(f"this member's host {why}; its last lines say why")
                self._end()
                return
            _log.warning("this member's host was killed by signal %d; it is started again", -code)
            if not self._start_again():
                return

    @property
    def _often(self) -> bool:
        return len(self._starts) > MOST_RESTARTS and time.monotonic() - self._starts[0] < RESTARTS_S

    def _start_again(self) -> bool:
        """Start it, as soon as the system can; return whether it runs."""
        pause_s = AGAIN_S
        while not self._ending.is_set():
            try:
                self._process = self._start()
            except TransportError as error:
                if self._often:
                    self.failure = error
                    self._end()
                    break
                _log.warning("%s; it is tried again in %g s", error, pause_s)
                self._ending.wait(pause_s)
                pause_s *= 2
            else:
                if self._ending.is_set():
                    self._stop()  # `close` had no end of its pipe
                return True
        return False

    def _end(self) -> None:
        with self._lock:
            self._over, told = True, self._told
        told()
