"""How every command loads, logs and ends: one line for each message, one line and an exit code of its own for each error.

A bug is a traceback and exit code 70. Whatever others wrote is printed without control characters (`edit.plain_text`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import typer

import edit
from edit.errors import ConfigError, EditError, EvictedError
from edit.interrupts import end_at_interrupt, raise_at_interrupt
from edit.plain_text import json_text, printable

__all__ = [
    "CALLED_AS",
    "ENDS_WITH",
    "EVICTED",
    "EXIT_CODES",
    "SHORT_HELP",
    "exit_codes",
    "loading",
    "log_to_stderr",
    "need_stdout",
    "otlp_protocol",
    "run_command",
    "with_version",
]

# What every program ends with; an exception's is in `edit.errors`.
EXIT_CODES = {
    0: "finished, or stopped as asked",
    1: "a rule of `edit-lab chaos` was broken, or you answered no to a question",
    2: "wrong configuration or command line, or a file that cannot be used",
    3: "refused by the other side",
    4: "evicted from the run",
    69: "the other side cannot be reached",
    70: "a bug, with a traceback",
    130: "Ctrl-C",
    141: "whoever read stdout went before its end, as `| head` does",
}
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # of a path: who named it can mend that
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # by the disk

LOG_FORMAT = "EDIT_LOG_FORMAT"  # in the environment
LOG_FORMATS = ("text", "json")
MOST_LINES = 10_000  # of the log that wait for a stderr that nobody reads; more are counted, not kept
FLUSH_S = 2.0  # how long the end of a program waits for the next of them to be read
SHORT_HELP = {"help_option_names": ["-h", "--help"]}  # context settings of a command


def exit_codes(*codes: int, one: str = EXIT_CODES[1]) -> str:
    """Return what these exit codes mean, as a sentence for the help of a program. one: what 1 means there."""
    meanings = {**EXIT_CODES, 1: one}
    return f"Exit codes: {'; '.join(f'{code} {meanings[code]}' for code in codes)}."


def with_version(app: typer.Typer, program: str) -> None:
    """Give a program the options --version and --log-format."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {edit.__version__}")
            raise typer.Exit

    @app.callback()
    def main(
        version: bool = typer.Option(False, "--version", callback=show, is_eager=True, help="Print the version."),
        log_format: str = typer.Option("text", envvar=LOG_FORMAT, help="How logs are written to stderr: text, or json."),
    ) -> None:
        if log_format not in LOG_FORMATS:
            raise ConfigError(f"--log-format {log_format}: must be {' or '.join(LOG_FORMATS)}")
        os.environ[LOG_FORMAT] = log_format  # for `log_to_stderr`, also of the processes that this one starts


EVICTED = "evicted from the run: "  # what is said before the reason that the operator gave
CALLED_AS = "EDIT_CALLED_AS"  # in the environment of a process that a command has become: how its messages begin
ENDS_WITH = "EDIT_ENDS_WITH"  # in that of a helper process: a descriptor of a pipe, at its end once the caller has ended


def run_command(program: str, command: Callable[[], object]) -> None:
    """Run a command line and exit with one of EXIT_CODES.

    gRPC, which commands import, is told to be silent: it would log each stranger's handshake. And it looks names up as other
    programs do: its own resolver takes only the first of several lines for a name in /etc/hosts.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
    try:
        raise_at_interrupt()
        _escape_unencodable(sys.stdout)
        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except EditError as error:
        evicted = isinstance(error, EvictedError) and not str(error).startswith("evicted ")  # else the reason says it itself
        _say(f"{program}: {EVICTED if evicted else ''}{error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich end so
            _give_up(1)
            sys.exit(141)
        raise
    except Exception as error:  # the outermost frame: any other exception is a bug
        if isinstance(error, OSError) and error.filename is not None and error.errno in _UNUSABLE:
            _say(f"{program}: {os.fsdecode(error.filename)}: cannot be used ({error.strerror})")
            sys.exit(2)
        if isinstance(error, OSError) and (refused := _refused(error)):
            _give_up(refused)
            if isinstance(error, BrokenPipeError):
                sys.exit(141)
            _say(f"{program}: stdout cannot be written ({error.strerror})")  # nothing is seen of it if it is stderr
            sys.exit(2)
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            _say(f"{program}: the system refuses another thread; raise the limit of its user (ulimit -u) or of its container")
            sys.exit(2)
        _say(traceback.format_exc().removesuffix("\n"))
        sys.exit(70)


def _escape_unencodable(stream: TextIO | None) -> None:
    """Let a stream write every text: a character that its encoding lacks becomes an escape, not an error."""
    if isinstance(stream, TextIOWrapper) and not (stream.encoding == "utf-8" and stream.errors == "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def need_stdout() -> None:
    """Raise ConfigError where what is printed would be lost."""
    if sys.stdout is None:
        raise ConfigError("stdout is closed, and what this command prints is nowhere else")


def _say(text: str) -> None:
    """Print lines to stderr after those of the log, where that can be."""
    lines = next((each for each in logging.getLogger().handlers if isinstance(each, _Lines)), None)
    if lines is not None:
        lines.say(_lines(text))
        return
    try:
        print(_lines(text), file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        _give_up(2)


def _refused(error: OSError) -> int:
    """Return the descriptor of which this is the error, stdout or stderr: it refuses an end of line, too. 0: another file's."""
    if error.filename is not None or error.errno not in (*_REFUSED, errno.EPIPE):
        return 0
    for number, stream in (1, sys.__stdout__), (2, sys.__stderr__):
        if stream is None:  # it was closed (`>&-`): the descriptor may be a file of the command
            continue
        try:
            os.write(number, b"\n")
        except OSError as again:
            if again.errno == error.errno:
                return number
    return 0


def _give_up(number: int) -> None:
    """Let what is still to be written to a descriptor go nowhere: else Python would fail at it on its way out."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Context manager around the imports of a command that needs torch: without garbage collection, since what is imported
    stays. To look through it again and again takes a fifth of the time that they need, and later stops all else for as long.
    Ctrl-C ends the process at once (`edit.interrupts`), so there must be nothing to clean up yet.

    Does nothing where torch is there already, as in a process that does other things, too.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    end_at_interrupt()
    try:
        yield
    finally:
        raise_at_interrupt()
        gc.freeze()
        gc.enable()


def log_to_stderr(level: int = logging.INFO, who: str = "") -> None:
    """Log messages of `level` and above to stderr, each as one line with date, time and level. who: begins every message.

    With EDIT_LOG_FORMAT = json in the environment, as --log-format sets it, a line is an object: time (RFC 3339, UTC), level,
    logger, message, and traceback where there is one.

    A thread writes them, so that a pipe that nobody reads stops nothing else: beyond MOST_LINES they are counted, not written.
    """
    if sys.stderr is None:  # it was closed (`2>&-`)
        return
    handler = _Lines(2)
    text = _OneLine(f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_Json(who) if os.environ.get(LOG_FORMAT) == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])


def otlp_protocol() -> str:
    """Return how OpenTelemetry's variables want spans and metrics sent: "http/protobuf", "grpc", or empty: not at all.

    They are sent where OTEL_EXPORTER_OTLP_ENDPOINT, or that of traces or metrics alone, names a collector, unless
    OTEL_SDK_DISABLED is true. Everything else that the variables say, the SDK reads itself.
    """
    of = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", "") for kind in ("", "TRACES_", "METRICS_")]
    if not any(of) or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    return "grpc" if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip() == "grpc" else "http/protobuf"


class _Lines(QueueHandler):
    """Leaves lines to a thread that writes them to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        # A destructor, or a signal's handler, that logs may come in between: in a Queue it would wait for itself.
        self._waiting = SimpleQueue[Any]()
        super().__init__(self._waiting)
        self._descriptor = descriptor
        self._writer: _Writer | None = None
        self._process = 0  # in which the writer is; one that was forked has none
        self._left_out = 0
        self._patience_s = FLUSH_S

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._process != os.getpid():
            waiting = SimpleQueue[Any]()
            writer = _Writer(waiting, self._descriptor)
            try:
                writer.start()
            except RuntimeError:  # the system refuses a thread: who logs waits
                writer.handle(record)
                return
            self._waiting, self._writer, self._process = waiting, writer, os.getpid()
            if (forks := sys.modules.get("multiprocessing.util")) is not None:  # what it forks ends without `logging.shutdown`
                forks.Finalize(None, self.flush, exitpriority=0)
        if self._waiting.qsize() >= MOST_LINES:
            self._left_out += 1
            return
        if self._left_out:
            text = "%d lines of the log were not written: nobody read them"
            gap = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (self._left_out,), None)
            self._waiting.put(self.prepare(gap))
            self._left_out = 0
        self._waiting.put(record)

    def say(self, text: str) -> None:
        """Write `text` as it is, after all before it; return once it is written, or nobody reads it."""
        self.flush()
        self.enqueue(logging.makeLogRecord({"msg": text}))
        self.flush()

    def flush(self) -> None:
        """Wait until all is written; no more once nothing was for FLUSH_S. Also called when Python ends."""
        if self._writer is None or self._process != os.getpid():
            return
        answer, written = SimpleQueue[None](), self._writer.written
        self._waiting.put(answer)
        while True:
            try:
                return answer.get(timeout=self._patience_s)
            except Empty:
                if written == (written := self._writer.written):
                    self._patience_s = 0.0
                    return


class _Writer(QueueListener):
    """The thread. It writes to the descriptor itself: a daemon thread that is stopped in a stream keeps that stream locked."""

    def __init__(self, queue: SimpleQueue[Any], descriptor: int) -> None:
        super().__init__(queue)
        self._descriptor = descriptor
        self.written = 0  # lines

    def handle(self, record: logging.LogRecord | SimpleQueue[None]) -> None:
        """Write a line; or answer that all before has been written."""
        if isinstance(record, SimpleQueue):
            record.put(None)
            return
        line = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):  # a full disk; a reader that has gone
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:  # whoever made the pipe does not wait for it
                    select.select([], [self._descriptor], [])
        self.written += 1


class _OneLine(logging.Formatter):
    """A message is one line, whatever is in it; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return _lines(super().formatException(ei))


class _Json(logging.Formatter):
    """A message is an object on one line."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = printable(f"{self._who}{record.getMessage()}")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": message}
        if record.exc_info:
            line["traceback"] = _lines(self.formatException(record.exc_info))
        return json_text(line)


def _lines(text: str) -> str:
    """Return `text` with the ends of its lines as its only control characters."""
    return "\n".join(printable(line) for line in text.split("\n"))
