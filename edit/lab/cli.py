"""`edit-lab`: the project at work on one machine. Owns: options and their help. Must not know: how a demo runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from edit.command_line import run_command
from edit.lab.chaos.command import run_chaos
from edit.lab.chaos.options import ChaosOptions
from edit.lab.demo.command import run_demo
from edit.lab.demo.plan import DemoOptions
from edit.lab.simulation.command import EXAMPLE, run_simulation

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See the project at work on one machine. Example: edit-lab demo",
)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(help="How many peers train together.")] = 4,
    steps: Annotated[int | None, typer.Option(help="Inner steps of each peer.", show_default="750; with --quick 100")] = None,
    seed: Annotated[int, typer.Option(help="Decides the initial parameters, the order of the data, what is held out.")] = 0,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Nobody is slow, killed or damaged.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results; wiped if an earlier demo wrote it.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Everything once, in less than a minute.")] = False,
) -> None:
    """Train one model across a coordinator and several peers, with faults on purpose, and report what it proved.

    Starts real daemons on loopback, enrols them with invitations, trains a small GPT on the source of Python's standard
    library, and writes results.json, metrics.jsonl, outer.safetensors, sample.txt and report.html to the --out folder.

    Example: edit-lab demo --quick --out runs/try
    """
    options = DemoOptions(peers=peers, steps=steps, seed=seed, faults=not no_faults, out=out, quick=quick)
    run_demo(options, Console())


@app.command(epilog=EXAMPLE)
def simulate(
    scenario: Annotated[Path | None, typer.Option(help="A TOML file; options and --set come on top of it.")] = None,
    peers: Annotated[int | None, typer.Option(help="How many peers.", show_default="100")] = None,
    rounds: Annotated[int | None, typer.Option(help="The run ends after so many commits.", show_default="1000")] = None,
    mode: Annotated[str | None, typer.Option(help="blocking or delayed (sync.mode).", show_default="blocking")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every draw.", show_default="0")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any key of a scenario; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the real round machine with thousands of peers in virtual time, and report what counted.

    Nothing sleeps and nothing is sent: the machine that decides about rounds, membership and deadlines in a real run decides
    here, too, about simulated peers with speeds, links, failures and returns drawn from distributions. Same seed, same result.
    """
    given = {"peers": peers, "sync.outer_steps": rounds, "sync.mode": mode, "seed": seed}
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    run_simulation(scenario, options + (settings or []), as_json, Console(stderr=True))


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(help="Decides every fault; the same seed and options give the same schedule.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long faults are made.")] = 1.0,
    peers: Annotated[int, typer.Option(help="How many peers train.")] = 3,
    sharded: Annotated[bool, typer.Option("--sharded", help="One of them is a torchrun replica of two ranks.")] = False,
    gap: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Folder for everything; wiped if an earlier run wrote it.")] = Path("runs/chaos"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a tiny model with real processes, do harm to them, and check from outside what must hold whatever happens.

    Kills and stops peers, ranks and the coordinator; cuts, silences, slows and disturbs links; fills the coordinator's disk.
    Digests of all peers are equal, no commit is lost or made twice, the run advances after every repair, memory stays flat,
    nobody ends by himself, no process is left behind. Exit code 1 when one of these does not hold; everything is then kept.

    Example: edit-lab chaos --seed 7 --minutes 5
    """
    options = ChaosOptions(seed=seed, seconds=60 * minutes, peers=peers, sharded=sharded, gap_s=gap, out=out)
    run_chaos(options, as_json, Console(stderr=True))


def main() -> None:
    """Entry point of `edit-lab`."""
    run_command("edit-lab", app)
