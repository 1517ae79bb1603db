"""`status`: how a run stands, once, or anew until it has finished (--watch); as tables, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Protocol, TypeVar

import typer
from rich.console import Console

from edit.errors import BusyError, TransportError
from edit.plain_text import json_text, printable

__all__ = ["WatchOption", "show_status"]

WATCH_S = 2.0  # between two looks

WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Print it anew every 2 s until the run has finished; with --json, a line each time."),
]


class _Told(Protocol):
    """How a run stands: that of a coordinator, or a swarm."""

    @property
    def phase(self) -> str: ...

    def as_json(self) -> dict[str, object]: ...


_T = TypeVar("_T", bound=_Told)


def show_status(
    read: Callable[[], _T],
    print_tables: Callable[[Console, _T], None],
    *,
    as_json: bool,
    watch: bool,
    check: Callable[[], None] = lambda: None,
    finished: Callable[[_T], bool] = lambda told: told.phase == "finished",
) -> None:
    """Print how a run stands. watch: again and again, until it has finished.

    Args:
        read: asks the run.
        check: is called after each time; raises what else is wrong.
        finished: whether that is how a run stands at its end.

    A run that does not answer once it has is said so, and asked again. Raises what `read` and `check` raise, but for that.
    """
    console, answered = Console(), False
    while True:
        try:
            told = read()
            if as_json:
                typer.echo(json_text(told.as_json(), indent=None if watch else 2))
            else:
                if watch:
                    console.clear()
                print_tables(console, told)
            check()
            answered = True
            if not watch or finished(told):
                return
        except (TransportError, BusyError) as error:
            if not (watch and answered):
                raise
            typer.echo(f"{printable(str(error))}; trying again", err=True)
        time.sleep(WATCH_S)
