"""The commands `edit-peer swarm ...`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from edit.command_line import CALLED_AS, SHORT_HELP, loading, need_stdout
from edit.durable_files import check_outside
from edit.errors import ConfigError
from edit.view.again import WatchOption
from peers.command_options import (
    AllowOption,
    BesideOption,
    DhtPeersOption,
    HomeOption,
    HoursOption,
    MaxMbitOption,
    log_lines,
    trains,
)

if TYPE_CHECKING:
    from peers.swarm.membership import Place
    from peers.training.options import PeerOptions

__all__ = ["app", "beside_words", "operate"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=SHORT_HELP,
    help="Train without a coordinator: the members agree on each outer step, and any of them may die.\n\n"
    "Start a swarm on one machine, send each further member an invitation, and join with it. After a stop or a crash, "
    "repeat the same command: it continues where it was. `edit-peer explain` and `edit-peer consent` are for members of a "
    "swarm, too.\n\n"
    "Example: edit-peer swarm start run.toml --data ~/books --home a",
)

ListenOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT where this member serves; port 0: a free port, chosen once. Default: a free port."),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(help="The host name or address by which the other members reach this one; '' if they cannot."),
]
RelayOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A relay (see `relay`) by which the others reach this member if they cannot connect to it; '' if there is none.",
    ),
]
MetricsListenOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve /metrics (for Prometheus), /healthz and /readyz of this member's host there: plain HTTP without a "
        "password. Losses are included only with membership.share_losses. Default: none.",
    ),
]
InvitationArgument = Annotated[
    str | None,
    typer.Argument(
        help="The line that `start` or `invite` printed, a file with it, or - for stdin. Once joined it may be left out."
    ),
]


@app.command()
@trains
def start(
    options: PeerOptions,
    run_toml: Annotated[
        Path | None,
        typer.Argument(help="The run's settings, with a section swarm. Once founded it may be left out.", metavar="RUN_TOML"),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of this member.")] = "founder",
    listen: ListenOption = None,
    advertise: AdvertiseOption = None,
    relay: RelayOption = None,
    dht_peers: DhtPeersOption = None,
    metrics_listen: MetricsListenOption = None,
    invited: Annotated[
        str, typer.Option("--invite", help="At the first start, print an invitation for a member of this name; '': none.")
    ] = "second",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="SECTION.KEY=VALUE: found the swarm with this setting instead of RUN_TOML's. Repeatable."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Found the swarm with a published method's settings instead of RUN_TOML's: diloco, noloco, ...; "
            "`edit-lab compare --list` has them all. --set wins over them."
        ),
    ] = None,
) -> None:
    """Found a swarm, print an invitation for a second member, and train. After a stop or a crash, the same command continues.

    Other machines can join only with --advertise or --relay. The founder's folder also has the run's authority, which admits
    new members: keep it safe and secret. Ctrl-C or SIGTERM saves and leaves; a second one ends the process at once.
    Exit codes: 0 finished or stopped, 2 wrong configuration, 3 refused, 4 evicted.

    Example: edit-peer swarm start run.toml --data ~/books --home a --advertise training.example.org

    One member on eight GPUs, restarted when a rank dies:
    torchrun --nproc-per-node 8 --max-restarts 100 -m peers swarm start run.toml --data ~/books --home a
    """
    with loading():
        from peers.swarm.daemon import run_member
        from peers.swarm.membership import Founding, found, has_served, is_member

    home, served = options.home, False
    place = _place(options, listen, advertise, relay, dht_peers, metrics_listen)

    def prepare() -> list[str]:
        nonlocal served
        served = has_served(home)
        if not is_member(home):
            if run_toml is None:
                raise ConfigError(f"{home}: no swarm was founded in it; name its run.toml: edit-peer swarm start run.toml ...")
            arguments = place.arguments(home)
            founding = Founding(
                run_toml=run_toml,
                name=name,
                preset=preset,
                settings=tuple(settings or ()),
                allowed=options.allowed,
                model_folder=options.model_folder,
            )
            for what, text in found(home, founding).derived:
                typer.echo(f"{what:<11} {text}", err=True)
            return arguments
        _check_same(home, run_toml, preset, settings or ())
        return place.arguments(home)

    def serving() -> None:
        if invited and not served:
            _print_invitation(home, invited, 24.0)

    run_member(options, prepare, serving)


def _place(
    options: PeerOptions,
    listen: str | None,
    advertise: str | None,
    relay: str | None,
    dht_peers: list[str] | None,
    metrics_listen: str | None,
) -> Place:
    from peers.swarm.membership import Place

    nodes = tuple(dht_peers or ())
    return Place(
        listen=listen,
        advertise=advertise,
        relay=relay,
        dht_peers=nodes,
        max_mbit=options.max_mbit,
        allowed=options.allowed,
        metrics_listen=metrics_listen,
    )


def _check_same(home: Path, run_toml: Path | None, preset: str | None, settings: Sequence[str]) -> None:
    from peers.swarm.membership import same_run

    if not same_run(home, run_toml, preset, settings):
        raise ConfigError(
            f"{home}: this swarm has another run.toml, which cannot be changed; leave it out, or choose another --home"
        )


@app.command()
@trains
def join(
    options: PeerOptions,
    invitation: InvitationArgument = None,
    listen: ListenOption = None,
    advertise: AdvertiseOption = None,
    relay: RelayOption = None,
    dht_peers: DhtPeersOption = None,
    metrics_listen: MetricsListenOption = None,
) -> None:
    """Join a swarm with an invitation, and train. After a stop or a crash, the same command continues.

    An invitation is a secret, and is used once. Other users of this machine can see a command line, but not a file of yours, or
    stdin. Ctrl-C or SIGTERM saves and leaves; a second one ends the process at once.
    Exit codes: 0 finished or stopped, 2 wrong configuration, 3 refused, 4 evicted, 69 nobody reached.

    Example: edit-peer swarm join - --data ~/books --home b < invitation.txt

    One member on eight GPUs, restarted when a rank dies:
    torchrun --nproc-per-node 8 --max-restarts 100 -m peers swarm join invitation.txt --data ~/books --home b
    """
    with loading():
        from peers.swarm.daemon import run_member
        from peers.swarm.membership import enter

    place = _place(options, listen, advertise, relay, dht_peers, metrics_listen)
    text = _text_of(invitation)
    run_member(options, lambda: place.arguments(options.home, enter(options.home, text, place.dht_peers)))


@app.command()
def host(
    invitation: InvitationArgument = None,
    home: HomeOption = Path("edit-peer"),
    listen: ListenOption = None,
    advertise: AdvertiseOption = None,
    relay: RelayOption = None,
    dht_peers: DhtPeersOption = None,
    metrics_listen: MetricsListenOption = None,
    max_mbit: MaxMbitOption = None,
    hours: HoursOption = None,
    allow: AllowOption = None,
) -> None:
    """Run a member that does not train: it holds the model, votes, and can own parts. It needs no GPU.

    It ends when the run has finished, or at Ctrl-C or SIGTERM; the same command continues. It starts only if policy.toml in
    --home, where there is one, allows the run's settings (docs/site-policy.md).

    Example: edit-peer swarm host - --home c --advertise big-disk.example.org < invitation.txt
    """
    with loading():
        from peers.swarm.aggregator_process import command
        from peers.swarm.host_policy import check_host
        from peers.swarm.membership import Place, enter

    log_lines()
    text = _text_of(invitation)
    nodes = tuple(dht_peers or ())
    allowed = frozenset(allow or ())
    place = Place(
        listen=listen,
        advertise=advertise,
        relay=relay,
        dht_peers=nodes,
        max_mbit=max_mbit,
        hours=hours,
        allowed=allowed,
        metrics_listen=metrics_listen,
    )
    arguments = place.arguments(home, enter(home, text, nodes))
    check_host(home, arguments)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # a pipe there would mean that another process trains beside it
    os.dup2(nothing, 1)
    words = command(home, *arguments)
    logging.shutdown()  # the log is written by a thread
    os.execv(words[0], words)


@app.command()
def invite(
    name: Annotated[str, typer.Argument(help="The name of the new member.")],
    home: HomeOption = Path("edit-peer"),
    role: Annotated[str, typer.Option(help="peer, or observer, which can only read.")] = "peer",
    hours: Annotated[float, typer.Option(help="How many hours the invitation is valid.", min=0.01, max=24 * 365)] = 24.0,
) -> None:
    """Print a single-use invitation, one line on stdout. Send it to the new member over a channel you trust.

    A member redeems it with `join`, an observer with `edit-peer join`. Only a member with a copy of the
    authority's key can invite: the founder, and those that got one by `share-authority`. One of these must run and be
    reachable when the invitation is redeemed. Members whose names agree up to the first dot, such as acme.gpu1 and acme.gpu2,
    belong to one organisation. A robust rule counts it once.

    Example: edit-peer swarm invite university-b --home a
    """
    _print_invitation(home, name, hours, role)


@app.command()
def status(
    home: HomeOption = Path("edit-peer"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    watch: WatchOption = False,
    at: Annotated[str, typer.Option("--at", help="Ask the host of this member instead of the own one.", metavar="NAME")] = "",
) -> None:
    """Show who leads, who owns and holds which part, which members are late, and why.

    If the host of --home does not run, it shows what the files there say. `watch` shows the rounds and losses, too, live.

    Example: edit-peer swarm status --home a
    """
    more = [*(["--json"] if as_json else []), *(["--watch"] if watch else []), *(["--at", at] if at else [])]
    operate("status", home, *more)


@app.command()
def watch(home: HomeOption = Path("edit-peer")) -> None:
    """Show the swarm live: who leads, members, rounds, losses, events; until the run has finished, or Ctrl-C.

    It asks this member's host, or another's, and the owner of each part. It only reads: ending it does not affect the run.

    Example: edit-peer swarm watch --home a
    """
    operate("watch", home)


@app.command()
def report(
    home: HomeOption = Path("edit-peer"),
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    beside: BesideOption = None,
) -> None:
    """Write the page of the swarm, as `web` shows it, to one file; if no host answers, from what this folder has kept.

    Needs: pip install 'edit-localsgd[web]'

    Example: edit-peer swarm report --home a --beside another-run --out report.html
    """
    check_outside(out, (home, *(beside or ())))
    operate("report", home, "--out", out, *beside_words(beside))


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The .safetensors file to write, outside --home; with --format hf, the folder.")],
    home: HomeOption = Path("edit-peer"),
    form: Annotated[
        str,
        typer.Option("--format", help="safetensors: one file; hf: a folder for from_pretrained, of an hf: model."),
    ] = "safetensors",
    averaged: Annotated[
        bool,
        typer.Option("--averaged", help="Write the average that the run keeps by its section [average]."),
    ] = False,
) -> None:
    """Write the outer parameters that this member holds to a file, also while it trains, or after the end.

    With gossip these are the parameters of the last settling. A tensor that a model uses under two names, as a tied head, is
    written once: load such a file with strict=False. Buffers, as BatchNorm's statistics, are in it where peers train with
    `buffers="average"`; else each peer has its own.

    Example: edit-peer swarm export --home a --out model.safetensors
    """
    operate("export", home, "--out", out, "--format", form, *(["--averaged"] if averaged else []))


audit = typer.Typer(
    no_args_is_help=True,
    context_settings=SHORT_HELP,
    help="Verify, sum up, replay or copy the audit log that this member keeps of each part (docs/audit.md).",
)
app.add_typer(audit, name="audit")


@audit.command()
def verify(
    home: HomeOption = Path("edit-peer"),
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Leave out the signatures of contributions, which take nearly all of the time.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Verify the signatures of this many commits of each part, drawn at random.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Verify the logs in --home: every entry, its owner's signature, the signatures of contributions, the chain of digests.

    It needs no connection, and --home may be a folder that `export` has written. Two members have the same log of a part if
    their lines `head` are the same. The lines `owned` name the keys of owners: compare them with `edit-peer fingerprint`. In a
    member's folder a key that its owner was not enrolled for is a fault.

    Exit codes: 0 all logs are intact; 2 one is not, and the message names the entry.

    Example: edit-peer swarm audit verify --home a
    """
    more = [*(["--hashes"] if hashes else []), *(["--sample", sample] if sample else []), *(["--json"] if as_json else [])]
    operate("audit", "verify", home, *more)


@audit.command()
def usage(
    home: HomeOption = Path("edit-peer"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Verify the logs, and show what each peer contributed to each part by them.

    Example: edit-peer swarm audit usage --home a
    """
    operate("audit", "usage", home, *(["--json"] if as_json else []))


@audit.command()
def replay(
    home: HomeOption = Path("edit-peer"),
    step: Annotated[int | None, typer.Option("--step", min=1, help="The outer step.", show_default="the last one")] = None,
    part: Annotated[
        int | None, typer.Option("--part", min=0, help="The part.", show_default="all that this member has owned")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Merge the contributions behind a commit once more, and compare verdicts, update and parameters with the log.

    It needs audit.keep_contributions, and the folder of the member that owned the part at that outer step: nobody else has what
    the peers sent. It verifies the logs first, but not the signatures of other commits.

    Exit codes: 0 the result is what the log says; 2 it is not, and the message names what differs, or it cannot be done here,
    for one of the parts that this member owned or for the --part given.

    Example: edit-peer swarm audit replay --step 12 --part 0 --home a
    """
    more = [*(["--step", step] if step is not None else []), *(["--part", part] if part is not None else [])]
    operate("audit", "replay", home, *more, *(["--json"] if as_json else []))


@audit.command("export")
def export_logs(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Verify the logs and copy them, for somebody else to verify: give that folder to `verify` as --home.

    Example: edit-peer swarm audit export my-audit --home a
    """
    operate("audit", "export", home, out)


@app.command()
def web(
    home: HomeOption = Path("edit-peer"),
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page; port 0: any that is free.")] = "127.0.0.1:0",
    certificate: Annotated[
        Path | None, typer.Option(help="The certificate of the page's server (PEM); a loopback address needs none.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The key of --certificate (PEM).")] = None,
    beside: BesideOption = None,
) -> None:
    """Show the swarm as a page in the browser: who leads and owns what, members, rounds, curves, events, settings.

    It is a process of its own. On loopback it prints a link that opens the page once; elsewhere a browser needs a
    member's certificate. It only reads. Needs: pip install 'edit-localsgd[web]'

    Example: edit-peer swarm web --home a
    """
    more = [word for name, path in (("--certificate", certificate), ("--key", key)) if path for word in (name, path)]
    operate("web", home, "--listen", listen, *more, *beside_words(beside))


@app.command()
def evict(
    name: Annotated[str, typer.Argument(help="The name of the member, or one that was only invited.")],
    home: HomeOption = Path("edit-peer"),
    reason: Annotated[str, typer.Option(help="Shown to the member's operator, and kept.")] = "evicted by the operator",
) -> None:
    """Remove a member from the swarm permanently. Needs the run's authority in --home.

    Invitations for the name are void, too, also where nobody has used one. So it withdraws an invitation that was not used.

    Example: edit-peer swarm evict university-b --home a --reason "key lost"
    """
    operate("evict", home, name, "--reason", reason)


@app.command()
def pause(home: HomeOption = Path("edit-peer")) -> None:
    """Pause the run until `resume`. Needs the run's authority in --home.

    A run that drains is not paused: resume it first.

    Example: edit-peer swarm pause --home a
    """
    operate("pause", home)


@app.command()
def resume(home: HomeOption = Path("edit-peer")) -> None:
    """Continue after `pause`, or after `drain` if outer steps are left. Needs the run's authority in --home.

    With gossip a drained run cannot be resumed.

    Example: edit-peer swarm resume --home a
    """
    operate("resume", home)


@app.command()
def drain(home: HomeOption = Path("edit-peer")) -> None:
    """End the run early: all parts end at one outer step, then every member saves and exits. Needs the authority in --home.

    With gossip all peers settle on one model first.

    Example: edit-peer swarm drain --home a
    """
    operate("drain", home)


@app.command()
def share_authority(
    name: Annotated[str, typer.Argument(help="The name of the member.")],
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Give a member a copy of the authority's key: it can then invite members and give orders.

    Needs a copy in --home. `status` shows which members have one; `new-authority` makes all copies useless.

    Example: edit-peer swarm share-authority university-b --home a
    """
    operate("share-authority", home, name)


@app.command()
def new_authority(home: HomeOption = Path("edit-peer")) -> None:
    """Replace the authority's key: this member has the new one, and every copy of the old one becomes useless.

    Members get new certificates automatically; one that is away at that time must be invited again. Needs a copy in --home,
    and its host must run.

    Example: edit-peer swarm new-authority --home a
    """
    operate("new-authority", home)


@app.command()
def leave(home: HomeOption = Path("edit-peer")) -> None:
    """Leave the swarm: the host of this folder hands over its parts and its vote, and ends.

    To rejoin, repeat the command that started it.

    Example: edit-peer swarm leave --home c
    """
    operate("leave", home)


@app.command()
def make_relay(
    folder: Annotated[Path, typer.Argument(help="The folder to make; copy it to the relay's machine.")],
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Make the folder of a relay, with a key that is good for nothing else. Needs the run's authority in --home.

    Example: edit-peer swarm make-relay relay --home a
    """
    operate("make-relay", home, folder)


@app.command()
def relay(
    folder: Annotated[Path, typer.Argument(help="The folder that `make-relay` made.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to bind.")] = "0.0.0.0:7700",
) -> None:
    """Relay bytes between members that cannot be reached from outside, on a machine that all can reach. It cannot read them.

    A relay holds no model and is not a member. Members use it by their option --relay. It ends at Ctrl-C or SIGTERM.

    Example: edit-peer swarm relay relay --listen 0.0.0.0:7700
    """
    operate("relay", folder, "--listen", listen)


@app.command()
def recover(
    home: HomeOption = Path("edit-peer"),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Continue from this member alone, when more than half of the voters are permanently lost. The others then `rejoin`.

    Example: edit-peer swarm recover --home b
    """
    operate("recover", home, *(["--yes"] if yes else []))


@app.command()
def rejoin(home: HomeOption = Path("edit-peer")) -> None:
    """After `recover` at another member: move this member's earlier state and checkpoints aside, so that it can join again.

    Example: edit-peer swarm rejoin --home c
    """
    operate("rejoin", home)


def beside_words(paths: list[Path] | None) -> list[object]:
    """Return --beside as `operate` takes it: how a run with a coordinator stands is asked here, with its member's certificate,
    and handed on as an open file.

    Raises ConfigError, TransportError, and what that run answers.
    """
    from peers.swarm.beside import handed_on

    return [word for path in paths or () for word in ("--beside", handed_on(path) or path)]


def operate(*words: object) -> NoReturn:
    """Become the aggregator's command, which prints, asks and exits as it does."""
    from peers.swarm.aggregator_process import command

    if sys.stdout is not None:  # None: it was closed
        sys.stdout.flush()
    line = command(*words)
    os.execve(line[0], line, {**os.environ, CALLED_AS: "edit-peer swarm"})


def _print_invitation(home: Path, name: str, hours: float, role: str = "peer") -> None:
    from editpb.invitation import is_loopback
    from peers.swarm.aggregator_process import ask

    need_stdout()
    invitation, fingerprint, addresses = ask("invite", home, name, "--role", role, "--hours", hours)
    typer.echo(invitation)
    typer.echo(
        f"for {name}{'' if role == 'peer' else f' ({role})'}, single use, valid {hours:g} h; authority {fingerprint}", err=True
    )
    typer.echo(f"redeemed at {addresses}", err=True)
    if all(is_loopback(each.rpartition(":")[0]) for each in addresses.split()):
        typer.echo(
            "only this machine reaches these addresses; others need --advertise HOST or --relay HOST:PORT",
            err=True,
        )


def _text_of(invitation: str | None) -> str | None:
    from peers.identity.enrolment import invitation_text

    return invitation_text(invitation, sys.stdin) or None if invitation is not None else None  # of stdin it may be used up
