"""`edit-lab`: demo, simulation and chaos on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edit.command_line import run_command

__all__ = ["SIMULATE_EXAMPLE", "app", "main"]

SIMULATE_EXAMPLE = """Example: edit-lab simulate --peers 500 --rounds 200 --set compute.sigma=0.3 --set link.up_mbit=100

A file for --scenario (edit/lab/simulation/scenario.py explains every key):

\b
peers = 500
compute.sigma = 0.3                              # lognormal spread of the peers' speeds
classes = [{ share = 0.1, slower = 4.0 }]        # a tenth of the peers is four times slower
link.up_mbit = 100.0
faults.failures_per_hour = 0.05
size.parameters = 50e6
sync = { every = 100, outer_steps = 200, mode = "delayed", delay = 20 }      # as in run.toml
rounds.quorum = 300
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Try the project on one machine: a demo, a simulation of many peers, a run under random faults.\n\n"
    "Exit codes: 0 success, 1 a rule was broken (chaos), 2 wrong configuration, 70 a bug, 130 Ctrl-C.\n\n"
    "Example: edit-lab demo --quick",
)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(help="Number of peers.")] = 4,
    steps: Annotated[int | None, typer.Option(help="Inner steps of each peer.", show_default="750; with --quick 100")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial parameters, the data's order, the held-out files.")] = 0,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject no faults.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results; one of an earlier demo is wiped.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Take less than a minute.")] = False,
) -> None:
    """Train one model with a coordinator and several peers, inject faults, and write a report.

    Starts real daemons on loopback, enrols them with invitations, trains a small GPT on the source of Python's standard
    library, compares it with one peer alone, and writes results.json, metrics.jsonl, outer.safetensors, sample.txt and
    report.html to the --out folder.

    Example: edit-lab demo --quick --out runs/try
    """
    from rich.console import Console

    from edit.lab.demo.command import run_demo  # needs torch; --help answers without it
    from edit.lab.demo.plan import DemoOptions

    options = DemoOptions(peers=peers, steps=steps, seed=seed, faults=not no_faults, out=out, quick=quick)
    run_demo(options, Console())


@app.command(epilog=SIMULATE_EXAMPLE)
def simulate(
    scenario: Annotated[Path | None, typer.Option(help="Read this TOML file; options and --set override it.")] = None,
    peers: Annotated[int | None, typer.Option(help="Number of peers.", show_default="100")] = None,
    rounds: Annotated[int | None, typer.Option(help="End after so many commits.", show_default="1000")] = None,
    mode: Annotated[str | None, typer.Option(help="sync.mode: blocking or delayed.", show_default="blocking")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.", show_default="0")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any key of a scenario. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a run with thousands of peers in virtual time, and report its goodput.

    Uses the round machine, the membership and the peers' sessions of a real run. Speeds, links, failures and returns of the
    peers are drawn from distributions. The same seed gives the same result.
    """
    from rich.console import Console

    from edit.lab.simulation.command import run_simulation

    given = {"peers": peers, "sync.outer_steps": rounds, "sync.mode": mode, "seed": seed}
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    run_simulation(scenario, options + (settings or []), as_json, Console(stderr=True))


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(help="Seed of the faults; the same seed and options give the same schedule.")] = 0,
    minutes: Annotated[float, typer.Option(help="Inject faults for so many minutes.")] = 1.0,
    peers: Annotated[int, typer.Option(help="Number of peers.")] = 3,
    sharded: Annotated[bool, typer.Option("--sharded", help="Make one of them a torchrun replica of two ranks.")] = False,
    kills: Annotated[
        int, typer.Option(help="Only kill, so many times, whatever --minutes says.", show_default="faults of all kinds")
    ] = 0,
    hostile: Annotated[int, typer.Option(help="Number of hostile members beside them, fewer than there are peers.")] = 0,
    gap: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Folder for everything; one of an earlier run is wiped.")] = Path("runs/chaos"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a tiny model with real processes, inject random faults, and check the run's invariants from outside.

    Kills and stops peers, ranks and the coordinator; cuts, silences, slows down and disturbs links; fills the coordinator's
    disk. Checks that the digests of all peers are equal, no commit is lost or made twice, the run advances after every repair,
    memory stays flat, no process ends by itself, and none is left behind. Exit code 1 when one of these does not hold.

    With --hostile members that attack the run, another behaviour every ten seconds (python -m edit.lab.hostile --help lists
    them), also checks that honest peers stay in the commits and are never refused, that the coordinator's log and folder stay
    small, and that all parameters stay finite. The penalty is enabled, and a quorum has an honest peer in it.

    Example: edit-lab chaos --seed 7 --minutes 5 --hostile 1
    """
    from rich.console import Console

    from edit.lab.chaos.command import run_chaos
    from edit.lab.chaos.options import ChaosOptions

    options = ChaosOptions(
        seed=seed, seconds=60 * minutes, peers=peers, sharded=sharded, hostile=hostile, kills=kills, gap_s=gap, out=out
    )
    run_chaos(options, as_json, Console(stderr=True))


def main() -> None:
    """Entry point of `edit-lab`."""
    run_command("edit-lab", app)
