"""`watch`: a run's statuses on a screen that goes on when the run stops to answer."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from rich.console import Console

from edit.errors import RefusedError, TransportError
from edit.records import FragmentCommit, PeerVerdict, Verdict
from edit.view.live import show
from edit.view.screen import Frame, progress_line, render
from edit.view.state import RunState
from editpb.run_status import Curve, Event, MemberStatus, RoundReport, RunStatus, Setting

MEMBER = MemberStatus(
    peer_id="a",
    role="peer",
    state="training",
    reason="heartbeat",
    outer_step=3,
    inner_steps=300,
    loss=2.5,
    tokens_per_s=5120.0,
    bytes_sent=3_000_000,
    bytes_received=6_000_000,
    contributions=3,
    computing=0.75,
    exchanging=0.125,
    waiting=0.125,
    verdict="ok",
    verdict_reason="merged",
)
LOST = replace(
    MEMBER,
    peer_id="b\x1b[31m",
    state="lost",
    reason="no heartbeat",
    loss=math.nan,
    rejections=1,
    verdict_reason="no work in it",
)
VERDICTS = (
    PeerVerdict(peer_id="a", verdict=Verdict.OK, norm=1.0, weight=1.0),
    PeerVerdict(peer_id="b\x1b[31m", verdict=Verdict.IDLE, norm=0.0, weight=0.0),
)


def closed(step: int) -> RoundReport:
    fragment = FragmentCommit(fragment_id=0, payload=None, verdicts=VERDICTS, merged_norm=1.0, clip=1.0)
    return RoundReport(
        round_id=2_000_000 + step,
        outer_step=step,
        committed=True,
        reason="all 2 contributors in",
        seconds=2.5,
        bytes_in=1_000_000,
        bytes_out=500_000,
        missing=(),
        digest="",
        fragments=(fragment,),
        t=1000.0 + step,
    )


def status(step: int = 3, phase: str = "collecting") -> RunStatus:
    events = tuple(Event(number=n, t=1000.0 + n, kind="member", peer_id="a", text=f"event {n}") for n in range(1, step + 1))
    return RunStatus(
        run_id="run-1a2b",
        phase=phase,
        outer_step=step,
        outer_steps=10,
        round_id=2_000_001 + step,
        reason="",
        waiting_for="a (1 in, quorum 2)",
        draining=False,
        tokens=0,
        stop_tokens=0,
        digest="",
        parameters=12,
        peak_memory_bytes=0,
        expected=("a", "b"),
        arrived=("b",),
        deadline_in_s=4.0,
        members=(MEMBER, LOST, MemberStatus(peer_id="watcher", role="observer", state="training", reason="")),
        rounds=tuple(closed(n) for n in range(1, step + 1)),
        t=1000.0 + step,
        eta_s=90.0,
        curves=(Curve(kind="loss", peer_id="a", x=(1.0, 100.0, 300.0), t=(1.0, 2.0, 3.0), y=(4.0, 3.0, 2.5)),),
        events=events,
        settings=(Setting(name="sync.every", value="100", default="50"),),
    )


def text_of(state: RunState, width: int = 100, problem: str = "") -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(render(state, Frame(run_id="run-1a2b", started=1000.0, now=1083.0, problem=problem, width=width)))
    return console.export_text()


def test_the_screen_of_a_run_says_what_its_status_says() -> None:
    text = text_of(RunState.of(status()))
    assert "\x1b" not in text and "watcher" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any("outer step 3/10" in line and "1:23" in line for line in lines)
    assert any("collecting · 1:30 left · 1 of 2 in · deadline in 4 s" in line for line in lines)
    assert any("waiting for a (1 in, quorum 2)" in line for line in lines)
    assert "a training 3 300 2.500 5120 3.0 MB 6.0 MB 75% 12% 12% 3/0 merged" in lines
    assert any(line.startswith("b [31m lost 3 300 3.0 MB 6.0 MB") and line.endswith("3/1 no work in it") for line in lines)
    assert "3 3 1.00 idle 2.5 1.0 MB all 2 contributors in" in lines
    assert any("event 3" in line for line in lines)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "it does not answer" in text_of(RunState.of(status()), problem="it does not answer")


def test_a_member_that_never_attended_counts_in_no_mean_and_has_no_loss_on_the_screen() -> None:
    invited = tuple(MemberStatus(peer_id=name, role="peer", state="invited", reason="") for name in ("c", "d"))
    state = RunState.of(replace(status(), members=(MEMBER, LOST, *invited)))
    frame = Frame(run_id="run-1a2b", started=1000.0, now=1083.0)
    assert " · loss 2.500 · " in progress_line(state, frame)
    (row,) = (" ".join(line.split()) for line in text_of(state).splitlines() if line.split()[:2] == ["c", "invited"])
    assert row == "c invited 0 0 0 B 0 B 0/0"


def test_the_held_out_loss_that_peers_report_is_a_line_of_the_screen() -> None:
    at = (1001.0, 1002.0, 1003.0)
    loss = Curve(kind="loss", peer_id="a", x=(100.0, 200.0, 300.0), t=at, y=(4.0, 3.0, 2.5))
    first, second = (
        Curve(kind="held_out", peer_id=name, x=(1.0, 3.0), t=(at[0], at[2]), y=(5.0, y)) for name, y in (("a", 3.0), ("c", 3.5))
    )
    state = RunState.of(replace(status(), curves=(loss, first, second)))
    assert [(point.step, point.loss) for point in state.validation["outer"]] == [(100, 5.0), (300, 3.25)]
    (line,) = (line for line in text_of(state).splitlines() if "outer, held out" in line)
    assert line.split()[-1] == "3.250"
    assert "held out" not in text_of(RunState.of(status()))


def test_where_groups_are_exchanged_in_turn_a_run_has_as_many_inner_steps_as_it_takes() -> None:
    settings = {"sync.every": "100", "sync.groups": "4", "sync.milestones": "[]"}
    told = replace(status(), settings=tuple(Setting(name=name, value=value, default="") for name, value in settings.items()))
    assert RunState.of(told).planned == 10 * 100 // 4 and RunState.of(status()).planned == 10 * 100


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_terminal_is_too_narrow_and_an_empty_run_can_be_drawn(width: int) -> None:
    empty = replace(status(0, "founding"), members=(), curves=(), settings=(), eta_s=None, deadline_in_s=None)
    for each in (status(), empty):
        text = text_of(RunState.of(each), width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert width < 80 or "…" not in text


def console() -> Console:
    return Console(width=100, file=io.StringIO(), color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_say_each_event_once_over_a_connection_that_breaks_and_end_with_the_run() -> None:
    asked, pauses = iter((1, 2, 3)), list[float]()

    async def source() -> AsyncGenerator[RunStatus, None]:
        match next(asked):
            case 1:
                yield status(2)
                yield replace(status(4), events=status(4).events[1:])  # the first one is forgotten there
                raise TransportError("the coordinator does not answer")
            case 2:
                raise TransportError("the coordinator does not answer")
            case _:
                yield status(5)
                yield status(6, "finished")
                raise AssertionError("nobody asks on")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    out = console()
    last = asyncio.run(show(source, out, lambda: 1010.0, pause))
    assert last is not None and last.phase == "finished" and len(pauses) == 2
    lines = shown(out).splitlines()
    assert [line.split("  ")[-1] for line in lines if "event" in line] == [f"event {n}" for n in range(1, 7)]


def test_a_coordinator_that_took_the_last_outer_step_and_is_gone_has_ended_with_its_run() -> None:
    asked = iter((1, 2))

    async def source() -> AsyncGenerator[RunStatus, None]:
        if next(asked) == 2:
            raise TransportError("the coordinator does not answer")
        yield replace(status(4), outer_step=4, outer_steps=4)

    async def pause(seconds: float) -> None:
        pass

    last = asyncio.run(show(source, console(), lambda: 1010.0, pause))
    assert last is not None and (last.phase, last.waiting_for) == ("finished", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_names_of_others_are_text_on_the_screen(terminal: bool) -> None:
    named = replace(MEMBER, peer_id="[/x]\x1b[2J")
    told = replace(status(), run_id="r\x1b[2J\x1b]0;mine\x07", members=(named,), phase="finished")

    async def source() -> AsyncGenerator[RunStatus, None]:
        yield told

    screen = Console(width=120, height=50, file=io.StringIO(), color_system=None, force_terminal=terminal)
    assert asyncio.run(show(source, screen, lambda: 1010.0)) == told
    assert "\x1b[2J" not in shown(screen) and "\x1b]" not in shown(screen)
    assert text_of(RunState.of(told)).count("[/x] [2J") == 2  # its row, and its column of the rounds


def test_a_loss_that_no_model_has_is_short_and_the_screen_goes_on() -> None:
    curve = Curve(kind="loss", peer_id="a", x=(1.0, 100.0, 300.0), t=(1.0, 2.0, 3.0), y=(4.0, 1.7e308, 1.7e308))
    told = replace(status(), members=(replace(MEMBER, loss=1.7e308),), curves=(curve, replace(curve, kind="held_out")))
    text = text_of(RunState.of(told))
    assert "1.7e+308" in text and "0000000000" not in text


@pytest.mark.parametrize("every", ["9" * 5000, "²", "-1", "[" * 100_000, "1e400"])
def test_an_h_that_cannot_be_is_not_known(every: str) -> None:
    settings = {"sync.every": every, "sync.groups": "1", "sync.milestones": "[]"}
    told = replace(status(), settings=tuple(Setting(name=name, value=value, default="") for name, value in settings.items()))
    assert RunState.of(told).sync_every == 0 and "outer step 3/10" in text_of(RunState.of(told))


def test_milestones_that_cannot_be_are_not_known() -> None:
    settings = {"sync.every": "100", "sync.groups": "1", "sync.milestones": "[" * 900 + "]" * 900}
    told = replace(status(), settings=tuple(Setting(name=name, value=value, default="") for name, value in settings.items()))
    assert "outer step 3/10" in text_of(RunState.of(told))


def test_a_run_that_never_answered_or_refuses_ends_the_command() -> None:
    for error in (TransportError("the coordinator does not answer"), RefusedError("not a member")):

        async def source(error: Exception = error) -> AsyncGenerator[RunStatus, None]:
            raise error
            yield status()

        with pytest.raises(type(error)):
            asyncio.run(show(source, console(), lambda: 0.0))
