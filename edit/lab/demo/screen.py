"""The live screen: pure functions from a DemoState to rich renderables, and one line of text for a plain terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edit.lab.demo.plan import FaultPlan
from edit.lab.demo.state import Cell, DemoState, Event, PeerRow, RoundRow
from edit.lab.observations import SwarmStatus
from edit.lab.units import bytes_text, duration_text, resample, sparkline

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
}
_VERDICTS = {"nonfinite": ("NaN", "bold red"), "anomalous": ("huge", "red"), "idle": ("idle", "yellow")}
_RATES = 9  # the place of the rates among a peer's cells
_SHOWN_PEERS = 6
_SPARK_BINS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the screen needs besides the state. started, now: unix seconds."""

    run_id: str
    faults: FaultPlan
    swarm: bool = False
    started: float
    now: float
    rounds: int = 7
    events: int = 6


def render(state: DemoState, frame: Frame) -> RenderableType:
    """Return the whole screen; it needs 100 columns."""
    return Group(
        header(state, frame), peers_table(state, frame), rounds_table(state, frame), curves(state), events(state, frame)
    )


def header(state: DemoState, frame: Frame) -> RenderableType:
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
    second.add_row(phase_text(state, frame), traffic_text(state))
    title = Text.assemble(("EDiT ", "bold"), frame.run_id)
    return Panel(Group(grid, second), title=title, title_align="left", box=box.ROUNDED, border_style="cyan")


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


def phase_text(state: DemoState, frame: Frame) -> Text:
    status = state.status
    if status is None:
        return Text("waiting for the first host" if frame.swarm else "waiting for the coordinator", style="yellow")
    if status.swarm is not None:
        return swarm_text(status.phase, status.swarm)
    text = Text(status.phase, style="green" if status.phase in ("collecting", "committing", "finished") else "yellow")
    if status.deadline_s is not None:
        text.append(f" · {status.arrived} of {status.expected} in · deadline in {max(0.0, status.deadline_s):.0f} s", "dim")
    return text


def traffic_text(state: DemoState) -> Text:
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
        table.add_column(name, justify=justify, no_wrap=True)


def peers_table(state: DemoState, frame: Frame) -> Table:
    table = _table("peers")
    swarm = state.status.swarm if state.status is not None else None
    duties = ["leads, owns"] if frame.swarm else []  # in place of the rates
    _columns(table, "left", "peer", "state", *duties, "fault")
    _columns(table, "right", "outer", "steps", "loss", "tok/s", "up", "down", *([] if frame.swarm else ["kB/s"]), "ok/bad")
    for row in state.peers.values():
        cells = _peer_cells(row, frame.faults.role_of(row.peer_id))
        if frame.swarm:
            del cells[_RATES]
            cells.insert(2, _duties(swarm, row.peer_id) if swarm is not None else Text())
        table.add_row(*cells)
    return table


def _peer_cells(row: PeerRow, part: str) -> list[Text]:
    return [
        Text(row.peer_id, style="bold"),
        Text(row.state, style=_STATES.get(row.state, "")),
        Text(part, style="yellow"),
        Text(str(row.outer_step)),
        Text(str(row.steps.value)),
        Text("" if math.isnan(row.loss) else f"{row.loss:.3f}"),
        Text(f"{row.tokens_per_s:.0f}" if row.tokens_per_s else ""),
        Text(bytes_text(row.sent)),
        Text(bytes_text(row.received)),
        Text(f"↑{row.sent_rate / 1e3:.0f} ↓{row.received_rate / 1e3:.0f}", style="dim"),
        Text.assemble(str(row.merged), ("/", "dim"), (str(row.rejected), "red" if row.rejected else "dim")),
    ]


def rounds_table(state: DemoState, frame: Frame) -> Table:
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
        Text(str(row.round_id % 1_000_000), style="dim"),
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


def curves(state: DemoState) -> RenderableType:
    """Return the mean training loss of the peers, that of the lone peer, and the held-out loss, on one scale."""
    last_step = state.outer_steps * state.sync_every
    together = sorted((point for row in state.peers.values() for point in row.curve), key=lambda point: point.step)
    lines = [
        ("peers, training", "cyan", resample(together, _SPARK_BINS, last_step)),
        ("lone peer, training", "magenta", resample(state.lone, _SPARK_BINS, last_step)),
        ("outer, held out", "green", resample(state.validation.get("outer", ()), _SPARK_BINS, last_step)),
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
        newest = next((value for value in reversed(values) if not math.isnan(value)), math.nan)
        number = "" if math.isnan(newest) else f"{newest:.3f}"
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


def events(state: DemoState, frame: Frame) -> RenderableType:
    lines = [event_line(event, frame.started) for event in state.events[-frame.events :]]
    return Panel(Group(*lines), title="events", title_align="left", box=box.ROUNDED, border_style="dim")


def event_line(event: Event, started: float) -> Text:
    """One event with the time since the start."""
    line = Text(f"{duration_text(event.t - started):>5}  ", style="dim", no_wrap=True, overflow="ellipsis")
    return line.append(event.text, _TONES.get(event.tone, ""))


def progress_line(state: DemoState, frame: Frame) -> str:
    """Return one line of progress, for a log or a terminal that cannot be redrawn."""
    losses = [row.loss for row in state.peers.values() if not math.isnan(row.loss)]
    parts = [f"{duration_text(frame.now - frame.started):>5}  outer step {state.outer_step}/{state.outer_steps}"]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    if state.lone:
        parts.append(f"lone {state.lone[-1].loss:.3f}")
    if state.validation.get("outer"):
        parts.append(f"held out {state.validation['outer'][-1].loss:.3f}")
    parts.append(f"sent {bytes_text(sum(row.sent for row in state.peers.values()))}")
    if state.rounds:
        parts.append(f"last round {state.rounds[-1].seconds:.1f} s, {state.rounds[-1].reason}")
    return " · ".join(parts)
