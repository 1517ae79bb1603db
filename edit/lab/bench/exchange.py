"""`edit-lab bench exchange`: one exchange of a whole model over gRPC with mutual TLS, beside raw gRPC of the same bytes.

Coordinator and peers are processes of their own on loopback; penalty on, journal with fsync. An exchange is from the moment the
last peer begins to encode (all are told at once) to the moment the last one has applied the update and checked its digest.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from edit.codecs import codec
from edit.config.codec import CodecSpec
from edit.errors import ConfigError
from edit.lab import procfs
from edit.lab.bench.exchange_peer import blocks
from edit.lab.bench.results import Row, circumstances, figure_note, results_table
from edit.lab.bench.turns import Timing, Turns, best, median
from edit.lab.joining import invite
from edit.lab.network import QUEUE_MS, Host, Network
from edit.lab.processes import COORDINATOR, ChildDied, Programs, Supervisor
from edit.lab.run_toml import Settings, to_toml
from edit.view.charts import Group, Part, PartedBar, bars_picture

__all__ = ["ExchangeOptions", "measure_exchange", "ours", "picture", "raw", "require_proc", "table"]

_SERVER = "server"
_SERVE_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """What is measured: each codec with each number of peers. repeat: counted exchanges; limit_s: of one of them."""

    parameters: int
    codecs: Sequence[str]
    peers: Sequence[int]
    repeat: int = 5
    label: str = ""
    limit_s: float = 600.0


def require_proc() -> None:
    """Raise ConfigError where the CPU seconds of other processes cannot be read."""
    if not procfs.available():
        raise ConfigError("edit-lab bench needs /proc, which this system does not have")


def measure_exchange(options: ExchangeOptions, each: Callable[[Row], None]) -> list[Row]:
    """Return one row for each codec and number of peers. each: is called with every row as soon as it is measured.

    Raises ConfigError for an unknown codec, ChildDied when a process fails.
    """
    require_proc()
    for name in options.codecs:
        CodecSpec.parse(name).values()
    schema = blocks(options.parameters)
    sizes = {name: sum(codec(name).encoded_size(fragment.numel) for fragment in schema.fragments) for name in options.codecs}
    rows: list[Row] = []
    for name, size in sizes.items():
        for peers in options.peers:
            begins = circumstances(options.label)
            limit = raw(peers, size, options.repeat, options.limit_s)
            timings = ours(peers, options.parameters, name, options.repeat, options.limit_s)
            found = {"parameters": schema.numel, "codec": name, "peers": peers, "bytes_up_per_peer": size}
            rows.append({**begins, **found, **_figures(timings, limit, peers)})
            each(rows[-1])
    return rows


def _figures(timings: Sequence[Timing], limit: Sequence[Timing], peers: int) -> Row:
    middle, beside = median(timings), median(limit)
    coordinator = middle.cpu_s[COORDINATOR]
    figures = {
        "round_s": middle.wall_s,
        "cpu_s": middle.total_cpu_s,
        "coordinator_cpu_s": coordinator,
        "peer_cpu_s": (middle.total_cpu_s - coordinator) / peers,
        "best_round_s": best(timings)[0],
        "best_cpu_s": best(timings)[1],
        "raw_grpc_s": beside.wall_s,
        "raw_grpc_cpu_s": beside.total_cpu_s,
        "raw_grpc_server_cpu_s": beside.cpu_s[_SERVER],
    }
    return {"repeat": len(timings), **{name: round(value, 3) for name, value in figures.items()}}


def ours(
    peers: int,
    parameters: int,
    codec_name: str,
    repeat: int,
    limit_s: float,
    mbit: float = 0.0,
    *,
    coordinator_mbit: float = 0.0,
    queue_ms: int = QUEUE_MS,
    audited: bool = False,
) -> list[Timing]:
    """Return the timings of exchanges between these peers and a coordinator.

    mbit: of the link of each of them, in each direction; 0: all on loopback. coordinator_mbit: of the coordinator's, where it
    is another one. queue_ms: in front of each direction of a link. audited: with `audit.enabled`. Raises ChildDied, ConfigError
    without such links.
    """
    coordinator, names = Programs().coordinator, [f"peer-{place}" for place in range(peers)]
    others = {COORDINATOR: coordinator_mbit} if coordinator_mbit else {}
    with (
        tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch,
        Network([COORDINATOR, *names], mbit, others, queue_ms) as network,
        Supervisor(Path(scratch) / "logs") as supervisor,
        Turns(supervisor, limit_s, network) as turns,
    ):
        root, host = Path(scratch), network.hosts[COORDINATOR]
        state, toml = root / "run", root / "run.toml"
        settings: Settings = {**_settings(peers, codec_name, limit_s, host), "audit": {"enabled": audited}}
        toml.write_text(to_toml(settings), encoding="utf-8")
        supervisor.call({"init": (*coordinator, "init", "--state", str(state), "--config", str(toml))})
        supervisor.start(COORDINATOR, host.command((*coordinator, "serve", "--keep-serving", "--state", str(state))))
        _wait_for(state / "addresses.json", supervisor)
        for name in names:
            peer = (str(root / name), invite(state, name), str(parameters), codec_name)
            turns.start(name, (sys.executable, "-m", "edit.lab.bench.exchange_peer", *peer))
        return turns.measure(repeat, beside=[COORDINATOR])


def _settings(peers: int, codec_name: str, limit_s: float, host: Host) -> Settings:
    """Return the settings of a run whose coordinator is on this host. No round ends before limit_s without all peers."""
    return {
        "name": "bench",
        "model": {"name": "entry:mine"},
        "sync": {"every": 1, "outer_steps": 1_000_000},
        "codec": {"up": codec_name, "down": codec_name},
        "rounds": {"start_peers": peers, "quorum": peers, "ceiling_s": max(600.0, limit_s)},
        "storage": {"checkpoint_every": 1000, "keep_updates": 1, "buffer_bytes": 8 << 30},
        "membership": {"heartbeat_s": 2.0, "lease_s": 60.0},
        "server": {"listen": f"{host.address}:0", "enrol_listen": f"{host.address}:0", "advertise": (host.address,)},
    }


def raw(peers: int, size: int, repeat: int, limit_s: float) -> list[Timing]:
    """Return the timings of raw gRPC streams of `size` bytes up and down for each of these peers. Raises ChildDied."""
    coordinator = Programs().coordinator
    with (
        tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch,
        Supervisor(Path(scratch) / "logs", patience_s=0.0) as supervisor,
        Turns(supervisor, limit_s) as turns,
    ):
        tls, port_file = Path(scratch) / "run", Path(scratch) / "port"
        supervisor.call({"init": (*coordinator, "init", "--state", str(tls))})
        module = (sys.executable, "-m", "edit.lab.bench.raw_stream")
        supervisor.start(_SERVER, (*module, "server", str(tls), str(port_file)))
        _wait_for(port_file, supervisor)
        for place in range(peers):
            turns.start(f"client-{place}", (*module, "client", str(tls), str(port_file), str(size)))
        return turns.measure(repeat, beside=[_SERVER])


def _wait_for(file: Path, supervisor: Supervisor) -> None:
    give_up = time.monotonic() + _SERVE_WITHIN_S
    while not file.exists():
        for end in supervisor.ended():
            if not end.expected and end.returncode != 0:
                raise ChildDied(str(end))
        if time.monotonic() > give_up:
            raise ChildDied(f"the server does not serve within {_SERVE_WITHIN_S:.0f} s")
        time.sleep(0.05)


# ---- for people --------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table; seconds are medians."""
    head = ("codec", "peers", "MB up", "load", "s", "best s", "CPU s", "coord.", "a peer", "raw s", "CPU s")
    figures = ("round_s", "best_round_s", "cpu_s", "coordinator_cpu_s", "peer_cpu_s", "raw_grpc_s", "raw_grpc_cpu_s")
    body = [
        (
            row["codec"],
            str(row["peers"]),
            f"{row['bytes_up_per_peer'] / 1e6:.1f}",
            f"{row['load_before']:.1f}",
            *(f"{row[name]:.2f}" for name in figures),
        )
        for row in rows
    ]
    return results_table(_title(rows), head, body, f"{_NOTE} The last two columns: raw gRPC. {figure_note(rows)}")


def picture(rows: Sequence[Row]) -> str:
    """Return the rows as an SVG file: CPU seconds of coordinator and peers as bars, wall seconds as diamonds."""
    groups = [
        Group(f"{row['codec']}, {row['peers']} peers", [_bar(row), _raw_bar(row)])
        for row in sorted(rows, key=lambda row: (row["peers"], -row["bytes_up_per_peer"]))
    ]
    key = {"s0": "coordinator, CPU", "s5": "all peers, CPU", "lone": "raw gRPC of the same bytes, CPU"}
    notes = (_NOTE, figure_note(rows))
    return bars_picture(_title(rows), notes, groups, "seconds", key, at="wall seconds")


_NOTE = "Mutual TLS, penalty on, journal with fsync; medians; CPU seconds are user + system of all processes in one exchange."


def _title(rows: Sequence[Row]) -> str:
    return f"One exchange of {rows[0]['parameters']:,} parameters"


def _bar(row: Row) -> PartedBar:
    coordinator, peers = row["coordinator_cpu_s"], row["cpu_s"] - row["coordinator_cpu_s"]
    parts = [Part(coordinator, "s0", f"coordinator {coordinator:.2f} CPU s"), Part(peers, "s5", f"peers {peers:.2f} CPU s")]
    return PartedBar("this project", parts, f"{row['cpu_s']:.2f} CPU s, {row['round_s']:.2f} s", row["round_s"])


def _raw_bar(row: Row) -> PartedBar:
    cpu_s, wall_s = row["raw_grpc_cpu_s"], row["raw_grpc_s"]
    return PartedBar("raw gRPC", [Part(cpu_s, "lone", f"{cpu_s:.2f} CPU s")], f"{cpu_s:.2f} CPU s, {wall_s:.2f} s", wall_s)
