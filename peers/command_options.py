"""The options that several commands of `edit-peer` have, and where they log."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from edit.command_line import log_to_stderr
from edit.config.overrides import options_of
from edit.errors import ConfigError

if TYPE_CHECKING:
    from peers.training.options import PeerOptions

HomeOption = Annotated[Path, typer.Option("--home", help="The folder of this peer: key, certificate, addresses.")]
DataOption = Annotated[
    str,
    typer.Option(
        help="Text file, .jsonl file, folder of these, or token file (.bin uint16, .u32.bin uint32); or entry:NAME, a plug-in.",
        metavar="PATH",
    ),
]
DataOptionsOption = Annotated[
    list[str] | None,
    typer.Option("--data-option", help="KEY=VALUE for the plug-in that --data names. Repeatable.", metavar="KEY=VALUE"),
]
FieldOption = Annotated[
    str | None, typer.Option(help="The field that has the text, in each line of a .jsonl file.", show_default=False)
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: CUDA if available.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of torch. Default: chosen by torch.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        "--allow-model",
        help="Allow the plug-in that the run names entry:NAME: code of an installed package. Repeatable.",
    ),
]
TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        help="Log to tensorboard, wandb, mlflow or trackio, or to entry:NAME, a plug-in. Repeatable. See docs/plugins.md.",
        metavar="NAME",
    ),
]
TrackerOptionsOption = Annotated[
    list[str] | None,
    typer.Option("--tracker-option", help="NAME.KEY=VALUE for one of these trackers. Repeatable.", metavar="NAME.KEY=VALUE"),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        help="For an hf: model: a folder with config.json, and with the initial weights (.safetensors) if this peer founds the "
        "run."
    ),
]
MaxMbitOption = Annotated[
    float | None,
    typer.Option(
        help="Send at most this many megabits per second, of contributions, updates and parameters. Default: no bound.", min=0.1
    ),
]
MembersOption = Annotated[
    Path | None,
    typer.Option(
        help="A file with the line of each member's `edit-peer fingerprint`: in a run with secagg.enabled, share keys with "
        "these members only; with audit.enabled, stop when the log names another key of one. Of several lines of a name the "
        "last one is the present key."
    ),
]
DhtPeersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dht-peers",
        help="A libp2p node of the DHT in which to look for others: /ip4/192.0.2.1/tcp/4001/p2p/12D3... Repeatable.",
        metavar="ADDRESS",
    ),
]
BesideOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--beside",
        metavar="FOLDER",
        help="Draw the curves of another run, too: the folder of a member or an observer of it, or of its coordinator. "
        "Repeatable.",
    ),
]
HoursOption = Annotated[
    str | None,
    typer.Option(
        help="Take part in these hours only, by this machine's clock: 22:00-06:00; separate several by commas. Default: always."
    ),
]


def _training(
    data: DataOption,
    home: HomeOption = Path("edit-peer"),
    data_options: DataOptionsOption = None,
    field: FieldOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    metrics: Annotated[Path | None, typer.Option(help="Append metrics of the training to this file, as JSON lines.")] = None,
    throttle: Annotated[float, typer.Option(help="For tests: make each inner step this many times as long.")] = 1.0,
    fault: Annotated[str, typer.Option(help="For tests: nan@K,huge@L damages the contribution at outer step K or L.")] = "",
    allow: AllowOption = None,
    model_folder: FolderOption = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Split each matrix product over this many ranks (tensor parallelism); FSDP2 over the others.")
    ] = 1,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints, visible to all machines of this peer. Default: in --home.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Minimum outer steps between two checkpoints; 0 writes and reads none.")
    ] = 1,
    keep_checkpoints: Annotated[int, typer.Option(help="How many checkpoints to keep.")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start without a checkpoint; move existing ones aside.")] = False,
    new_data: Annotated[
        bool,
        typer.Option(
            "--new-data",
            help="If --data has changed since the checkpoint, begin at its start; keep the model and the optimizer.",
        ),
    ] = False,
    max_mbit: MaxMbitOption = None,
    trackers: TrackerOption = None,
    tracker_options: TrackerOptionsOption = None,
    hide_loss: Annotated[
        bool, typer.Option("--hide-loss", help="Do not report the training loss to the run: nobody outside this site sees it.")
    ] = False,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Train only with differential privacy (privacy.level = example), and stop before epsilon exceeds this, "
            "whatever the run allows."
        ),
    ] = None,
) -> PeerOptions:
    """Return what these options say. Raises ConfigError."""
    from edit.trackers.choose import TrackerChoice
    from peers.training.fault_injection import parse_faults
    from peers.training.options import PeerOptions

    return PeerOptions(
        home=home,
        data=data,
        data_options=options_of("--data-option", data_options or ()),
        jsonl_field=field,
        new_data=new_data,
        device=device,
        threads=threads,
        metrics=metrics,
        throttle=throttle,
        faults=parse_faults(fault),
        allowed=frozenset(allow or ()),
        model_folder=model_folder,
        tensor_parallel=tensor_parallel,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        fresh=fresh,
        max_mbit=max_mbit,
        trackers=TrackerChoice.of(trackers or (), tracker_options or (), frozenset(allow or ())),
        hide_loss=hide_loss,
        max_epsilon=max_epsilon,
    )


def trains(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a peer's training, and log lines; its first parameter, a PeerOptions, is what they say.

    typer reads the parameters off the signature: those of `_training`, then the command's own.
    """
    common, own = (inspect.signature(each).parameters for each in (_training, command))
    first = next(iter(own))
    hints = {
        name: hint
        for each in (_training, command)
        for name, hint in get_type_hints(each, localns={"PeerOptions": object}, include_extras=True).items()
        if name not in (first, "return")
    }

    def called(**given: Any) -> None:
        log_lines()
        options, hours = _training(**{name: given.pop(name) for name in common}), given.pop("hours")
        in_hours(hours, lambda: command(options, **given))

    named = {**common, **own, "hours": inspect.Parameter("hours", inspect.Parameter.KEYWORD_ONLY, default=None)}
    del named[first]
    hints["hours"] = HoursOption
    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__annotations__ = hints
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]) for name, each in named.items()]
    )
    return called


def in_hours(hours: str | None, work: Callable[[], object]) -> None:
    """Do the work of a command in the hours that its option says. Raises ConfigError."""
    from editpb.hours import Hours, keep_hours
    from peers.training.torchrun import launched

    if hours is not None and launched().size > 1:
        raise ConfigError(
            f"--hours {hours}: not with torchrun, whose ranks begin and end together; let a timer start and stop that"
        )
    keep_hours(Hours.parse(hours) if hours is not None else None, work)


def log_lines() -> None:
    """Log to stderr: everything at rank 0, only warnings at the other ranks of a replica."""
    from peers.training.torchrun import launched

    launch = launched()
    level, who = (logging.INFO, "") if launch.leads else (logging.WARNING, f"rank {launch.rank}: ")
    log_to_stderr(level, who)
