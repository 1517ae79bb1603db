"""The live screen of a run: pure functions from a RunState to rich renderables, and one line of text for a plain terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edit.records import round_number
from edit.view.observations import SwarmStatus
from edit.view.state import Cell, Event, PeerRow, RoundRow, RunState
from edit.view.units import bytes_text, duration_text, loss_text, resample, sparkline

__all__ = ["Frame", "event_line", "progress_line", "render"]

_TONES = {"info": "dim", "fault": "yellow", "good": "green", "bad": "bold red"}
_STATES = {
    "training": "green",
    "exchanging": "cyan",
    "starting": "yellow",
    "invited": "dim",
    "lost": "bold red",
    "killed": "bold red",
    "stopped": "bold red",
    "left": "dim",
    "evicted": "dim",
}
_VERDICTS = {
    "nonfinite": ("NaN", "bold red"),
    "anomalous": ("huge", "red"),
    "rejected": ("refused", "red"),
    "copied": ("copy", "red"),
    "harmful": ("harmful", "red"),
    "outlier": ("outlier", "yellow"),
    "idle": ("idle", "yellow"),
    "unpaired": ("alone", "yellow"),
    "carried": ("late", "yellow"),
}
_SHOWN_PEERS = 6
_WIDE = 100
_SPARK_BINS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the screen needs besides the state. started, now: unix seconds."""

    run_id: str
    role_of: Callable[[str], str] | None = None  # a demo's: what happens to a peer, in a few words
    swarm: bool = False
    started: float
    now: float
    rounds: int = 7
    events: int = 6
    problem: str = ""  # why nothing newer comes
    width: int = 100  # of the terminal; a narrow one has fewer columns


def render(state: RunState, frame: Frame) -> RenderableType:
    """Return the whole screen; it is made for 100 columns."""
    return Group(
        header(state, frame),
        peers_table(state, frame),
        rounds_table(state, frame),
        curves(state, frame.width),
        events(state, frame),
    )


def header(state: RunState, frame: Frame) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    step = Text.assemble("outer step ", (f"{state.outer_step}", "bold"), f"/{state.outer_steps}")
    bar = ProgressBar(total=state.outer_steps, completed=state.outer_step, complete_style="cyan", finished_style="green")
    grid.add_row(step, bar, Text(duration_text(frame.now - frame.started), style="bold"))
    second = Table.grid(expand=True)
    second.add_column(no_wrap=True)
    second.add_column(no_wrap=True, justify="right")
    second.add_row(phase_text(state, frame), traffic_text(state) if frame.width >= _WIDE else Text())
    rows: list[RenderableType] = [grid, second]
    if frame.problem:
        rows.append(Text(frame.problem, style="bold red", no_wrap=True, overflow="ellipsis"))
    elif state.status is not None and state.status.waiting_for:
        rows.append(Text(f"waiting for {state.status.waiting_for}", style="dim", no_wrap=True, overflow="ellipsis"))
    title = Text.assemble(("EDiT ", "bold"), frame.run_id)
    return Panel(Group(*rows), title=title, title_align="left", box=box.ROUNDED, border_style="cyan")


def swarm_text(phase: str, swarm: SwarmStatus) -> Text:
    """Return who leads, and whether the swarm can agree on anything."""
    text = Text(phase, style="green" if phase in ("running", "finished") else "yellow")
    text.append(" · ", "dim")
    text.append(f"{swarm.leader} leads" if swarm.leader else "nobody leads", "bold" if swarm.leader else "bold red")
    text.append(" · ", "dim")
    quorum = swarm.quorum.partition(", or")[0]  # of two halves the one with the oldest member has it: too much for one line
    return text.append(f"voters: {quorum}", "dim" if swarm.has_quorum else "bold red")


def _duties(swarm: SwarmStatus, peer_id: str) -> Text:
    """Return what a member does for all: whether it leads, and the parts that it owns."""
    owns = ",".join(str(part) for part, owner in enumerate(swarm.owners) if owner == peer_id)
    return Text(", ".join(filter(None, ("leads" if swarm.leader == peer_id else "", owns))), style="cyan")


def phase_text(state: RunState, frame: Frame) -> Text:
    status = state.status
    if status is None:
        return Text("waiting for the first host" if frame.swarm else "waiting for the coordinator", style="yellow")
    if status.swarm is not None:
        return swarm_text(status.phase, status.swarm)
    text = Text(status.phase, style="green" if status.phase in ("collecting", "committing", "finished") else "yellow")
    if status.eta_s is not None:
        text.append(f" · {duration_text(status.eta_s)} left", "bold")
    if status.deadline_s is not None:
        text.append(f" · {status.arrived} of {status.expected} in · deadline in {max(0.0, status.deadline_s):.0f} s", "dim")
    return text


def traffic_text(state: RunState) -> Text:
    sent = sum(row.sent for row in state.peers.values())
    received = sum(row.received for row in state.peers.values())
    return Text.assemble("sent ", (bytes_text(sent), "bold"), " · received ", (bytes_text(received), "bold"))


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold cyan"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        expand=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
        header_style="dim",
    )


def _columns(table: Table, justify: JustifyMethod, *names: str) -> None:
    for name in names:
        table.add_column(Text(name), justify=justify, no_wrap=True)


_Column = tuple[str, JustifyMethod, Callable[[PeerRow], Text]]


def peers_table(state: RunState, frame: Frame) -> Table:
    columns = _peer_columns(state, frame)
    table = _table("peers")
    for name, justify, _ in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    for row in state.peers.values():
        table.add_row(*(cell(row) for _, _, cell in columns))
    return table


def _peer_columns(state: RunState, frame: Frame) -> list[_Column]:
    """Return the columns of the peers: a demo's say what happens to each, a run's where its time goes and the last verdict."""
    role_of, swarm = frame.role_of, state.status.swarm if state.status is not None else None
    columns: list[_Column] = [
        ("peer", "left", lambda row: Text(row.peer_id, style="bold")),
        ("state", "left", lambda row: Text(row.state, style=_STATES.get(row.state, ""))),
    ]
    if frame.swarm:
        columns.append(("leads, owns", "left", lambda row: _duties(swarm, row.peer_id) if swarm is not None else Text()))
    if role_of is not None:
        columns.append(("fault", "left", lambda row: Text(role_of(row.peer_id), style="yellow")))
    columns += [
        ("outer", "right", lambda row: Text(str(row.outer_step))),
        ("steps", "right", lambda row: Text(str(row.steps.value))),
        ("loss", "right", lambda row: Text("" if math.isnan(row.loss) else loss_text(row.loss))),
        ("tok/s", "right", lambda row: Text(f"{row.tokens_per_s:.0f}" if row.tokens_per_s else "")),
        ("up", "right", lambda row: Text(bytes_text(row.sent))),
        ("down", "right", lambda row: Text(bytes_text(row.received))),
    ]
    wide = frame.width >= _WIDE
    if role_of is None and wide:
        columns.append(("train/send/wait", "right", lambda row: Text(_shares(row), style="dim")))
    elif role_of is not None and not frame.swarm:
        columns.append(("kB/s", "right", _rates))
    columns.append(("ok/bad", "right", _counts))
    if role_of is None and wide:
        columns.append(("last verdict", "left", _last_verdict))
    return columns


def _rates(row: PeerRow) -> Text:
    return Text(f"↑{row.sent_rate / 1e3:.0f} ↓{row.received_rate / 1e3:.0f}", style="dim")


def _counts(row: PeerRow) -> Text:
    return Text.assemble(str(row.merged), ("/", "dim"), (str(row.rejected), "red" if row.rejected else "dim"))


def _shares(row: PeerRow) -> str:
    return " ".join(f"{100 * share:.0f}%" for share in row.shares) if any(row.shares) else ""


def _last_verdict(row: PeerRow) -> Text:
    return Text(row.verdict, style="" if row.verdict in ("", "merged") else "yellow", overflow="ellipsis")


def rounds_table(state: RunState, frame: Frame) -> Table:
    table = _table("rounds: weight of each peer in the merge, or why it has none")
    shown = list(state.peers)[:_SHOWN_PEERS]
    _columns(table, "right", "round", "outer", *shown, "seconds", "bytes")
    table.add_column("closed because", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in state.rounds[-frame.rounds :]:
        table.add_row(*_round_cells(row, shown))
    return table


def _round_cells(row: RoundRow, shown: list[str]) -> list[Text]:
    reason = Text(row.reason) if row.committed else Text(f"aborted: {row.reason}", style="red")
    return [
        Text(str(round_number(row.round_id)), style="dim"),
        Text(str(row.outer_step), style="bold" if row.committed else "red"),
        *(_weight(row.cells.get(peer_id)) for peer_id in shown),
        Text(f"{row.seconds:.1f}"),
        Text(bytes_text(row.bytes_in)),
        reason,
    ]


def _weight(cell: Cell | None) -> Text:
    if cell is None:
        return Text("absent", style="dim")
    if cell.verdict in _VERDICTS:
        return Text(*_VERDICTS[cell.verdict])
    return Text(f"{cell.weight:.2f}", style="green")


def curves(state: RunState, width: int = _WIDE) -> RenderableType:
    """Return the mean training loss of the peers, that of the lone peer, and the held-out loss, on one scale."""
    last_step = state.last_step
    together = sorted((point for row in state.peers.values() for point in row.curve), key=lambda point: point.step)
    bins = max(10, min(_SPARK_BINS, width - 32))
    lines = [
        ("peers, training", "cyan", resample(together, bins, last_step)),
        ("lone peer, training", "magenta", resample(state.lone, bins, last_step)),
        ("outer, held out", "green", resample(state.validation.get("outer", ()), bins, last_step)),
    ]
    finite = [value for _, _, values in lines for value in values if not math.isnan(value)]
    if not finite:
        return Text()
    low, high = min(finite), min(max(finite), 1.8 * min(finite))  # leave out the steep beginning, which would flatten the rest
    table = _table("loss")
    _columns(table, "left", "", "")
    _columns(table, "right", "")
    table.show_header = False
    for name, style, values in lines:
        if all(math.isnan(value) for value in values):
            continue
        newest = next((value for value in reversed(values) if not math.isnan(value)), math.nan)
        number = "" if math.isnan(newest) else loss_text(newest)
        table.add_row(name, Text(sparkline(_carried(values), low, high), style=style), Text(number, style=style))
    return table


def _carried(values: list[float]) -> list[float]:
    """Return the values with each gap filled by the value before it."""
    filled = list(values)
    last = max((place for place, value in enumerate(values) if not math.isnan(value)), default=0)
    for place in range(1, last):
        if math.isnan(filled[place]):
            filled[place] = filled[place - 1]
    return filled


def events(state: RunState, frame: Frame) -> RenderableType:
    lines = [event_line(event, frame.started) for event in state.events[-frame.events :]]
    return Panel(Group(*lines), title="events", title_align="left", box=box.ROUNDED, border_style="dim")


def event_line(event: Event, started: float) -> Text:
    """One event with the time since the start."""
    line = Text(f"{duration_text(event.t - started):>5}  ", style="dim", no_wrap=True, overflow="ellipsis")
    return line.append(event.text, _TONES.get(event.tone, ""))


def progress_line(state: RunState, frame: Frame) -> str:
    """Return one line of progress, for a log or a terminal that cannot be redrawn."""
    losses = [row.loss for row in state.peers.values() if not math.isnan(row.loss)]
    parts = [f"{duration_text(frame.now - frame.started):>5}  outer step {state.outer_step}/{state.outer_steps}"]
    if losses:
        parts.append(f"loss {loss_text(sum(losses) / len(losses))}")
    if state.lone:
        parts.append(f"lone {loss_text(state.lone[-1].loss)}")
    if state.validation.get("outer"):
        parts.append(f"held out {loss_text(state.validation['outer'][-1].loss)}")
    parts.append(f"sent {bytes_text(sum(row.sent for row in state.peers.values()))}")
    if state.rounds:
        parts.append(f"last round {state.rounds[-1].seconds:.1f} s, {state.rounds[-1].reason}")
    return " · ".join(parts)
