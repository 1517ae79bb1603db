"""How every command logs and ends: one line for each message, one line and an exit code of its own for each error.

A bug is a traceback and exit code 70. Whatever others wrote is printed without control characters (`edit.plain_text`).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

import typer

import edit
from edit.errors import EditError
from edit.plain_text import printable

__all__ = ["EXIT_CODES", "SHORT_HELP", "exit_codes", "log_to_stderr", "run_command", "with_version"]

# What every program ends with; an exception's is in `edit.errors`.
EXIT_CODES = {
    0: "finished, or stopped as asked",
    1: "a rule of `edit-lab chaos` was broken",
    2: "wrong configuration or command line, or a file that cannot be used",
    3: "refused by the other side",
    4: "evicted from the run",
    69: "the other side cannot be reached",
    70: "a bug, with a traceback",
    130: "Ctrl-C",
}

SHORT_HELP = {"help_option_names": ["-h", "--help"]}  # context settings of a command


def exit_codes(*codes: int) -> str:
    """Return what these exit codes mean, as a sentence for the help of a program."""
    return f"Exit codes: {'; '.join(f'{code} {EXIT_CODES[code]}' for code in codes)}."


def with_version(app: typer.Typer, program: str) -> None:
    """Give a program the option --version."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {edit.__version__}")
            raise typer.Exit

    @app.callback()
    def main(
        version: bool = typer.Option(False, "--version", callback=show, is_eager=True, help="Print the version."),
    ) -> None:
        pass


def run_command(program: str, command: Callable[[], object]) -> None:
    """Run a command line and exit with one of EXIT_CODES.

    gRPC, which commands import, is told to be silent: it would log each stranger's handshake.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        command()
    except EditError as error:
        print(_lines(f"{program}: {error}"), file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # the outermost frame: any other exception is a bug
        print(_lines(traceback.format_exc()), end="", file=sys.stderr)  # noqa: T201
        sys.exit(70)


def log_to_stderr(level: int = logging.INFO, who: str = "") -> None:
    """Log messages of `level` and above to stderr, each as one line with the time of day. who: begins every message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])


class _OneLine(logging.Formatter):
    """A message is one line, whatever is in it; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return _lines(super().formatException(ei))


def _lines(text: str) -> str:
    """Return `text` with the ends of its lines as its only control characters."""
    return "\n".join(printable(line) for line in text.split("\n"))
