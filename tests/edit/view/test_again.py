"""`status`: once, or anew until the run has finished. One function, for the commands of operators, members and swarms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from edit.errors import RefusedError, TransportError
from edit.view.again import show_status
from editpb.run_status import RunStatus
from tests.edit.view.test_live import status

SILENT = TransportError("the coordinator does not answer\x1b[2J")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def answers(*told: RunStatus | Exception) -> Callable[[], RunStatus]:
    """What a run says, one after the other."""
    coming: Iterator[RunStatus | Exception] = iter(told)

    def read() -> RunStatus:
        said = next(coming)
        if isinstance(said, Exception):
            raise said
        return said

    return read


def tables(console: Console, run: RunStatus) -> None:
    console.print(f"step {run.outer_step}")


def test_a_run_that_does_not_answer_for_a_while_is_asked_on_until_it_has_finished(
    slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    read = answers(status(1), SILENT, status(2), status(3, "finished"), AssertionError())
    show_status(read, tables, as_json=False, watch=True)
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if line] == ["step 1", "step 2", "step 3"] and slept == [2.0] * 3
    assert told.err == "the coordinator does not answer [2J; trying again\n"


def test_without_watch_it_is_shown_once(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    show_status(answers(status(1), AssertionError()), tables, as_json=True, watch=False)
    assert json.loads(capsys.readouterr().out)["outer_step"] == 1 and not slept
    with pytest.raises(TransportError):
        show_status(answers(SILENT), tables, as_json=True, watch=False)


def test_a_run_that_never_answered_refuses_or_lacks_an_aggregator_ends_the_command(slept: list[float]) -> None:
    for read in (answers(SILENT), answers(status(1), RefusedError("not a member"))):
        with pytest.raises((TransportError, RefusedError)):
            show_status(read, tables, as_json=True, watch=True)

    def check() -> None:
        raise TransportError("aggregator 1 does not answer")

    with pytest.raises(TransportError, match="aggregator 1"):
        show_status(answers(status(1)), tables, as_json=True, watch=True, check=check)
    assert len(slept) == 1


def test_with_json_it_is_a_line_each_time(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    show_status(answers(status(1), status(2, "finished")), tables, as_json=True, watch=True)
    assert [json.loads(line)["phase"] for line in capsys.readouterr().out.splitlines()] == ["collecting", "finished"]


def test_a_run_is_at_its_end_once_the_last_outer_step_or_token_is_merged() -> None:
    run = replace(status(3), outer_steps=4, stop_tokens=0)
    assert not run.at_its_end and replace(run, outer_step=4).at_its_end and replace(run, phase="finished").at_its_end
    assert replace(run, stop_tokens=100, tokens=100).at_its_end and not replace(run, stop_tokens=100, tokens=99).at_its_end
    assert not replace(run, outer_steps=0, outer_step=0).at_its_end
