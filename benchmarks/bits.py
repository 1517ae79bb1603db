"""Validation loss against bits on the wire, by codec of the contributions; paired by seed with fp32 runs.

    .venv/bin/python benchmarks/bits.py                      # 4 peers, 1200 steps, 3 seeds: hours on 2 cores; may be stopped
    .venv/bin/python benchmarks/bits.py --steps 300 --peers 2 --seeds 1 --settings int4 "top-k 64"
    .venv/bin/python benchmarks/bits.py --print              # only the table of what is recorded
    .venv/bin/python benchmarks/bits.py --steps 600 --every 5 --peers 2 --settings "top-1 of 32, step ahead"
    .venv/bin/python benchmarks/bits.py --print --plot docs/bits.svg    # and a picture of all that is recorded

Peers, text and inner settings are those of benchmarks/quality.py: the built-in GPT (0.8M parameters) on the standard library's
source, an exchange every H inner steps, in this process. Loss: nats per byte of the outer parameters on held-out files. Bits
are counted: the bytes of all payloads, over parameters, contributions and outer steps; beside them those of the updates, and
what a peer sends for each parameter in the whole run. Updates are bf16, fp32 in the fp32 runs, or as the setting's name says.

Each run is a process of its own and appends one line of JSON to benchmarks/results/bits.jsonl; runs that are there for the same
setting, peers, steps, H and seed are not made again. The gap is the loss less that of an fp32 run with the same seed, in
percent of it: of the one with the same outer optimizer, and of the best outer optimizer in fp32, by its mean over the seeds.
"owners killed" is a swarm in which every five outer steps another member owns all parts: it has the whole state but what the
owner's records left out (nothing, where they are bf16 or fp32), and is compared with a coordinator. Intervals: 95 %,
by Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # before site-packages: opacus installs a package `benchmarks`, too

from benchmarks.quality import trainer
from edit.config.run import CodecConfig, InnerConfig, ModelConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.lab.bench.apart import make_apart
from edit.lab.bench.results import Row, append_lines, one_line, read_lines, write_picture
from edit.lab.compare.corpus import whole_text
from edit.lab.compare.intervals import half_width
from edit.lab.compare.loop import Counting, Peer, enter, step_together
from edit.local import LocalRun
from edit.merging.outer_state import OuterState
from edit.view.charts import Point, points_picture
from peers.models.gpt import GPT
from peers.training.data import evaluate
from peers.training.trainer import use_threads

RESULTS = Path(__file__).parent / "results" / "bits.jsonl"
NESTEROV = OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6)
PLAIN = OuterConfig(optimizer="sgd", lr=1.0)  # as SparseLoCo: without outer momentum


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What runs have in common that are compared with each other. every: H."""

    peers: int
    steps: int
    every: int


@dataclass(frozen=True, slots=True)
class Setting:
    """Codecs and an outer optimizer. base: the setting that the loss is compared with."""

    codec: CodecConfig
    outer: OuterConfig = NESTEROV
    base: str = "fp32"
    takeover: int = 0  # every so many outer steps another member of a swarm owns all parts; 0: a coordinator


def _up(text: str, decay: float = 1.0, down: str = "bf16") -> CodecConfig:
    return CodecConfig(up=text, down=down, up_decay=decay)


def _ahead(text: str) -> CodecConfig:
    return CodecConfig(up=text, down="bf16", up_residual="local")


EXACT = CodecConfig(up="fp32", down="fp32")
RECORDED = CodecConfig(up="int8", down="int8", record="int8")
SETTINGS: dict[str, Setting] = {
    "fp32": Setting(EXACT),
    "bf16": Setting(_up("bf16")),
    "int8": Setting(_up("int8")),
    "int8, record int8": Setting(RECORDED),
    "int8, record int8, owners killed": Setting(RECORDED, base="int8, record int8", takeover=5),
    "int8, record fp32": Setting(CodecConfig(up="int8", down="bf16", record="fp32")),
    "int4": Setting(_up("int4")),
    "int4 both ways": Setting(_up("int4", down="int4")),
    "e3m0": Setting(_up("e3m0")),
    "e3m0 both ways": Setting(_up("e3m0", down="e3m0")),
    "2-bit": Setting(_up("stat2")),
    "2-bit, range 6": Setting(_up("stat2:range=6")),
    "2-bit without feedback": Setting(_up("stat2", 0.0)),
    "sign": Setting(_up("sign")),
    "fp32, no momentum": Setting(EXACT, PLAIN, "fp32, no momentum"),
    "top-k 128": Setting(_up("topk:k=128", 0.95), PLAIN, "fp32, no momentum"),
    "top-k 64": Setting(_up("topk", 0.95), PLAIN, "fp32, no momentum"),
    "top-k 64, decay 1": Setting(_up("topk"), PLAIN, "fp32, no momentum"),
    "top-k 128, step ahead": Setting(_ahead("topk:k=128")),
    "top-k 64, step ahead": Setting(_ahead("topk")),
    "top-1 of 32, step ahead": Setting(_ahead("top1")),
    "top-1 of 32, step ahead, no momentum": Setting(_ahead("top1"), PLAIN, "fp32, no momentum"),
    "sdd": Setting(_up("sdd")),
    "sdd, no momentum": Setting(_up("sdd"), PLAIN, "fp32, no momentum"),
    "sdd, step ahead": Setting(_ahead("sdd")),
    "sdd, step ahead, no momentum": Setting(_ahead("sdd"), PLAIN, "fp32, no momentum"),
    "top-k 64 without feedback": Setting(_up("topk", 0.0), PLAIN, "fp32, no momentum"),
}


def one(name: str, shape: Shape, seed: int) -> dict[str, Any]:
    """Train one setting in this process, the peers in turn."""
    use_threads(1)
    began, (text, held_out), setting = time.monotonic(), whole_text(seed), SETTINGS[name]
    peers, steps = shape.peers, shape.steps
    config = RunConfig(
        seed=seed,
        sync=SyncConfig(every=shape.every, outer_steps=steps // shape.every),
        outer=setting.outer,
        penalty=PenaltyConfig(enabled=False),
        codec=setting.codec,
    )
    names = [f"peer-{i}" for i in range(peers)]
    run = LocalRun(config, names)
    trainers = [trainer(text, InnerConfig(), steps, seed, stream=seed + 1 + i) for i in range(peers)]
    counted = [Counting(run.collective(name)) for name in names]
    workers = enter(trainers, counted, config)
    taken = 0

    def take_over(peer: Peer) -> None:
        nonlocal taken
        if setting.takeover and peer is workers[-1] and run.state.outer_step >= taken + setting.takeover:
            taken, run._state = run.state.outer_step, taken_over(run.state)

    step_together(workers, lambda peer: peer.steps >= steps, after=take_over)
    for peer in workers:
        peer.worker.synchronize()
    model = GPT(ModelConfig(), seed)
    model.load_state_dict(workers[0].worker.outer_state_dict(), strict=False)
    loss, outer_steps = float(evaluate(model, held_out, ModelConfig().context, 64)), run.state.outer_step
    parameters = run.state.schema.numel
    return {
        "setting": name,
        **asdict(shape),
        "seed": seed,
        "loss": loss if math.isfinite(loss) else None,
        "outer_steps": outer_steps,
        "bits_up": round(8 * sum(c.sent for c in counted) / (parameters * peers * outer_steps), 4),
        "bits_down": round(8 * counted[0].received / (parameters * len(counted[0].steps)), 4),
        "s": round(time.monotonic() - began),
    }


def taken_over(state: OuterState) -> OuterState:
    """What another member of a swarm has when it takes over: all but what the owner's records left out."""
    tensors = {name: each.clone() for name, each in state.to_tensors().items() if not name.startswith("unrecorded.")}
    return OuterState.restore(state.schema, state.config, tensors, state.metadata())


def make(
    missing: Sequence[tuple[str, int]], shape: Shape, results: Path, processes: int, script: str = __file__
) -> list[tuple[str, int]]:
    """Train settings with seeds, each in a process of its own; append each row as it is there. Return what failed.

    script: whose option --only trains one.
    """
    failed = []
    sizes = [word for key, value in asdict(shape).items() for word in (f"--{key}", str(value))]

    def command(job: tuple[str, int]) -> tuple[Sequence[str], str]:
        return [sys.executable, script, "--only", job[0], str(job[1]), *sizes], ""

    def each(job: tuple[str, int], row: Row | Exception) -> None:
        if isinstance(row, Exception):
            failed.append(job)
            print(f"{job[0]}, seed {job[1]}: failed: {one_line(row)}", file=sys.stderr)
        else:
            append_lines(results, [row])

    make_apart(missing, command, processes, each)
    return failed


Results = dict[tuple[str, int], dict[str, Any]]
"""Lines of a results file by (setting, seed)."""


def recorded(file: Path) -> dict[Shape, Results]:
    """What a results file has, by the shape of the runs. Lines without `every` are from when H was always 30."""
    found: dict[Shape, Results] = {}
    for each in read_lines(file):
        shape = Shape(each["peers"], each["steps"], each.get("every", 30))
        found.setdefault(shape, {})[each["setting"], each["seed"]] = each
    return found


def gaps(results: Results, name: str, base: str) -> list[float]:
    """Return by how much the loss of `name` is above that of `base` with the same seed, in percent, where both are known."""
    pairs = [
        (each["loss"], results.get((base, seed), {}).get("loss")) for (of, seed), each in sorted(results.items()) if of == name
    ]
    return [100 * (loss / other - 1) for loss, other in pairs if loss is not None and other is not None]


def best(results: Results) -> str:
    """Return the setting without codecs, of those here, of the least loss over the seeds that all of these have."""
    exact = {name for name, _ in results if SETTINGS[name].codec == EXACT}
    seeds = set.intersection(*({seed for of, seed in results if of == name} for name in exact)) if exact else set()

    def loss(name: str) -> float:
        losses = [results[name, seed]["loss"] for seed in seeds]
        return statistics.fmean(losses) if losses and None not in losses else math.inf

    return min(sorted(exact), key=loss, default="fp32")


def show(results: Results) -> None:
    """Print the table: means over the seeds, and the gaps with their intervals."""
    reference = best(results)
    print(f"the best fp32: {reference}")
    head = f"{'setting':<28} {'bits up':>8} {'down':>7} {'run':>6} {'seeds':>5} {'loss':>8}"
    print(f"{head} {'gap to fp32, %':>18} {'to the best fp32, %':>19}")
    for name, setting in SETTINGS.items():
        runs = [each for (of, _), each in results.items() if of == name]
        if not runs:
            continue
        losses = [each["loss"] for each in runs]
        loss = f"{statistics.fmean(losses):8.4f}" if None not in losses else "diverged"
        up, down, whole = runs[0]["bits_up"], runs[0]["bits_down"], runs[0]["bits_up"] * runs[0]["outer_steps"]
        both = (_interval(gaps(results, name, base)) for base in (setting.base, reference))
        print(f"{name:<28} {up:>8.3f} {down:>7.3f} {whole:>6.1f} {len(runs):>5} {loss:>8} {next(both):>18} {next(both):>19}")


def _interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):+.3f}" + (f" +- {half_width(values):.3f}" if len(values) > 1 else "")


def picture(found: dict[Shape, Results]) -> str:
    """Return the gaps to the best fp32 over the bits as an SVG file, a colour for each shape of runs."""
    points: list[Point] = []
    key: dict[str, str] = {}
    for shape, results in sorted(found.items()):
        reference, style = best(results), f"s{len(key) % 6}"
        for name in SETTINGS:
            values = gaps(results, name, reference)
            if len(values) > 1 and name != reference:
                bits = next(each["bits_up"] for (of, _), each in results.items() if of == name)
                points.append(Point(name, bits, statistics.fmean(values), half_width(values), style))
                key[style] = f"{shape.peers} peers, H {shape.every}, {shape.steps // shape.every} outer steps"
    notes = [
        "GPT of 0.8M parameters; loss of the outer parameters on held-out text, above the best fp32 run of the same seed;",
        "mean over the seeds and 95 % interval. Bits of a contribution, counted, for each parameter; updates are bf16.",
    ]
    limits = {0.1: "0.1 %", 0.5: "0.5 %"}
    return points_picture("Loss against bits", notes, points, "bits", "gap, %", key, limits, linear=0.1)


def main() -> None:
    """Make the runs that are missing; print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="a multiple of --every")
    parser.add_argument("--every", type=int, default=30, metavar="H", help="inner steps between two exchanges (30)")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", help=f"only these, and what they are compared with: {', '.join(SETTINGS)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, metavar="N", help="runs at a time (one per core)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--print", action="store_true", help="make no run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of all results")
    parser.add_argument("--only", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = Shape(arguments.peers, arguments.steps, arguments.every)
    if arguments.only:
        print(json.dumps(one(arguments.only[0], shape, int(arguments.only[1]))))
        return
    if shape.every < 1 or shape.steps % shape.every:
        parser.error(f"--steps {shape.steps}: must be a multiple of --every {shape.every}")
    if unknown := set(arguments.settings or ()) - set(SETTINGS):
        parser.error(f"--settings {sorted(unknown)[0]!r}: known are {', '.join(map(repr, SETTINGS))}")
    chosen = set(arguments.settings or SETTINGS)
    chosen |= {SETTINGS[name].base for name in chosen}
    done = recorded(arguments.results).get(shape, {})
    missing = [
        (name, seed) for seed in range(arguments.seeds) for name in SETTINGS if name in chosen and (name, seed) not in done
    ]

    failed = [] if arguments.print else make(missing, shape, arguments.results, arguments.processes)
    found = recorded(arguments.results)
    show(found.get(shape, {}))
    if arguments.plot:
        write_picture(arguments.plot, picture(found))
    if failed:
        sys.exit(f"{len(failed)} of {len(missing)} runs failed")


if __name__ == "__main__":
    main()
