"""`edit-lab simulate`: read the scenario, show progress, print the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edit.errors import ConfigError
from edit.lab.simulation.outcome import Outcome, table
from edit.lab.simulation.scenario import Scenario
from edit.lab.simulation.simulate import simulate
from edit.plain_text import json_text
from edit.view.units import duration_text

__all__ = ["run_simulation"]

LINES = 10  # of progress, where there is no terminal


def run_simulation(scenario: Path | None, settings: list[str], as_json: bool, console: Console) -> None:
    """Run it and print the result to stdout: a table, or one JSON object. Raises ConfigError."""
    chosen = Scenario.read(scenario, settings)
    started = time.perf_counter()
    with _progress(chosen.run.sync.outer_steps, console) as progress:
        outcome = simulate(chosen, progress)
    needed_s = time.perf_counter() - started
    if as_json:
        print(json_text({**outcome.as_json(), "needed_s": round(needed_s, 3)}))  # noqa: T201
    else:
        Console().print(table(outcome, needed_s))
    _insist(outcome)


def _insist(outcome: Outcome) -> None:
    if not outcome.commits:
        raise ConfigError("nothing was ever committed; look at rounds.quorum, rounds.ceiling_s and the failures")


@contextmanager
def _progress(rounds: int, console: Console) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal, else a line at every tenth of the run."""
    if not console.is_terminal:
        yield _Lines(rounds, console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("commits", total=rounds)
        yield lambda commits, seconds: bar.update(
            task, completed=commits, description=f"commits, virtual time {duration_text(seconds)}"
        )


class _Lines:
    """One line whenever another tenth of the commits is made."""

    def __init__(self, rounds: int, console: Console) -> None:
        self._rounds = rounds
        self._console = console
        self._tenths = 0

    def __call__(self, commits: int, seconds: float) -> None:
        tenths = LINES * commits // self._rounds
        if tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{commits} of {self._rounds} commits, virtual time {duration_text(seconds)}")
