"""`edit-lab bench rivals`: one exchange of the same number of parameters with this project and with other systems, in one run.

Every system has as many peers, each a process of its own, and must leave the right mean at all of them. They are on loopback,
or each process of a system is a host of its own (`edit.lab.network`), behind a link of the same rate: then bytes cost time, and
a server's link carries those of all peers. What differs is said in the table: only this project authenticates members, judges
each contribution and writes a journal. A system that cannot be installed or fails is a row with its error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from edit.config.codec import CodecSpec
from edit.errors import EditError
from edit.lab.bench.exchange import ours, require_proc
from edit.lab.bench.exchange_swarm import ours_in_a_swarm
from edit.lab.bench.results import Row, circumstances, figure_note, one_line, results_table
from edit.lab.bench.rivals.environments import FLOWER, GLOO, HIVEMIND, TORCHFT, Environments, Needs, foreign_python
from edit.lab.bench.turns import Timing, Turns, best, median
from edit.lab.network import QUEUE_MS, Network
from edit.lab.processes import Supervisor
from edit.view.charts import Group, Part, PartedBar, bars_picture

__all__ = ["DEFAULT_CODECS", "RIVALS", "Rival", "RivalOptions", "measure_rivals", "picture", "table"]

DEFAULT_CODECS = ("int8", "int4", "fp32")

_ATTEMPTS = 2
_Contest: TypeAlias = tuple[str, str, Callable[[], list[Timing]]]  # a system's name, how it exchanges, what measures it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another system. script: started for each rank, and told to exchange.

    server: rank 0 is a server beside the peers, and the only process that is told.
    """

    name: str
    how: str
    needs: Needs
    script: str
    arguments: tuple[str, ...] = ()
    server: bool = False


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
    Rival(name="Flower 1.27.0 SuperLink", how="fp32, plaintext", needs=FLOWER, script="flower_superlink.py", server=True),
)
_OURS = "this project"


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    """What is measured: each system with each number of peers over each link.

    mbit: of every process's own link, in each direction; none: all on loopback; codecs: of this project; swarm: measure this
    project in a swarm, too, where a peer and its host have one link; folder: of the environments; only: other systems whose
    names contain one of these; limit_s: of one exchange, beside the time in which the link of a server carries fp32 of all
    peers up and down.
    """

    parameters: int
    peers: Sequence[int]
    folder: Path
    mbit: Sequence[float] = ()
    codecs: Sequence[str] = DEFAULT_CODECS
    swarm: bool = False
    repeat: int = 5
    limit_s: float = 120.0
    torch_index: str = ""
    only: Sequence[str] = ()
    label: str = ""


def measure_rivals(options: RivalOptions, each: Callable[[Row], None], rivals: Sequence[Rival] = RIVALS) -> list[Row]:
    """Return one row for each system, number of peers and link. each: is called with every row as soon as it is measured.

    Raises ConfigError where nothing can be measured.
    """
    require_proc()
    for name in options.codecs:
        CodecSpec.parse(name).values()
    links = [_link(mbit) for mbit in options.mbit or (0.0,)]
    rows: list[Row] = []
    for link in links:
        for peers in options.peers:
            for contest in _contests(options, _Field(options, peers, link.get("mbit", 0.0)), rivals):
                rows.append(_row(options, peers, link, *contest))
                each(rows[-1])
    return rows


def _link(mbit: float) -> dict[str, Any]:
    """Return what a row says of its links; nothing on loopback. Raises ConfigError where such links cannot be made."""
    if not mbit:
        return {}
    with Network(["tried"], mbit) as network:
        return {"mbit": mbit, "queue_ms": QUEUE_MS, "tcp": network.congestion_control()}


def _contests(options: RivalOptions, field: _Field, rivals: Sequence[Rival]) -> Iterator[_Contest]:
    for codec in options.codecs:
        how = f"{codec}, mutual TLS, penalty, journal"
        yield f"{_OURS}, {codec}", how, partial(field.ours, codec)
        if options.swarm:
            yield f"{_OURS} in a swarm, {codec}", f"{how}, on disk at a quorum", partial(field.in_a_swarm, codec)
    for rival in rivals:
        if not options.only or any(text in rival.name for text in options.only):
            yield rival.name, rival.how, partial(field.theirs, rival)


def _row(
    options: RivalOptions, peers: int, link: Mapping[str, Any], name: str, how: str, measure: Callable[[], list[Timing]]
) -> Row:
    """Return the row of one system: its figures, or why there are none. It has a second attempt; the row says so."""
    row: dict[str, Any] = {**circumstances(options.label), **link, "parameters": options.parameters, "peers": peers}
    row |= {"system": name, "how": how}
    errors: list[str] = []
    while len(errors) < _ATTEMPTS:
        try:
            timings = measure()
        except EditError as error:
            errors.append(one_line(error))
            continue
        figures = {
            "round_s": median(timings).wall_s,
            "cpu_s": median(timings).total_cpu_s,
            "best_round_s": best(timings)[0],
            "best_cpu_s": best(timings)[1],
        }
        row |= {"repeat": len(timings), **{key: round(value, 3) for key, value in figures.items()}}
        row["cpu_s_of"] = {process: round(cpu_s, 3) for process, cpu_s in median(timings).cpu_s.items()}
        if moved := median(timings).link_bytes:
            row["busiest_link"], row["link_bytes"] = max(moved.items(), key=itemgetter(1))
            row["bytes_of"] = dict(moved)
            row["bound_s"] = round(8e-6 * row["link_bytes"] / link["mbit"], 3)
        return row | ({"failed_before": errors} if errors else {})
    return row | {"error": errors[-1]}


@dataclass(frozen=True, slots=True)
class _Field:
    """So many peers, and links of so many Mbit/s; 0: loopback."""

    options: RivalOptions
    peers: int
    mbit: float

    def ours(self, codec: str) -> list[Timing]:
        """Return the timings of this project. Raises ChildDied when it fails or takes too long."""
        return ours(self.peers, self.options.parameters, codec, self.options.repeat, self._limit_s(), self.mbit)

    def in_a_swarm(self, codec: str) -> list[Timing]:
        """Likewise, in a swarm."""
        options = self.options
        return ours_in_a_swarm(self.peers, options.parameters, codec, options.repeat, self._limit_s(), self.mbit)

    def theirs(self, rival: Rival) -> list[Timing]:
        """Return the timings of another system. Raises ChildDied when it cannot be installed, fails or takes too long."""
        options, first = self.options, "server" if rival.server else "peer-0"
        names = [first, *(f"peer-{rank}" for rank in range(1, self.peers + (1 if rival.server else 0)))]
        with (
            tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch,
            Network(names, self.mbit) as network,
            Supervisor(Path(scratch) / "logs") as supervisor,
            Turns(supervisor, self._limit_s(), network) as turns,
        ):
            environments = Environments(options.folder, supervisor, options.torch_index)
            python = foreign_python(environments.python(rival.needs))
            command = (*python, str(Path(__file__).parent / rival.script), *rival.arguments)
            beside = names[1:] if rival.server else []
            for rank, name in enumerate(names):
                host = network.hosts[name]
                argv = (*command, str(rank), str(self.peers), str(options.parameters), scratch, host.address)
                if name in beside:
                    supervisor.start(name, host.command(argv))
                else:
                    turns.start(name, argv)
            return turns.measure(options.repeat, beside)

    def _limit_s(self) -> float:
        of_the_link = 2 * self.peers * 32e-6 * self.options.parameters / self.mbit if self.mbit else 0.0
        return self.options.limit_s + of_the_link


# ---- for people --------------------------------------------------------------------------------------------------------------

_ON_LOOPBACK = (
    "All processes on one machine, loopback; medians; CPU seconds are user + system of all processes in one exchange.",
)
_ON_LINKS = (
    "Each process of a system is a host with a link of its own, of this rate in each direction; all share one machine's CPUs.",
    "Bound: what the busiest direction of a link takes for its MB. All medians; CPU seconds: user + system, all processes.",
)


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    links = ("Mbit/s",) if _limited(rows) else ()
    moved = ("MB", "bound s", "busiest") if _limited(rows) else ()
    head = ("system", *links, "peers", "load", "s", "best s", "CPU s", "best CPU s", *moved, "how")
    body = [_cells(row) for row in rows]
    made = results_table(_title(rows), head, body, " ".join(_notes(rows)))
    made.columns[-1].justify = "left"
    made.columns[-1].no_wrap = False
    return made


def _limited(rows: Sequence[Row]) -> bool:
    return "mbit" in rows[0]


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return what must be known of the figures, in lines for which a picture has room."""
    if _limited(rows):
        return (*_ON_LINKS, f"TCP with {rows[0]['tcp']}. {figure_note(rows)}")
    return (*_ON_LOOPBACK, figure_note(rows))


def _cells(row: Row) -> tuple[str, ...]:
    links = (f"{row['mbit']:g}",) if "mbit" in row else ()
    begins = (row["system"], *links, str(row["peers"]), f"{row['load_before']:.1f}")
    if "error" in row:
        return (*begins, *([""] * (7 if links else 4)), f"failed: {row['error']}")
    figures = (f"{row[name]:.2f}" for name in ("round_s", "best_round_s", "cpu_s", "best_cpu_s"))
    moved = (f"{row['link_bytes'] / 1e6:.1f}", f"{row['bound_s']:.2f}", row["busiest_link"]) if links else ()
    before = "".join(f"; failed once: {error}" for error in row.get("failed_before", ()))
    return (*begins, *figures, *moved, f"{row['how']}{before}")


def picture(rows: Sequence[Row]) -> str:
    """Return the rows as an SVG file: wall seconds as bars on a logarithmic scale.

    Diamonds: CPU seconds on loopback; over links the bound, the seconds in which they carry the bytes.
    """
    groups = []
    for mbit, peers in sorted({(row.get("mbit", 0.0), row["peers"]) for row in rows}, key=lambda each: (-each[0], each[1])):
        of_these = [row for row in rows if (row.get("mbit", 0.0), row["peers"]) == (mbit, peers)]
        of_these.sort(key=lambda row: row.get("round_s", float("inf")))
        name = f"{mbit:g} Mbit/s, {peers} peers" if mbit else f"{peers} peers"
        groups.append(Group(name, [_bar(row) for row in of_these]))
    key = {"s0": f"{_OURS}: mutual TLS, penalty, journal", "lone": "other systems"}
    at = "the bound: bytes through the busiest link" if _limited(rows) else "CPU seconds"
    return bars_picture(_title(rows), _notes(rows), groups, "seconds", key, at=at, log=True)


def _bar(row: Row) -> PartedBar:
    if "error" in row:
        return PartedBar(row["system"], (), "failed: " + row["error"][:80])
    style = "s0" if row["system"].startswith(_OURS) else "lone"
    parts = [Part(row["round_s"], style, f"{row['round_s']:.2f} s")]
    if "mbit" in row:
        return PartedBar(row["system"], parts, f"{row['round_s']:.2f} s, bound {row['bound_s']:.2f} s", row["bound_s"])
    return PartedBar(row["system"], parts, f"{row['round_s']:.2f} s, {row['cpu_s']:.2f} CPU s", row["cpu_s"])


def _title(rows: Sequence[Row]) -> str:
    over = " over limited links" if _limited(rows) else ""
    return f"One exchange of {rows[0]['parameters']:,} parameters{over}"
