"""`edit-peer`: join a run or a swarm, train in it, connect a site's run to a run above, or train alone for comparison."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from edit.command_line import SHORT_HELP, exit_codes, loading, run_command, with_version
from edit.config.overrides import options_of
from edit.config.plugins import is_entry
from edit.durable_files import check_outside
from edit.errors import ConfigError
from edit.plain_text import json_text, printable, quoted
from edit.view.again import WatchOption, show_status
from edit.web import check_installed
from peers.command_options import (
    AllowOption,
    BesideOption,
    DataOption,
    DataOptionsOption,
    DeviceOption,
    DhtPeersOption,
    FieldOption,
    FolderOption,
    HomeOption,
    HoursOption,
    MaxMbitOption,
    MembersOption,
    ThreadsOption,
    in_hours,
    log_lines,
    trains,
)
from peers.swarm.cli import app as swarm
from peers.swarm.cli import beside_words, operate

if TYPE_CHECKING:
    from editpb.run_status import RunStatus
    from peers.training.options import PeerOptions

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=SHORT_HELP,
    help="Take part in a training run: join it with an invitation, then train.\n\n"
    f"{exit_codes(0, 1, 2, 3, 4, 69, 70, 130, 141, one='you answered no to a question')}\n\n"
    "Example: edit-peer join INVITATION --home my-peer && edit-peer run --home my-peer --data ~/books",
)
with_version(app, "edit-peer")
app.add_typer(swarm, name="swarm")
audit = typer.Typer(no_args_is_help=True, help="Verify what this peer has seen of its run's audit log (docs/audit.md).")
app.add_typer(audit, name="audit")


@app.command()
def join(
    invitation: Annotated[
        str,
        typer.Argument(help="The line that `edit-coordinator invite` printed, a file with it, or - for stdin."),
    ],
    home: HomeOption = Path("edit-peer"),
    dht_peers: DhtPeersOption = None,
) -> None:
    """Redeem an invitation: create a key, and store the certificate in --home. Repeat it if the answer was lost.

    An invitation is a secret: give it in a file or on stdin, because other users of this machine can see a command line. With
    --dht-peers, if the coordinator answers at none of the addresses in the invitation, join looks for it by the run's id.

    Example: edit-peer join - --home my-peer < invitation.txt
    """
    from editpb.invitation import Invitation
    from peers.identity.enrolment import invitation_text
    from peers.identity.seeking import redeem
    from peers.swarm.invitations import observe

    text, nodes = invitation_text(invitation, sys.stdin), tuple(dht_peers or ())
    invited = Invitation.decode(text)
    if invited.swarm is not None and invited.identity.role == "observer":
        observe(text, home, nodes)
        typer.echo(f"{invited.identity.peer_id} is an observer of run {invited.identity.run_id}; folder {home}")
        typer.echo(f"next: edit-peer swarm watch --home {quoted(home)}")
        typer.echo(f"or, as a page in the browser: edit-peer swarm web --home {quoted(home)}")
        return
    identity = redeem(text, home, nodes)
    article = "an" if identity.role[0] in "ao" else "a"
    typer.echo(f"{identity.peer_id} is {article} {identity.role} of run {identity.run_id}; folder {home}")
    if identity.role in ("observer", "operator"):
        typer.echo(f"next: edit-peer watch --home {quoted(home)}")
        typer.echo(f"or, as a page in the browser: edit-peer web --home {quoted(home)}")
    elif identity.role == "auditor":
        typer.echo(f"next: edit-peer audit fetch OUT --home {quoted(home)}")
    elif identity.role == "scorer":
        typer.echo(f"next: edit-peer score --home {quoted(home)} --data PATH")
    elif identity.role == "region":
        typer.echo(f"next: edit-peer region --home FOLDER_OF_THE_RUN_ABOVE --below {quoted(home)}")
    else:
        typer.echo(f"next: edit-peer run --home {quoted(home)} --data PATH")


@app.command()
@trains
def run(
    options: PeerOptions,
    serve_snapshots: Annotated[str | None, typer.Option(help="Serve snapshots to joining members at this HOST:PORT.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host by which members reach --serve-snapshots. Default: its HOST.")
    ] = None,
    dht_peers: DhtPeersOption = None,
    members: MembersOption = None,
) -> None:
    """Train in the run until it finishes.

    Resumes from the newest checkpoint. Waits while the coordinator cannot be reached. The run's configuration decides when it
    exchanges and when it ends. Ctrl-C or SIGTERM finishes the inner step, saves and leaves the run; a second one ends the
    process at once. Exit codes: 0 finished, drained or stopped, 2 wrong configuration, 3 refused, 4 evicted.

    Example: edit-peer run --home my-peer --data ~/books --metrics metrics.jsonl

    One peer on eight GPUs, restarted when a rank dies:
    torchrun --nproc-per-node 8 --max-restarts 100 -m peers run --home my-peer --data ~/books
    """
    with loading():
        from peers.daemon import run_peer
        from peers.identity.known_members import read_members

    nodes, known = tuple(dht_peers or ()), read_members(members) if members is not None else None
    run_peer(replace(options, serve_snapshots=serve_snapshots, advertise=advertise, dht_peers=nodes, members=known))


@app.command()
def fingerprint(home: HomeOption = Path("edit-peer")) -> None:
    """Print this peer's name and the hash of its public key: the other members put this line into the file of --members.

    Send the line by a channel that the run's operator does not control: by telephone, or signed mail. The key belongs to the
    peer's certificate, and stays the same when the certificate is renewed.

    Example: edit-peer fingerprint --home my-peer
    """
    from peers.identity import known_members
    from peers.identity.peer_folder import PeerFolder

    folder = PeerFolder(home)
    typer.echo(known_members.fingerprint(folder.load().identity.peer_id, folder.key()))


@app.command()
def consent(
    home: HomeOption = Path("edit-peer"),
    accept: Annotated[
        str | None, typer.Option(help="Consent to the configuration with this digest (sha256:...) without being asked.")
    ] = None,
) -> None:
    """Show the run's configuration, and consent to it: from then on this peer takes part only under that configuration.

    Run it while the peer does not run. It signs the consent with the peer's key and writes it to consent.json in --home. If the
    run's configuration changes later, the peer ends and says what has changed (exit code 2; 3 while it trains).
    docs/site-policy.md explains policy.toml, in which a site sets its own limits. Exit code 1: you did not consent.
    In a swarm, run it in the folder of a member that was founded or has joined: the settings lie there, and never change.

    Example: edit-peer consent --home my-peer
    """
    with loading():
        from peers.consent import ask_terms, consent_to

    terms = ask_terms(home, time.time())
    typer.echo("\n".join(terms.lines()))
    if accept is not None and accept != terms.digest:
        raise ConfigError(f"--accept {accept}: the run's configuration is {terms.digest}")
    if accept is None and not terms.refused:
        if not sys.stdin.isatty():
            raise ConfigError(f"stdin is not a terminal, so nobody can be asked; consent with: --accept {terms.digest}")
        typer.confirm(f"\nWhat leaves this site: edit-peer explain --home {quoted(home)}\nDo you consent?", abort=True)
    consent_to(terms)


@app.command()
def approve(
    digest: Annotated[
        str | None,
        typer.Argument(help="Approve the configuration with this digest (sha256:...) without being asked."),
    ] = None,
    home: HomeOption = Path("edit-peer"),
) -> None:
    """Show the changed configuration that waits for approvals, and approve it. For members named in governance.approvers.

    Any member may be an approver: a peer, an observer, an operator. The command shows what differs from the configuration in
    force, and signs with the key in --home. A change counts once it has governance.needed approvals. When the command ends, the
    approval is in the run's audit log (docs/site-policy.md). Exit code 1: you did not approve.

    Example: edit-peer approve --home observer
    """
    from peers.approve import approve as send
    from peers.approve import ask_change

    change = ask_change(home, time.time())
    typer.echo("\n".join(map(printable, change.lines())))
    if digest is not None and digest != change.digest:
        raise ConfigError(f"{digest}: {f'the configuration that waits is {change.digest}' if change.digest else 'none waits'}")
    if not change.digest:
        return
    if digest is None and change.is_approver:
        if not sys.stdin.isatty():
            command = f"edit-peer approve {change.digest} --home {quoted(home)}"
            raise ConfigError(f"stdin is not a terminal, so nobody can be asked; approve with: {command}")
        typer.confirm("\nDo you approve?", abort=True)
    typer.echo(printable(send(change)))


@audit.command()
def fetch(
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    home: HomeOption = Path("edit-peer"),
    step: Annotated[
        int, typer.Option(help="Also fetch what is needed to merge this outer step once more; 0: only the log.", min=0)
    ] = 0,
    aggregator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Fetch the log of this further aggregator of the run.", show_default="the coordinator"
        ),
    ] = "",
) -> None:
    """Fetch the run's audit log from its coordinator, as an auditor (`edit-coordinator invite NAME --role auditor`).

    In a run with several aggregators each keeps a log of its own fragments; this command names the others.

    The log must have the key in --home, and begin with the log that was fetched before. Exit code 3: it has another one, or
    does not; OUT is kept.

    `edit-coordinator audit verify --state OUT` then verifies it, and `audit replay --step N --state OUT` merges the outer step
    once more. With --step the copy has the contributions of that outer step: keep it as you would keep the data.

    Example: edit-peer audit fetch my-audit --step 12 --home auditor
    """
    from peers.audit_fetch import aggregators_in_log
    from peers.audit_fetch import fetch as fetch_to

    files, total, key = fetch_to(home, out, step, time.time(), aggregator)
    typer.echo(f"{out}: {files} files, {total:,} bytes")
    for number, address in enumerate(aggregators_in_log(out) if not aggregator else (), start=1):
        folder, at = quoted(f"{out}-{number}"), f" --step {step}" if step else ""
        words = f"edit-peer audit fetch {folder} --aggregator {address} --home {quoted(home)}{at}"
        typer.echo(f"aggregator {number} keeps a log, too: {words}")
    verb, held = f"replay --step {step}" if step else "verify", f" --key {quoted(key)}" if key else ""
    typer.echo(f"next: edit-coordinator audit {verb} --state {quoted(out)}{held}")


@audit.command()
def verify(
    home: HomeOption = Path("edit-peer"),
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A log's public key, as the operator gave it to you; may be repeated. Without it: the one in --home."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Verify the receipts in --home, with no connection: each head is signed, and its log begins with the one before.

    In a run with several aggregators each keeps a log, and those of all are verified.

    Another member has seen the same log if this command prints the same line `head` there, or if `edit-coordinator audit
    verify` finds both heads in one log. Exit code 3: a receipt does not fit, or the peer has stopped because one did not.

    Example: edit-peer audit verify --home my-peer
    """
    from peers.carriers.hub.kept_receipts import verify_all
    from peers.identity.peer_folder import PeerFolder

    if PeerFolder(home).of_swarm():
        raise ConfigError(
            f"{home}: its run is a swarm, whose logs lie there: edit-peer swarm audit verify --home {quoted(home)}"
        )
    logs = verify_all(home, key or ())
    if as_json:
        first, *further = (found.as_json() for found in logs)
        typer.echo(json_text({**first, "further": further} if further else first, indent=2))
        return
    for found in logs:
        steps = f"outer steps {found.first_step} to {found.last_step}"
        typer.echo(f"{found.key.name}: {found.receipts} receipts, {steps}: verified")
        typer.echo(f"head        {found.head.size} entries, root {found.head.root.hex()}")
        typer.echo(f"key         {found.key.text()}{'' if found.key.text() in (key or ()) else ' (kept in --home)'}")


@app.command()
def region(
    below: Annotated[Path, typer.Option(help="Folder of this region's identity in the run below.")],
    home: HomeOption = Path("edit-peer"),
    max_mbit: MaxMbitOption = None,
    hours: HoursOption = None,
    allow: AllowOption = None,
    members: MembersOption = None,
) -> None:
    """Make the run of a site one peer of another run, the run above.

    --home is the identity in the run above, --below the one in the site's run. The progress of the site's run is contributed to
    the run above; what the run above commits is added to the site's parameters with its next commit. A new site's run starts
    from the parameters of the run above. Restart the command at any time. Exit codes: 0 one of the runs has finished, or
    stopped, 2 wrong configuration, 3 refused, 4 evicted.

    Example: edit-peer region --home europe-above --below europe-below
    """
    with loading():
        from peers.identity.known_members import read_members
        from peers.regions.daemon import run_region

    log_lines()
    known = read_members(members) if members is not None else None
    in_hours(hours, lambda: run_region(home, below, max_mbit, frozenset(allow or ()), known))


@app.command()
def web(
    home: HomeOption = Path("edit-peer"),
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page; port 0: any that is free.")] = "127.0.0.1:0",
    certificate: Annotated[
        Path | None,
        typer.Option(help="The certificate of the page's server (PEM); only a loopback address needs none."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The key of --certificate (PEM).")] = None,
    beside: BesideOption = None,
) -> None:
    """Show the run as a page in the browser, with the certificate of an observer, or of any other member
    but an auditor.

    On loopback it prints a link that opens the page once; elsewhere a browser needs a member's certificate. In the
    folder of a swarm it is `edit-peer swarm web`. Needs: pip install 'edit-localsgd[web]'

    Example: edit-peer web --home observer
    """
    check_installed()
    from peers.identity.peer_folder import PeerFolder
    from peers.page import serve_members_page
    from peers.swarm.beside import runs_beside

    if PeerFolder(home).of_swarm():
        tls = [word for name, path in (("--certificate", certificate), ("--key", key)) if path for word in (name, path)]
        operate("web", home, "--listen", listen, *tls, *beside_words(beside))
    others = runs_beside(beside or ())
    serve_members_page(home, listen=listen, certificate=certificate, key=key, beside=others, say=typer.echo)


@app.command()
def status(
    home: HomeOption = Path("edit-peer"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    rounds: Annotated[int | None, typer.Option(help="How many of the last rounds to show. Default: 8.", min=0, max=200)] = None,
    watch: WatchOption = False,
) -> None:
    """Show the run, from anywhere, with the certificate of any member but an auditor.

    `watch` shows the same live, with curves. In the folder of a swarm it is `edit-peer swarm status`, which shows no rounds.

    Example: edit-peer status --home observer
    """
    from edit.view.status import print_status
    from peers.identity.peer_folder import PeerFolder
    from peers.watching import status_reader

    if PeerFolder(home).of_swarm():
        if rounds is not None:
            raise ConfigError(
                f"--rounds: the status of a swarm shows no rounds; see them with: edit-peer watch --home {quoted(home)}"
            )
        operate("status", home, *(["--json"] if as_json else []), *(["--watch"] if watch else []))

    def tables(console: Console, run: RunStatus) -> None:
        print_status(console, run, 8 if rounds is None else rounds)

    show_status(status_reader(PeerFolder(home)), tables, as_json=as_json, watch=watch)


@app.command()
def watch(home: HomeOption = Path("edit-peer")) -> None:
    """Show the run live, from anywhere, as `edit-coordinator watch` does, with the certificate of any member but an
    auditor.

    Ending it does nothing to the run. In the folder of a swarm it is `edit-peer swarm watch`.

    Example: edit-peer watch --home observer
    """
    from edit.view.live import show
    from peers.identity.peer_folder import PeerFolder
    from peers.watching import reached

    folder, turn = PeerFolder(home), itertools.count()
    if folder.of_swarm():
        operate("watch", home)
    asyncio.run(show(lambda: reached(folder, turn), Console(), time.time))


@app.command()
def report(
    home: HomeOption = Path("edit-peer"),
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    beside: BesideOption = None,
) -> None:
    """Write the page of the run, as `web` shows it, to one file, from anywhere, with the certificate of any member but
    an auditor.

    In the folder of a swarm it is `edit-peer swarm report`. Needs: pip install 'edit-localsgd[web]'

    Example: edit-peer report --home observer --out report.html
    """
    check_installed()
    from edit.view.overlaid import overlaid
    from edit.web.page import write_page
    from peers.identity.peer_folder import PeerFolder
    from peers.swarm.beside import runs_beside
    from peers.watching import read_status

    folder = PeerFolder(home)
    check_outside(out, (home, *(beside or ())))
    if folder.of_swarm():
        operate("report", home, "--out", out, *beside_words(beside))
    told = overlaid(asyncio.run(read_status(folder)), runs_beside(beside or ()))
    write_page(out, told)
    typer.echo(f"{out}: {told.phase}, outer step {told.outer_step} of {told.outer_steps}")


@app.command()
def explain(
    home: HomeOption = Path("edit-peer"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show what leaves this site: what this member sends, to whom, in what form, how often, who sees it and where it is kept.

    It follows the run's present configuration, which the coordinator tells; that of a swarm is in the folder. Sizes are those
    measured in the run so far.

    Example: edit-peer explain --home my-peer
    """
    from edit.view.explain import STAYS, print_leaving
    from peers.explaining import leaves_site

    identity, entries = leaves_site(home, time.time())
    if as_json:
        typer.echo(json_text({"sent": [entry.as_json() for entry in entries], "not_sent": list(STAYS)}, indent=2))
    else:
        print_leaving(Console(), identity.run_id, identity.peer_id, entries)


@app.command()
def score(
    data: Annotated[
        Path,
        typer.Option(
            help="Held-out data that no peer has: text file, .jsonl file, folder of these, or token file.", metavar="PATH"
        ),
    ],
    home: HomeOption = Path("edit-peer"),
    field: FieldOption = None,
    windows: Annotated[
        int, typer.Option(help="How many windows of model.context tokens a loss is measured on.", min=1, max=1 << 20)
    ] = 64,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    allow: AllowOption = None,
    model_folder: FolderOption = None,
) -> None:
    """Score each contribution by how much it lowers the loss on held-out data, in a run with robust.trust = "loss".

    Needs an invitation with --role scorer. After each commit it reads the contributions that were merged. For each, it measures
    the loss of the outer parameters before the commit, with and without half of the contribution, and reports the difference to
    the coordinator. The run does not wait for scorers. Ctrl-C ends the command.

    Example: edit-peer score --home judge --data held-out.txt
    """
    log_lines()
    with loading():
        from peers.scoring import score_run
        from peers.training.trainer import choose_device, use_threads

    use_threads(threads)
    score_run(
        home,
        data,
        field=field,
        windows=windows,
        device=choose_device(device),
        allowed=frozenset(allow or ()),
        folder=model_folder,
    )


@app.command()
def alone(
    run: Annotated[Path, typer.Option(help="The run.toml with the model and the inner optimizer.")],
    data: DataOption,
    steps: Annotated[int, typer.Option(help="How many inner steps to train.", min=1)],
    out: Annotated[Path, typer.Option(help="Write alone.jsonl and model.safetensors to this folder.")],
    validation: Annotated[Path | None, typer.Option(help="Measure the loss on this held-out data at the end.")] = None,
    data_options: DataOptionsOption = None,
    field: FieldOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    allow: AllowOption = None,
    model_folder: FolderOption = None,
) -> None:
    """Train without any exchange, as a baseline for the peers of a run.

    Example: edit-peer alone --run run.toml --data ~/books --steps 1500 --out lone
    """
    with loading():
        from edit.config.run import RunConfig
        from peers.models.registry import build
        from peers.training.alone import AlonePlan, train_alone
        from peers.training.data import open_tokens
        from peers.training.data_source import open_data
        from peers.training.options import check_data, data_request
        from peers.training.trainer import choose_device, use_threads

    config = RunConfig.from_toml(run)
    use_threads(threads)
    own, allowed = options_of("--data-option", data_options or ()), frozenset(allow or ())
    check_data(data, own, field, allowed)
    opened = partial(open_tokens, context=config.model.context, vocabulary=config.model.vocabulary, field=field)
    plan = AlonePlan(
        config=config,
        batches=open_data(data_request(config, "alone", data, own, field), data if is_entry(data) else "", allowed),
        steps=steps,
        progress=out / "alone.jsonl",
        parameters=out / "model.safetensors",
        validation=None if validation is None else opened(validation),
    )
    model = build(config.model, config.seed, allowed, folder=model_folder)
    loss = train_alone(plan, model, device=choose_device(device), clock=time.perf_counter)
    typer.echo(f"{out}: {steps} steps" + ("" if loss is None else f", validation loss {loss:.4f}"))


def main() -> None:
    """Entry point of `edit-peer`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is imported by the commands, after this; a run names no hub
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read with torch: threads that wait leave the CPU to other processes
    run_command("edit-peer", app)
