"""`edit-lab bench rivals`: one exchange of the same number of parameters with this project and with other systems, in one run.

Every system has as many peers, each a process of its own on loopback, and must leave the right mean at all of them. What
differs is said in the table: only this project authenticates members, judges each contribution and writes a journal. A system
that cannot be installed or fails is a row with its error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from edit.errors import EditError
from edit.lab.bench.exchange import ours, require_proc
from edit.lab.bench.results import Row, circumstances, figure_note, last_line, results_table
from edit.lab.bench.rivals.environments import FLOWER, GLOO, HIVEMIND, TORCHFT, Environments, Needs, foreign_python
from edit.lab.bench.turns import Timing, Turns, best, median
from edit.lab.charts import Group, Part, PartedBar, bars_picture
from edit.lab.processes import Supervisor

__all__ = ["RIVALS", "Rival", "RivalOptions", "measure_rivals", "picture", "table"]

_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another system. script: started for each rank, and told to exchange.

    server: rank 0 is a server beside the peers, and the only process that is told; alone: there is only that process, which
    starts all others.
    """

    name: str
    how: str
    needs: Needs
    script: str
    arguments: tuple[str, ...] = ()
    server: bool = False
    alone: bool = False


RIVALS = (
    Rival(name="gloo all_reduce", how="fp32, plaintext, no control plane", needs=GLOO, script="gloo_all_reduce.py"),
    Rival(name="torchft 0.2.0 DiLoCo", how="fp32, plaintext", needs=TORCHFT, script="torchft_diloco.py"),
    *(
        Rival(
            name=f"hivemind 1.1.12 {compression}",
            how="libp2p with TLS; group found before",
            needs=HIVEMIND,
            script="hivemind_averager.py",
            arguments=(compression,),
        )
        for compression in ("fp32", "float16", "uniform8")
    ),
    Rival(
        name="Flower 1.27.0 start_server",
        how="fp32, plaintext; deprecated",
        needs=FLOWER,
        script="flower_round.py",
        server=True,
    ),
    Rival(name="Flower 1.27.0 SuperLink", how="fp32, plaintext", needs=FLOWER, script="flower_superlink.py", alone=True),
)
_OURS = {codec: f"{codec}, mutual TLS, penalty, journal" for codec in ("int8", "fp32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    """What is measured. folder: of the environments; only: names that contain one of these; limit_s: of one exchange."""

    parameters: int
    peers: Sequence[int]
    folder: Path
    repeat: int = 5
    limit_s: float = 120.0
    torch_index: str = ""
    only: Sequence[str] = ()
    label: str = ""


def measure_rivals(options: RivalOptions, each: Callable[[Row], None], rivals: Sequence[Rival] = RIVALS) -> list[Row]:
    """Return one row for each system and number of peers. each: is called with every row as soon as it is measured.

    Raises ConfigError where nothing can be measured.
    """
    require_proc()
    rows: list[Row] = []
    for peers in options.peers:
        for codec, how in _OURS.items():
            rows.append(_row(options, peers, f"this project, {codec}", how, _Ours(options, peers, codec)))
            each(rows[-1])
        for rival in rivals:
            if not options.only or any(text in rival.name for text in options.only):
                rows.append(_row(options, peers, rival.name, rival.how, _Theirs(options, peers, rival)))
                each(rows[-1])
    return rows


def _row(options: RivalOptions, peers: int, name: str, how: str, measure: Callable[[], list[Timing]]) -> Row:
    """Return the row of one system: its figures, or why there are none. It has a second attempt; the row says so."""
    row: dict[str, Any] = {**circumstances(options.label), "parameters": options.parameters, "peers": peers}
    row |= {"system": name, "how": how}
    errors: list[str] = []
    while len(errors) < _ATTEMPTS:
        try:
            timings = measure()
        except EditError as error:
            errors.append(last_line(error))
            continue
        figures = {
            "round_s": median(timings).wall_s,
            "cpu_s": median(timings).total_cpu_s,
            "best_round_s": best(timings)[0],
            "best_cpu_s": best(timings)[1],
        }
        row |= {"repeat": len(timings), **{key: round(value, 3) for key, value in figures.items()}}
        return row | ({"failed_before": errors} if errors else {})
    return row | {"error": errors[-1]}


@dataclass(frozen=True, slots=True)
class _Ours:
    options: RivalOptions
    peers: int
    codec: str

    def __call__(self) -> list[Timing]:
        return ours(self.peers, self.options.parameters, self.codec, self.options.repeat, self.options.limit_s)


@dataclass(frozen=True, slots=True)
class _Theirs:
    options: RivalOptions
    peers: int
    rival: Rival

    def __call__(self) -> list[Timing]:
        """Return the timings. Raises ChildDied when it cannot be installed, fails or takes too long."""
        rival, options = self.rival, self.options
        with (
            tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch,
            Supervisor(Path(scratch) / "logs") as supervisor,
            Turns(supervisor, options.limit_s) as turns,
        ):
            environments = Environments(options.folder, supervisor, options.torch_index)
            python = foreign_python(environments.python(rival.needs))
            command = (*python, str(Path(__file__).parent / rival.script), *rival.arguments)
            ranks = range(1 if rival.alone else self.peers + (1 if rival.server else 0))
            beside = [f"rank-{rank}" for rank in ranks if rival.server and rank]
            for rank in ranks:
                start = supervisor.start if f"rank-{rank}" in beside else turns.start
                start(f"rank-{rank}", (*command, str(rank), str(self.peers), str(options.parameters), scratch))
            return turns.measure(options.repeat, beside)


# ---- for people --------------------------------------------------------------------------------------------------------------

_NOTE = "All processes on one machine, loopback; medians; CPU seconds are user + system of all processes in one exchange."


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    head = ("system", "peers", "load", "s", "best s", "CPU s", "best CPU s", "how")
    body = [_cells(row) for row in rows]
    made = results_table(_title(rows), head, body, f"{_NOTE} {figure_note(rows)}")
    made.columns[-1].justify = "left"
    made.columns[-1].no_wrap = False
    return made


def _cells(row: Row) -> tuple[str, ...]:
    begins = (row["system"], str(row["peers"]), f"{row['load_before']:.1f}")
    if "error" in row:
        return (*begins, "", "", "", "", f"failed: {row['error']}")
    figures = (f"{row[name]:.2f}" for name in ("round_s", "best_round_s", "cpu_s", "best_cpu_s"))
    before = "".join(f"; failed once: {error}" for error in row.get("failed_before", ()))
    return (*begins, *figures, f"{row['how']}{before}")


def picture(rows: Sequence[Row]) -> str:
    """Return the rows as an SVG file: wall seconds as bars on a logarithmic scale, CPU seconds as diamonds."""
    groups = []
    for peers in sorted({row["peers"] for row in rows}):
        of_these = sorted((row for row in rows if row["peers"] == peers), key=lambda row: row.get("round_s", float("inf")))
        groups.append(Group(f"{peers} peers", [_bar(row) for row in of_these]))
    key = {"s0": "this project: mutual TLS, penalty, journal", "lone": "other systems"}
    notes = (_NOTE, figure_note(rows))
    return bars_picture(_title(rows), notes, groups, "seconds", key, at="CPU seconds", log=True)


def _bar(row: Row) -> PartedBar:
    if "error" in row:
        return PartedBar(row["system"], (), "failed: " + row["error"][:80])
    style = "s0" if row["system"].startswith("this project") else "lone"
    text = f"{row['round_s']:.2f} s, {row['cpu_s']:.2f} CPU s"
    return PartedBar(row["system"], [Part(row["round_s"], style, f"{row['round_s']:.2f} s")], text, row["cpu_s"])


def _title(rows: Sequence[Row]) -> str:
    return f"One exchange of {rows[0]['parameters']:,} parameters"
