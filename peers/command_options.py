"""The options that several commands of `edit-peer` have, and where they log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from edit.command_line import log_to_stderr

HomeOption = Annotated[Path, typer.Option("--home", help="The folder of this peer: key, certificate, addresses.")]
DataOption = Annotated[Path, typer.Option(help="Text file, folder of text, or token file (.bin uint16, .u32.bin uint32).")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: CUDA if available.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of torch. Default: chosen by torch.")]
ModelsOption = Annotated[
    list[str] | None, typer.Option(help="Allow the model entry:NAME, which is code of an installed package. Repeatable.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="For an hf: model: a folder with config.json; if this peer founds the run, also the initial weights."),
]
MetricsOption = Annotated[Path | None, typer.Option(help="Append metrics of the training to this file, as JSON lines.")]
ThrottleOption = Annotated[float, typer.Option(help="For tests: make each inner step take so many times as long.")]
FaultOption = Annotated[str, typer.Option(help="For tests: nan@K,huge@L damages the contribution at outer step K or L.")]
CheckpointsOption = Annotated[
    Path | None, typer.Option(help="Folder of checkpoints, visible to all machines of this peer. Default: in --home.")
]
CheckpointEveryOption = Annotated[
    int, typer.Option(help="Minimum outer steps between two checkpoints; 0 writes and reads none.")
]
KeepCheckpointsOption = Annotated[int, typer.Option(help="Keep so many checkpoints.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start without a checkpoint; move existing ones aside.")]


def log_lines() -> None:
    """Log to stderr: everything at rank 0, only warnings at the other ranks of a replica."""
    from peers.training.torchrun import launched

    launch = launched()
    level, who = (logging.INFO, "") if launch.leads else (logging.WARNING, f"rank {launch.rank}: ")
    log_to_stderr(level, who)
