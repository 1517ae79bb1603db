"""`edit-peer`: join a run, train in it, or train alone for comparison."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from edit.command_line import run_command

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One peer of a training run. Example: edit-peer join INVITATION && edit-peer run --data my-text",
)

HomeOption = Annotated[Path, typer.Option("--home", help="This peer's folder: key, certificate, address.")]
DataOption = Annotated[Path, typer.Option(help="Text file, folder of text, or token file (.bin uint16, .u32.bin uint32).")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by itself: CUDA where there is one.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of torch; by itself: torch's choice.")]
ModelsOption = Annotated[
    list[str] | None, typer.Option(help="Allow entry:NAME, code of an installed package; may be repeated.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="For an hf: model: a folder with config.json; weights in it found the run if this peer does."),
]


@app.command()
def join(
    invitation: Annotated[str, typer.Argument(help="The line that `edit-coordinator invite` printed.")],
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Redeem an invitation: makes a key and stores the certificate. May be repeated if the answer was lost.

    Example: edit-peer join edit1.eyJ2Ijox... --home my-peer
    """
    from peers.identity.enrolment import join as redeem

    identity = redeem(invitation, home, time.time())
    typer.echo(f"{identity.peer_id} is a {identity.role} of run {identity.run_id}; folder {home}")
    if identity.role == "region":
        typer.echo(f"next: edit-peer region --home FOLDER_OF_THE_RUN_ABOVE --below {home}")
    else:
        typer.echo(f"next: edit-peer run --home {home} --data PATH")


@app.command()
def run(
    data: DataOption,
    home: HomeOption = Path("edit-peer"),
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    metrics: Annotated[Path | None, typer.Option(help="Append JSON lines about the training to this file.")] = None,
    throttle: Annotated[float, typer.Option(help="For trials: a step takes so many times as long.")] = 1.0,
    fault: Annotated[str, typer.Option(help="For trials: nan@K,huge@L damages the exchange of outer step K, L.")] = "",
    allow_model: ModelsOption = None,
    model_folder: FolderOption = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Ranks that share each matrix product; the others split batch and parameters (FSDP2).")
    ] = 1,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of this peer's checkpoints, shared by its machines; by itself: in --home.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Outer steps between checkpoints, at least; 0 neither keeps nor takes any.")
    ] = 1,
    keep_checkpoints: Annotated[int, typer.Option(help="How many checkpoints stay.")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; leave the checkpoints that are there aside.")] = False,
    serve_snapshots: Annotated[
        str | None, typer.Option(help="HOST:PORT at which members that join may take snapshots from this peer.")
    ] = None,
    advertise: Annotated[str | None, typer.Option(help="The host that they dial, where it is not that HOST.")] = None,
) -> None:
    """Train in the run until it finishes. Ctrl-C finishes the step, saves and says goodbye; twice: at once.

    Goes on from its newest checkpoint. Waits for a coordinator that is not there, now or later. When it exchanges (by steps, by
    time, at its own speed) and when it ends is the run's to say; drained, it saves and exits 0. Exit codes: 0 finished, drained
    or stopped, 2 configuration, 3 refused, 4 evicted.

    Example: edit-peer run --home my-peer --data ~/books --metrics metrics.jsonl

    One peer on eight GPUs, started again when a rank dies:
    torchrun --nproc-per-node 8 --max-restarts 100 -m peers run --home my-peer --data ~/books
    """
    from peers.daemon import PeerOptions, run_peer
    from peers.training.fault_injection import parse_faults

    _log_lines()
    run_peer(
        PeerOptions(
            home=home,
            data=data,
            device=device,
            threads=threads,
            metrics=metrics,
            throttle=throttle,
            faults=parse_faults(fault),
            allowed_models=frozenset(allow_model or ()),
            model_folder=model_folder,
            tensor_parallel=tensor_parallel,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            fresh=fresh,
            serve_snapshots=serve_snapshots,
            advertise=advertise,
        )
    )


@app.command()
def region(
    below: Annotated[Path, typer.Option(help="Folder of this region's identity in the run below it (--role region).")],
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Let a whole run, of one model, be one peer of a run above it: the second level between sites.

    --home is this region's peer of the run above. The run below is served and joined as any other; what it reaches goes up as
    one contribution, what the run above decides comes down with its next commit. A run below that is new takes the parameters
    of the run above. Started again at any time it goes on. Exit codes: 0 one of the runs has finished, or stopped, 2
    configuration, 3 refused, 4 evicted.

    Example: edit-peer region --home europe-above --below europe-below
    """
    from peers.regions.daemon import run_region

    _log_lines()
    run_region(home, below)


@app.command()
def alone(
    run: Annotated[Path, typer.Option(help="The run.toml whose model and inner optimizer are used.")],
    data: DataOption,
    steps: Annotated[int, typer.Option(help="Inner steps to take.", min=1)],
    out: Annotated[Path, typer.Option(help="Folder for alone.jsonl and model.safetensors.")],
    validation: Annotated[Path | None, typer.Option(help="Held-out data; its loss is measured at the end.")] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    allow_model: ModelsOption = None,
    model_folder: FolderOption = None,
) -> None:
    """Train by itself, without any exchange: what a peer of the run is compared with.

    Example: edit-peer alone --run run.toml --data ~/books --steps 1500 --out lone
    """
    from edit.config.run import RunConfig
    from peers.models.registry import build
    from peers.training.alone import AlonePlan, train_alone
    from peers.training.data import open_tokens, stream_seed
    from peers.training.trainer import choose_device, use_threads

    config = RunConfig.from_toml(run)
    use_threads(threads)
    limits = {"context": config.model.context, "vocabulary": config.model.vocabulary}
    plan = AlonePlan(
        config=config,
        data=open_tokens(data, **limits),
        data_seed=stream_seed(config.seed, "alone"),
        steps=steps,
        progress=out / "alone.jsonl",
        parameters=out / "model.safetensors",
        validation=None if validation is None else open_tokens(validation, **limits),
    )
    model = build(config.model, config.seed, frozenset(allow_model or ()), folder=model_folder)
    loss = train_alone(plan, model, device=choose_device(device), clock=time.perf_counter)
    typer.echo(f"{out}: {steps} steps" + ("" if loss is None else f", validation loss {loss:.4f}"))


def _log_lines() -> None:
    """Rank 0 speaks for its replica; the others only warn."""
    from peers.training.torchrun import launched

    launch = launched()
    level, who = (logging.INFO, "") if launch.leads else (logging.WARNING, f"rank {launch.rank}: ")
    logging.basicConfig(
        level=level, format=f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def main() -> None:
    """Entry point of `edit-peer`."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC is imported by the commands, after this
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # so is transformers; a run names no hub
    run_command("edit-peer", app)
