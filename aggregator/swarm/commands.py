"""The verbs of `python -m aggregator.swarm VERB FOLDER`: options, help, and what is printed. What they do is in `operate`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from aggregator.swarm import operate
from aggregator.swarm.audit_commands import audit
from aggregator.swarm.standing import Report
from edit.command_line import SHORT_HELP, log_to_stderr
from edit.durable_files import check_outside
from edit.errors import ConfigError
from edit.plain_text import json_text, printable
from edit.view.again import WatchOption, show_status
from edit.view.overlaid import overlaid
from edit.web import check_installed
from editpb.invitation import MAX_TEXT_CHARS
from editpb.run_status import RunStatus

__all__ = ["app", "print_report"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=SHORT_HELP,
    help="Show and control a swarm, from the folder of a member. Orders need the authority's key (authority/ca.key) in it.",
)
app.add_typer(audit, name="audit")
Folder = Annotated[Path, typer.Argument(help="The folder of a member's host.")]
Beside = Annotated[list[Path] | None, typer.Option(help="Draw the curves of the run in this folder, too. Repeatable.")]


@app.command()
def found(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The peer_id of the founder.")],
    theta: Annotated[Path, typer.Argument(help="The first parameters, as safetensors; removed once the swarm is founded.")],
) -> None:
    """Found a swarm in the folder of its first member, which has run.toml, schema.json and peer.key; print the run's id."""
    from aggregator.swarm.founding import found as make

    typer.echo(make(folder, name, theta, now=time.time()))


@app.command()
def seek(
    folder: Annotated[Path, typer.Argument(help="The folder of a peer of a run with a coordinator.")],
    dht_peers: Annotated[list[str], typer.Option("--dht-peers", help="A libp2p node of the DHT to begin with. Repeatable.")],
) -> None:
    """Print HOST:PORT at which the coordinator of the peer's run says to be, a line each."""
    for address in operate.seek_coordinator(folder, tuple(dht_peers)):
        typer.echo(address)


@app.command()
def seek_enrolment(
    folder: Annotated[Path, typer.Argument(help="A folder for the files of the search.")],
    dht_peers: Annotated[list[str], typer.Option("--dht-peers", help="A libp2p node of the DHT to begin with. Repeatable.")],
) -> None:
    """Print HOST:PORT at which the invitation on stdin, to a run with a coordinator, may be redeemed, a line each."""
    for address in operate.seek_enrolment(folder, sys.stdin.readline(MAX_TEXT_CHARS + 1), tuple(dht_peers)):
        typer.echo(address)


@app.command()
def seek_members(
    folder: Annotated[Path, typer.Argument(help="A folder for the files of the search.")],
    dht_peers: Annotated[list[str], typer.Option("--dht-peers", help="A libp2p node of the DHT to begin with. Repeatable.")],
) -> None:
    """Print NAME=HOST:PORT of members of the swarm that the invitation on stdin is to, a line each."""
    for peer_id, addresses in operate.seek_members(folder, sys.stdin.readline(MAX_TEXT_CHARS + 1), tuple(dht_peers)).items():
        for address in addresses:
            typer.echo(f"{peer_id}={address}")


@app.command()
def invite(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The peer_id of the new member.")],
    role: Annotated[str, typer.Option(help="peer, or observer, which can only read.")] = "peer",
    hours: Annotated[float, typer.Option(help="How many hours the invitation is valid.", min=0.01, max=24 * 365)] = 24.0,
) -> None:
    """Print a single-use invitation, the authority's fingerprint, and where it may be redeemed, a line each."""
    from aggregator.swarm.admission import invite as make

    made = make(folder, name, role=role, hours=hours, now=time.time())
    typer.echo(f"{made.encode()}\n{made.fingerprint}\n{' '.join(made.enrol)}")


@app.command()
def observe(
    folder: Folder,
    seeds: Annotated[list[str], typer.Option("--seed", help="NAME=HOST:PORT of a member to begin with. Repeatable.")],
) -> None:
    """Complete the folder of an observer, which was enrolled: ask members for the run's settings."""
    from aggregator.swarm.host_folder import seeds_of
    from aggregator.swarm.watching import begin_to_observe

    begin_to_observe(folder, seeds_of(seeds))


@app.command()
def status(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    at: Annotated[str, typer.Option("--at", help="Ask the host of this member in place of the own one.")] = "",
    watch: WatchOption = False,
) -> None:
    """Show who leads, who owns and holds which part, which members are late, and why; from files if no host runs."""
    show_status(lambda: operate.status(folder, at=at), print_report, as_json=as_json, watch=watch)


@app.command()
def configured(folder: Folder) -> None:
    """Print how the whole swarm stands with its settings, as JSON; only the settings, if no host answers and none is kept."""
    from aggregator.swarm.watching import status_with_settings

    typer.echo(json_text(status_with_settings(folder).as_json()))


@app.command()
def kept_status(
    folder: Annotated[Path, typer.Argument(help="The folder of a coordinator, or of a member of a swarm.")],
) -> None:
    """Print how the whole run of a folder stands, also after its end, as JSON."""
    from aggregator.swarm.beside import kept_status as of

    typer.echo(json_text(of(folder).as_json()))


@app.command()
def watch(folder: Folder) -> None:
    """Show the swarm live: who leads, members, rounds, losses, events; until the run has finished, or Ctrl-C."""
    from aggregator.swarm.watching import SwarmWatch
    from edit.view.live import show

    asyncio.run(show(SwarmWatch(folder).statuses, Console(), time.time))


@app.command()
def report(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    beside: Beside = None,
) -> None:
    """Write the page of the swarm, as `web` shows it, to one file; where no host answers, from what this folder has kept."""
    check_installed()
    from aggregator.swarm.beside import runs_beside
    from aggregator.swarm.watching import whole_status
    from edit.web.page import write_page

    check_outside(out, (folder, *(beside or ())))
    told = overlaid(whole_status(folder), runs_beside(beside or ()))
    write_page(out, told)
    typer.echo(f"{out}: {told.phase}, outer step {told.outer_step} of {told.outer_steps}")


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The .safetensors file to write; with --format hf, the folder.")],
    form: Annotated[str, typer.Option("--format", help="safetensors, or hf: a folder for from_pretrained.")] = "safetensors",
    averaged: Annotated[bool, typer.Option("--averaged", help="Write the average that [average] keeps.")] = False,
) -> None:
    """Write the outer parameters that this member holds to a file, also while its host runs."""
    from aggregator.export import write_parameters, write_pretrained
    from aggregator.swarm.held import committed

    writers = {"safetensors": write_parameters, "hf": write_pretrained}
    if form not in writers:
        raise ConfigError(f"--format {form}: must be {' or '.join(writers)}")
    check_outside(out, (folder,))
    exported = writers[form](committed(folder), out, averaged=averaged)
    typer.echo(f"{out}: {exported.told}")


@app.command()
def web(
    folder: Folder,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page; port 0: any that is free.")] = "127.0.0.1:0",
    certificate: Annotated[
        Path | None, typer.Option(help="Elsewhere than on loopback, show this certificate (PEM) to browsers.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The key of --certificate (PEM).")] = None,
    beside: Beside = None,
) -> None:
    """Show the swarm as a page in the browser: the council, members, rounds, curves, events, settings. It has no orders."""
    check_installed()
    from aggregator.swarm.beside import runs_beside
    from aggregator.swarm.watching import SwarmWatch
    from edit.web.serve import EVERY_S, page_tls, serve_page

    tls = page_tls(listen, certificate, key, folder / "ca.pem")
    watching, others = SwarmWatch(folder, EVERY_S), runs_beside(beside or ())

    async def statuses() -> AsyncGenerator[RunStatus, None]:
        async with aclosing(watching.statuses()) as told:
            async for status in told:
                yield overlaid(status, others)

    serve_page(statuses, watching.identity, listen=listen, tls=tls, why_refused=watching.why_refused, say=typer.echo)


@app.command()
def evict(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The peer_id of the member.")],
    reason: Annotated[str, typer.Option(help="Shown to the member's operator, and kept.")] = "evicted by the operator",
) -> None:
    """Remove a member from the swarm permanently: its certificate, and each invitation for its name, is refused from now on."""
    typer.echo(operate.evict(folder, name, reason))


@app.command()
def pause(folder: Folder) -> None:
    """Pause the run until `resume`: abort the open rounds and open no others. Peers wait at their exchange."""
    typer.echo(operate.pause(folder))


@app.command()
def resume(folder: Folder) -> None:
    """Continue after `pause`, or after `drain` if outer steps are left."""
    typer.echo(operate.resume(folder))


@app.command()
def drain(folder: Folder) -> None:
    """End the run early: all parts end at one outer step, then every peer saves and exits."""
    typer.echo(operate.drain(folder))


@app.command()
def share_authority(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The peer_id of the member.")],
) -> None:
    """Give a member a copy of the authority's key, so that it lets others in and gives orders, too."""
    typer.echo(operate.share_authority(folder, name))


@app.command()
def new_authority(folder: Folder) -> None:
    """Replace the run's authority: who has only the key of the one before can do nothing with it any more."""
    typer.echo(operate.new_authority(folder))


@app.command()
def leave(folder: Folder) -> None:
    """Leave the swarm: the host hands over its parts and its vote, and ends. The command that started it rejoins."""
    typer.echo(operate.leave(folder))


@app.command()
def make_relay(
    folder: Folder,
    made: Annotated[Path, typer.Argument(help="The folder to make, for the relay's machine.")],
) -> None:
    """Make the folder of a relay: its key and certificate, and the authority's certificate."""
    typer.echo(operate.make_relay(folder, made))


@app.command()
def relay(
    folder: Annotated[Path, typer.Argument(help="A folder that `make-relay` made.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to bind.")] = "0.0.0.0:7700",
) -> None:
    """Pass bytes on between members that nobody can dial, and who dials them, until SIGINT or SIGTERM."""
    import asyncio

    from aggregator.swarm.relay import serve_relay

    log_to_stderr()
    asyncio.run(serve_relay(folder, listen))


@app.command()
def recover(folder: Folder, yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False) -> None:
    """Go on from this member alone, when the majority of the voters is gone for good. The others rejoin, with snapshots."""

    def confirm(plan: operate.Recovery) -> bool:
        for line in plan.lines:
            typer.echo(printable(line), err=True)
        try:
            return yes or typer.confirm("Recover from this member?", default=False, err=True)
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            raise ConfigError("stdin is not a terminal, so nobody can be asked; recover with: --yes") from None

    typer.echo(operate.recover(folder, confirm))


@app.command()
def rejoin(folder: Folder) -> None:
    """Put aside what a member of an earlier lineage has, after another has recovered, so that its host joins anew."""
    typer.echo(operate.rejoin(folder))


_STYLES = {"leads": "green", "here": "green", "late": "yellow", "away": "red"}


def print_report(console: Console, told: Report) -> None:
    """Print how the swarm stands, as wide as the console is."""
    console.print(Text(printable(told.run_id), "bold") + _words(f"  {told.phase}  {_leads(told)}"), soft_wrap=True)
    style = "red" if told.has_quorum is False else ""
    console.print(_words(f"voters: {told.quorum}{_lost(told)}", style), soft_wrap=True)
    console.print(_words(f"lineage {told.lineage}, term {told.term}, version {told.version}; from {told.source}", "dim"))
    if told.outer_chosen:
        console.print(_words(f"outer.preset = auto chose {told.outer_chosen}"), soft_wrap=True)
    if told.holders:
        console.print(_words(f"the authority's key: {', '.join(told.holders)}", "dim"), soft_wrap=True)
    console.print(
        _table(("part", "owner", "outer step", "state", "held by", "round"), [_part(told, row) for row in told.parts])
    )
    console.print(_table(("member", "votes", "state", "owns", "why"), [_member(row) for row in told.members]))
    for peer_id, reason in told.evicted.items():
        console.print(_words(f"{peer_id} is evicted: {reason}"), soft_wrap=True)
    for note in told.notes:
        console.print(_words(note, "yellow"), soft_wrap=True)


def _words(text: str, style: str = "") -> Text:
    """Return what others wrote as it stands: no markup, nothing that a terminal would obey."""
    return Text(printable(text), style)


def _leads(told: Report) -> str:
    return f"{told.leader} leads" if told.leader else "no leader is known"


def _lost(told: Report) -> str:
    return "" if told.has_quorum is not False else ": nothing is agreed on until others return; all train on alone"


def _table(headers: tuple[str, ...], rows: list[tuple[Text, ...]]) -> Table:
    columns = (Column(header, overflow="fold") for header in headers)  # never cut
    table = Table(*columns, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _part(told: Report, row: Mapping[str, Any]) -> tuple[Text, ...]:
    holders = "?" if row["holders"] is None else f"{len(row['holders'])} of {len(told.members)}"
    texts = (str(row["part"]), row["owner"], str(row["outer_step"]), row["digest"][:8], holders, row["waits"])
    return tuple(map(_words, texts))


def _member(row: Mapping[str, Any]) -> tuple[Text, ...]:
    owns = ", ".join(map(str, row["owns"]))
    return (
        _words(row["peer_id"]),
        _words("yes" if row["voter"] else "no"),
        _words(row["state"], _STYLES.get(row["state"], "")),
        _words(owns),
        _words(row["why"]),
    )
