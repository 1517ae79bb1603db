"""How long a peer that was killed takes to be back over a slow link: by the updates that it missed, and by all parameters.

    .venv/bin/python benchmarks/rejoin.py                              # about 6 minutes at 10 Mbit/s
    .venv/bin/python benchmarks/rejoin.py --mbit 100 --cases int8:1

A real coordinator and two real peers, 51M parameters. One peer is killed, the other makes so many commits more, and is killed,
too: the run stands still. Then the first is started again behind a link of that rate (`edit.lab.link`), with its checkpoint,
and once more with `--fresh`, as it would be without one. Measured: seconds from its start, imports and all, until it has
joined with the run's outer parameters, the same digest both times; and the bytes that came down. Beside them what the link
needs for those bytes. One line of JSON for each case is appended to benchmarks/results/rejoin.jsonl.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from edit.config.run import RunConfig
from edit.lab.bench.measured_run import MeasuredRun
from edit.lab.bench.results import append_lines, circumstances
from edit.lab.joining import address_of, lead_through
from edit.lab.link import Link, LinkShape
from edit.lab.processes import terminated_as_interrupt
from peers.models.registry import build
from peers.training.checkpoint_files import last_scalars

RESULTS = Path(__file__).parent / "results" / "rejoin.jsonl"
MODEL = {"name": "builtin:gpt", "layers": 8, "heads": 7, "width": 728, "vocabulary": 256, "context": 32}
LATENCY_S = 0.02
LIMIT_S = 600.0
JOINED = re.compile(r"joined at outer step (\d+), digest (\w+)")


def settings(down: str) -> dict[str, Any]:
    """Of run.toml."""
    return {
        "name": "rejoin",
        "model": MODEL,
        "inner": {"batch_size": 1},
        "sync": {"every": 2, "outer_steps": 1000},
        "codec": {"up": "int8", "down": down},
        "rounds": {"start_peers": 2, "quorum": 1},
    }


def saved_step(home: Path) -> int:
    """Return the outer step of the peer's newest checkpoint; -1: it has none."""
    kept = last_scalars(home / "checkpoints")
    return int(kept["worker"]["outer_step"]) if kept is not None else -1


def committed(run: MeasuredRun) -> int:
    """Return the outer step of the run."""
    return max((int(line["outer_step"]) for line in run.lines() if line["kind"] == "round" and line["committed"]), default=0)


def back(run: MeasuredRun, name: str, mbit: float) -> tuple[float, int, int, str]:
    """Start the peer behind a slow link; return the seconds until it has joined, the bytes that came down, and where it is."""
    log = run.folder / "logs" / f"{name}.log"
    begins = log.stat().st_size
    shape = LinkShape(up_bits_per_s=1e6 * mbit, down_bits_per_s=1e6 * mbit, latency_s=LATENCY_S)

    def joined() -> re.Match[str] | None:
        return JOINED.search(log.read_bytes()[begins:].decode())

    with Link(address_of(run.state), shape) as link:
        lead_through(run.folder / name, link.port)
        began = time.monotonic()
        run.start(name)
        run.until(f"{name} joins", lambda: joined() is not None, LIMIT_S)
        seconds, (_, down) = time.monotonic() - began, link.carried_bytes
        run.kill(name)
    found = joined()
    assert found is not None
    return seconds, down, int(found[1]), found[2]


def measured(folder: Path, data: Path, down: str, behind: int, mbit: float) -> dict[str, Any]:
    """Return one case's figures."""
    with MeasuredRun(folder, settings(down), data) as run:
        home = folder / "late"
        run.enrol("late", LinkShape())
        run.enrol("other", LinkShape())
        run.start("late", "other")
        run.until("both train", lambda: saved_step(home) >= 1, LIMIT_S)
        run.kill("late")
        saved = saved_step(home)
        run.until("the other goes on", lambda: committed(run) >= saved + behind, LIMIT_S)
        run.kill("other")
        shutil.copytree(home, folder / "copy")
        by_updates = back(run, "late", mbit)
        shutil.rmtree(home)
        shutil.copytree(folder / "copy", home)
        run.options("late", "--fresh")
        by_snapshot = back(run, "late", mbit)
    if by_updates[2:] != by_snapshot[2:]:
        raise SystemExit(f"{down}: outer step and digest {by_updates[2:]} by updates, {by_snapshot[2:]} by the parameters")
    row: dict[str, Any] = {"down": down, "behind": by_updates[2] - saved, "outer_step": by_updates[2]}
    for name, (seconds, received, *_) in (("updates", by_updates), ("parameters", by_snapshot)):
        row |= {f"{name}_s": round(seconds, 1), f"{name}_bytes": received}
        row[f"{name}_link_s"] = round(8e-6 * received / mbit, 1)
    return row


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=10.0, help="of the link, in each direction")
    parser.add_argument(
        "--cases", nargs="+", default=["int8:1", "int4:3", "topk:3"], metavar="CODEC:STEPS", help="of updates; steps behind"
    )
    parser.add_argument("--label", default="", help="is written beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    parameters = sum(
        each.numel() for each in build(RunConfig.from_mapping(settings("int8")).model, 0, frozenset()).parameters()
    )
    print(
        f"{parameters / 1e6:.1f}M parameters, {asked.mbit:g} Mbit/s; seconds until it has joined, MB down, seconds of the link"
    )
    print(f"{'down':>5} {'steps behind':>12} {'by updates':>24} {'by all parameters':>24}")
    with tempfile.TemporaryDirectory() as scratch, terminated_as_interrupt():
        data = Path(scratch) / "text.py"
        data.write_bytes(Path(argparse.__file__).read_bytes())
        for number, (down, _, behind) in enumerate(case.partition(":") for case in asked.cases):
            begins = circumstances(asked.label)
            row = measured(Path(scratch) / str(number), data, down, int(behind), asked.mbit)
            append_lines(asked.out, [{**begins, "parameters": parameters, "mbit": asked.mbit, **row}])
            shown = (
                f"{row[f'{name}_s']:>7} s {row[f'{name}_bytes'] / 1e6:>6.1f} {row[f'{name}_link_s']:>7}"
                for name in ("updates", "parameters")
            )
            print(f"{down:>5} {row['behind']:>12} {' '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
