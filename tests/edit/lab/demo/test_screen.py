import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from edit.lab.demo.plan import DemoOptions, plan_faults
from edit.view.display import LiveDisplay, PlainDisplay, open_display
from edit.view.observations import Point, Status, SwarmStatus
from edit.view.screen import Frame, progress_line, render
from edit.view.state import RunState
from edit.view.units import bytes_text, duration_text, loss_text, resample, sparkline

FRAME = Frame(run_id="demo-1a2b3c4d", role_of=plan_faults(DemoOptions()).role_of, started=100.0, now=183.0, rounds=8)


def text_of(renderable: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.export_text()


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_the_whole_picture_fits_into_100_columns(make_state):
    text = text_of(render(make_state(), FRAME))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text


def test_the_header_says_how_far_the_run_is(make_state):
    text = text_of(render(make_state(9), FRAME))
    assert "demo-1a2b3c4d" in text
    assert "outer step 9/10" in text
    assert "1:23" in text
    assert "collecting · 2 of 3 in · deadline in 4 s" in text
    assert "sent 31.3 MB · received 62.6 MB" in text


def test_each_peer_has_a_row_with_its_fault_and_its_counts(make_state):
    text = text_of(render(make_state(), FRAME))
    assert " ".join(row_of(text, "peer-0").split()) == "peer-0 training 9 300 2.556 5120 8.7 MB 17.4 MB ↑290 ↓580 10/0"
    assert "half speed" in row_of(text, "peer-1")
    assert "power cut" in row_of(text, "peer-2")
    assert row_of(text, "peer-3").split()[-1] == "8/2"


def test_each_round_shows_weights_verdicts_and_outage(make_state):
    text = text_of(render(make_state(), FRAME))
    assert row_of(text, "4 ").split()[:6] == ["4", "4", "0.25", "0.25", "0.25", "NaN"]
    assert row_of(text, "5 ").split()[5] == "huge"
    assert row_of(text, "7 ").split()[4] == "absent"
    assert "deadline with a quorum of 3" in row_of(text, "7 ")


def test_an_aborted_round_says_why(make_state):
    state = make_state(2)
    state.apply(
        {
            "kind": "round",
            "t": 110.0,
            "round_id": 2_000_003,
            "outer_step": 3,
            "committed": False,
            "reason": "1 of 2 needed",
            "seconds": 5.0,
            "bytes_in": 0,
            "bytes_out": 0,
            "verdicts": [],
        }
    )
    assert "aborted: 1 of 2 needed" in text_of(render(state, FRAME))


def test_an_empty_board_can_be_drawn_too():
    text = text_of(render(RunState(["peer-0"], 10, 30), FRAME))
    assert "waiting for the coordinator" in text
    assert "invited" in text


def test_more_peers_than_columns_still_fit():
    state = RunState([f"peer-{index}" for index in range(16)], 10, 30)
    assert max(len(line) for line in text_of(render(state, FRAME)).splitlines()) <= 100


def test_the_progress_line_is_one_line(make_state):
    line = progress_line(make_state(), FRAME)
    assert line.startswith(" 1:23  outer step 10/10 · loss 2.631 · lone 2.656 · held out 2.593 · sent 34.8 MB")
    assert "\n" not in line


def test_a_plain_console_gets_each_event_once_and_few_progress_lines(make_state):
    output = io.StringIO()
    display = open_display(Console(file=output, width=200), lambda rounds, events: FRAME)
    assert isinstance(display, PlainDisplay)
    with display:
        for steps in (1, 1, 1):
            display.draw(make_state(steps, outer_steps=100))
        display.draw(make_state(3, outer_steps=100))
        display.draw(make_state(6, outer_steps=100))
    text = output.getvalue()
    assert text.count("SIGKILL to peer-2") == 1
    assert [line.split("·")[0].split()[-1] for line in text.splitlines() if "outer step" in line] == ["1/100", "6/100"]


@pytest.mark.parametrize("height", [24, 60])
def test_a_terminal_is_redrawn_in_place(make_state, height):
    output = io.StringIO()
    console = Console(file=output, width=100, height=height, force_terminal=True)
    asked = []
    display = open_display(console, lambda rounds, events: asked.append((rounds, events)) or FRAME)
    assert isinstance(display, LiveDisplay)
    with display:
        display.draw(make_state())
    assert "outer step" in output.getvalue()
    assert asked == [(2, 2) if height == 24 else (8, 8)]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_950, "1.0 MB"),
        (12_345_678, "12.3 MB"),
        (3.6e9, "3.6 GB"),
        (2.5e8, "250 MB"),
    ],
)
def test_bytes_as_people_read_them(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (83.9, "1:23"), (3600, "1:00:00"), (4000, "1:06:40"), (-1, "0:00")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_a_curve_as_blocks_keeps_its_scale_and_its_gaps():
    values = resample([Point(0.0, step, loss) for step, loss in ((0, 4.0), (5, 2.0), (25, 1.0), (40, 1.0))], 4, 40)
    assert values[0] == 3.0
    assert sparkline(values, 1.0, 3.0) == "█ ▁▁"
    assert sparkline([-math.inf, 1e308, math.inf, math.nan], -1e-30, 1e-30) == "▁██ "


def test_a_loss_of_many_digits_is_told_in_few():
    assert [loss_text(loss) for loss in (2.5, 999_999.0, 1.7e308, -math.inf)] == ["2.500", "999999.000", "1.7e+308", "-inf"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_members_words_are_text_on_both_displays(terminal):
    words = "[/nothing] [red]x[/] \x1b[2J\n\u202e"
    state = RunState(["peer-0"], outer_steps=10, sync_every=30)
    state.apply({"kind": "member", "t": 100.0, "peer_id": "peer-0", "state": words, "reason": words})
    state.apply({"kind": "event", "t": 100.0, "text": words})
    line = {"kind": "round", "t": 5.0, "round_id": 7, "outer_step": 3, "committed": True, "reason": words}
    state.apply({**line, "seconds": 1.0, "bytes_in": 1, "bytes_out": 1, "verdicts": []})
    screen = io.StringIO()
    console = Console(file=screen, width=300, height=60, color_system=None, force_terminal=terminal, legacy_windows=False)
    if terminal:
        console.print(render(state, FRAME))
    else:
        with PlainDisplay(console, lambda rounds, events: FRAME) as display:
            display.draw(state)
    lines = screen.getvalue().split("\n")
    assert sum("[/nothing] [red]x[/]  [2J" in shown for shown in lines) >= 2
    assert all(shown.isprintable() for shown in lines)


@pytest.mark.parametrize(("quorum", "shown"), [(True, "4 of 4 here, 3 needed"), (False, "1 of 4 here, 3 needed")])
def test_a_swarms_screen_says_who_leads_and_owns_what_in_100_columns(make_state, quorum, shown):
    state = make_state()
    swarm = SwarmStatus(
        leader="peer-0",
        owners=("peer-0", "peer-1", "peer-1", "peer-3"),
        steps=(9, 9, 9, 9),
        quorum=f"{shown}, or 2 with peer-0, the oldest",
        has_quorum=quorum,
        away={},
    )
    numbers = {"outer_step": 9, "digest": "", "parameters": 1000, "deadline_s": None, "arrived": 0, "expected": 0}
    state.status = Status(phase="running", memory_bytes=0, swarm=swarm, **numbers)
    text = text_of(render(state, replace(FRAME, swarm=True)))
    assert max(len(line) for line in text.splitlines()) <= 100 and "…" not in text
    assert f"running · peer-0 leads · voters: {shown}" in text
    assert "leads, 0 " in row_of(text, "peer-0") and "  1,2 " in row_of(text, "peer-1")
    assert "kB/s" not in text
    state.status = None
    assert "waiting for the first host" in text_of(render(state, replace(FRAME, swarm=True)))
