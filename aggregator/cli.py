"""`edit-coordinator`: create a run, serve it, invite members, show and control it, export its model."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aggregator.audit_commands import audit
from aggregator.run_template import template
from aggregator.security.authority import Authority
from aggregator.storage.configurations import configurations_of
from aggregator.storage.log_key import open_log_key
from aggregator.storage.state_folder import StateFolder, address_of, refuse_swarm
from edit.command_line import SHORT_HELP, exit_codes, loading, log_to_stderr, need_stdout, run_command, with_version
from edit.config.gaussian import gaussian_epsilon
from edit.config.overrides import with_settings
from edit.config.presets import with_preset, without_ineffective
from edit.config.run import RunConfig
from edit.durable_files import check_outside
from edit.errors import ConfigError, TransportError
from edit.plain_text import json_text, quoted, reason_of
from edit.plugins import pin
from edit.trust.privacy import most_steps
from edit.view.again import WatchOption, show_status
from edit.view.status import print_members, print_status
from edit.web import check_installed
from editpb.audit_log import log_origin
from editpb.invitation import endpoint_of, is_loopback
from editpb.run_status import RunStatus

if TYPE_CHECKING:
    from aggregator.operator_client import Answers

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=SHORT_HELP,
    help="Coordinate a training run: create it, serve it, invite peers, control it, export the model.\n\n"
    f"{exit_codes(0, 2, 3, 4, 69, 70, 130, 141)}\n\n"
    "Example: edit-coordinator init --state my-run && edit-coordinator serve --state my-run",
)
app.add_typer(audit, name="audit")
with_version(app, "edit-coordinator")

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="SECTION.KEY=VALUE: write this setting into run.toml, as if it had been edited. Repeatable."),
]
State = Annotated[Path, typer.Option("--state", help="The folder of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Beside = Annotated[
    list[Path] | None,
    typer.Option(
        "--beside",
        metavar="FOLDER",
        help="Draw the curves of another run, too: the folder of a coordinator, or of a member of a swarm. Repeatable.",
    ),
]


Allow = Annotated[
    list[str] | None,
    typer.Option(
        help="Allow the plug-in NAME: what run.toml names entry:NAME, code of an installed package, whose version and hash are "
        "then written into run.toml. Repeatable."
    ),
]


@app.command()
def init(
    state: State = Path("edit-run"),
    config: Annotated[Path | None, typer.Option(help="Copy this run.toml. Default: write a commented one.")] = None,
    peers: Annotated[
        int | None,
        typer.Option(
            help="How many peers will train: the first round waits for all, each round for half of them "
            "(start_peers and quorum in run.toml). Default: 1; on a terminal you are asked.",
            min=1,
            max=1 << 20,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Begin with a published method's settings: diloco, edit, ...; `edit-lab compare --list` has them all."
        ),
    ] = None,
    settings: SetOption = None,
    allow: Allow = None,
) -> None:
    """Create a run: its folder, run.toml, certificate authority and keys.

    Example: edit-coordinator init --state my-run --peers 2 --set sync.every=100 --set codec.up=int4
    """
    if config is not None and peers is not None:
        raise ConfigError("--peers has no effect with --config; write rounds.start_peers and rounds.quorum into that file")
    if config is not None and preset is not None:
        raise ConfigError("--preset has no effect with --config; write the preset's settings into that file")
    if config is None and peers is None and _on_a_terminal() and not StateFolder.exists(state):
        peers = typer.prompt("How many peers (organisations or machines) will train?", type=int, default=1)
    try:
        text = config.read_text(encoding="utf-8") if config is not None else template(peers or 1)
        if preset is not None:
            text = with_preset(text, preset, settings or ())
        else:
            text = with_settings(text, settings or ())
            if config is None and settings:
                text = without_ineffective(text, settings)  # what only the template says gives way
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config}: cannot be read ({reason_of(error)})") from error
    except ValueError as error:
        raise ConfigError(f"{config}: is not TOML: {error}") from error
    text = pin(text, allow or ())
    settled = RunConfig.from_text(text.encode(), state / "run.toml")
    refuse_swarm(settled, config or state / "run.toml")
    noise = _noise(settled)
    lock = StateFolder.lock_new(state)
    try:
        _keep_settings(state, text, config)
        folder = StateFolder.create(state, text)
        authority = Authority.create(folder.path, folder.run_id, folder.config().server.advertise, now=time.time())
    finally:
        os.close(lock)
    typer.echo(f"run {folder.run_id} in {state}")
    typer.echo(f"settings    {folder.run_toml}")
    typer.echo(f"authority   {authority.fingerprint}")
    for name, text in folder.config().derived:
        typer.echo(f"{name:<11} {text}")
    if noise:
        typer.echo(f"privacy     {noise}")
    typer.echo(f"next        edit-coordinator serve --state {quoted(state)}")


def _keep_settings(state: Path, text: str, config: Path | None) -> None:
    """Raise ConfigError where a run.toml that somebody has written would be lost."""
    there = state / "run.toml"
    try:
        new = not there.exists() or (StateFolder.exists(state) and not StateFolder.begun(state))
    except OSError:
        return  # making the folder says why
    try:
        lost = not new and there.read_bytes() != text.encode() and (config is None or not config.samefile(there))
    except OSError as error:
        raise ConfigError(f"{there}: cannot be read ({error.strerror})") from error
    if lost:
        raise ConfigError(f"{there}: is there already, with other settings; to begin with them: --config {there}")


def _noise(config: RunConfig) -> str:
    """Return what noise and budget of a private run mean, or ''. Raises ConfigError where the noise would drown everything."""
    privacy, planned = config.privacy, config.sync.outer_steps
    if not privacy.of_organisations:
        return ""
    with loading():
        from aggregator.control.schemas import builtin_schema  # needs torch
        from edit.merging.private import noise_line
    left = most_steps(
        lambda steps: gaussian_epsilon(privacy.delta, steps, privacy.noise_multiplier), privacy.epsilon_max, planned
    )
    said = f"eps {privacy.epsilon_max:g} at delta {privacy.delta:g} allows {left} of {planned} outer steps"
    schema = builtin_schema(config)
    return f"{said}; {noise_line(config, schema)[0]}" if schema is not None else said


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@app.command()
def new_aggregator(
    number: Annotated[int, typer.Argument(help="Position in aggregators.addresses of run.toml, from 1.")],
    folder: Annotated[Path, typer.Argument(help="The state folder to create, or to update to the present run.toml.")],
    state: State = Path("edit-run"),
) -> None:
    """Create the folder of a further aggregator, with its key and certificate. Copy it to its machine and serve it there.

    Example: edit-coordinator new-aggregator 1 my-run-1 --state my-run
    """
    coordinator = StateFolder(state)
    authority = Authority.load(coordinator.path, coordinator.run_id)
    further = StateFolder.create_further(folder, coordinator, number)
    address = address_of(further.config(), number, further.run_toml)
    authority.equip(further.path, number, address.rpartition(":")[0], now=time.time())
    typer.echo(f"aggregator {number} of run {coordinator.run_id} at {address}")
    typer.echo(f"folder      {folder} (contains a key: copy it over a channel you trust)")
    typer.echo(f"next        edit-coordinator serve --state {quoted(folder)}, on that machine")


@app.command()
def serve(
    state: State = Path("edit-run"),
    threads: Annotated[
        int, typer.Option(help="CPU threads that merge, a fragment in each. More than one where cores are free.", min=1)
    ] = 1,
    accept_rollback: Annotated[
        bool, typer.Option("--accept-rollback", help="Start even though the folder lost committed outer steps.")
    ] = False,
    dht_peers: Annotated[
        list[str] | None,
        typer.Option(
            "--dht-peers",
            help="Announce the coordinator in the DHT of this libp2p node: /ip4/192.0.2.1/tcp/4001/p2p/12D3... Repeatable.",
            metavar="ADDRESS",
        ),
    ] = None,
    keep_serving: Annotated[
        bool, typer.Option("--keep-serving", help="Continue to serve after the run has finished, until Ctrl-C or SIGTERM.")
    ] = False,
    trackers: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker",
            help="Log each committed round to tensorboard, wandb, mlflow or trackio, or to entry:NAME, a plug-in. Repeatable.",
            metavar="NAME",
        ),
    ] = None,
    tracker_options: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker-option", help="NAME.KEY=VALUE for one of these trackers. Repeatable.", metavar="NAME.KEY=VALUE"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="SECTION.KEY=VALUE: serve with this setting, and write it into run.toml once it fits the run. Repeatable.",
        ),
    ] = None,
    allow: Allow = None,
) -> None:
    """Serve the run until it has finished and its peers have the last outer step, or until Ctrl-C or SIGTERM.

    After a crash, the same command continues from the last commit. Logs to stderr, and writes metrics to metrics.jsonl in the
    folder. Exit codes: 0 finished or stopped, 2 wrong configuration or a damaged file, 70 a bug.

    Example: edit-coordinator serve --state my-run
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # read when torch is imported: threads that wait leave the CPU to others
    with loading():
        from aggregator.server import serve_run  # needs torch; the other commands answer at once without it
        from edit.trackers.choose import TrackerChoice

    log_to_stderr()
    folder, nodes = StateFolder(state), tuple(dht_peers or ())
    if settings:
        folder.change(settings)
    choice = TrackerChoice.of(trackers or (), tracker_options or (), frozenset(allow or ()))
    folder.pin(allow or ())
    serving = serve_run(
        folder,
        threads=threads,
        accept_rollback=accept_rollback,
        keep_serving=keep_serving,
        dht_peers=nodes,
        choice=choice,
    )
    asyncio.run(serving)


@app.command()
def invite(
    name: Annotated[str, typer.Argument(help="The peer_id of the new member.")],
    state: State = Path("edit-run"),
    role: Annotated[str, typer.Option(help="peer, region, observer, auditor, scorer or operator.")] = "peer",
    hours: Annotated[float, typer.Option(help="How many hours the invitation is valid.", min=0.01, max=24 * 365)] = 24.0,
) -> None:
    """Print a single-use invitation, one line on stdout. Send it to the member's operator over a channel you trust.

    Peers whose names agree up to the first dot, such as acme.gpu1 and acme.gpu2, belong to one organisation. A robust rule
    counts it once.

    Example: edit-coordinator invite --state my-run university-a
    """
    need_stdout()
    folder = StateFolder(state)
    config = configurations_of(folder).config
    authority = Authority.load(folder.path, folder.run_id)
    enrol = _enrol_endpoints(folder)
    invitation = authority.invite(name, role=role, enrol=enrol, lifetime_s=hours * 3600, now=time.time())
    if config.audit.enabled:
        invitation = replace(invitation, log_key=open_log_key(folder.path, log_origin(folder.run_id)).key.text())
    try:
        typer.echo(invitation.encode())
    except OSError:  # nobody has seen it
        authority.withdraw(invitation)
        raise
    if role == "scorer" and not config.robust.scored:
        typer.echo('robust.trust is not "loss": a scorer has nothing to do in this run', err=True)
    typer.echo(f"for {name} ({role}), single use, valid {hours:g} h; authority {authority.fingerprint}", err=True)
    typer.echo(f"redeemed at {', '.join(enrol)}", err=True)
    if all(is_loopback(endpoint.rpartition(":")[0]) for endpoint in enrol):
        typer.echo(
            "only this machine reaches these addresses; for others set server.advertise and both listen in run.toml", err=True
        )


def _enrol_endpoints(folder: StateFolder) -> tuple[str, ...]:
    server = folder.config().server
    port = server.enrol_listen.rpartition(":")[2]
    if port == "0":
        if not (bound := folder.bound()):
            raise ConfigError(f"{folder.run_toml}: server.enrol_listen has port 0; start `edit-coordinator serve` first")
        port = bound["enrol_listen"].rpartition(":")[2]
    return tuple(endpoint_of(host, port) for host in server.advertise)


@app.command()
def status(
    state: State = Path("edit-run"),
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(help="How many of the last rounds to show.", min=0, max=200)] = 8,
    watch: WatchOption = False,
) -> None:
    """Show the run: its phase, its members, and the last rounds with the reason why each closed.

    After the end of the run it shows how the run ended, from the files in --state. `watch` shows the same live, with curves.
    With several aggregators each has a phase and an outer step of its own; the run has finished once all of them have.

    Example: edit-coordinator status --state my-run
    """
    asked: list[Answers[RunStatus]] = []

    def read() -> RunStatus:
        answers, run = _ask_status(state)
        asked[:] = [answers]
        return run

    def tables(console: Console, run: RunStatus) -> None:
        print_status(console, run, rounds)

    show_status(read, tables, as_json=as_json, watch=watch, check=lambda: asked[0].check(), finished=_finished)


def _finished(run: RunStatus) -> bool:
    return all(one.phase == "finished" for one in (run, *run.aggregators))


def _ask_status(state: Path) -> tuple[Answers[RunStatus], RunStatus]:
    """Return what all aggregators answered, and that as one status.

    A coordinator that has ended with its run says nothing; then it is how the run ended. Raises TransportError when the
    coordinator does not answer and the run has not ended.
    """
    from aggregator.operator_client import Answers, call_every, read_status
    from aggregator.past import last_status

    folder = StateFolder(state)
    answers: Answers[RunStatus] = Answers({}, [])
    try:
        answers = call_every(folder, read_status)
        if 0 not in answers.said:
            raise TransportError("; ".join(answers.failures))
    except TransportError as error:
        ended = last_status(folder)
        if any(one.phase != "finished" for one in (ended, *answers.said.values())):
            at = f" The last commit was outer step {ended.outer_step} of {ended.outer_steps}" if ended.outer_step else ""
            raise TransportError(f"{error}{at}") from error
        return Answers({0: ended}, []), replace(ended, reason=f"the run has ended at outer step {ended.outer_step}")
    further = tuple(replace(one, aggregator=number) for number, one in answers.said.items() if number > 0)
    return answers, replace(answers.said[0], aggregators=further)


@app.command()
def watch(state: State = Path("edit-run")) -> None:
    """Show the run live: members, rounds, losses, events; until the run has finished, or Ctrl-C.

    On a terminal it shows a screen of 100 columns; elsewhere it prints lines. `status` prints tables instead, once, or
    repeatedly with --watch. It only reads: ending it does not affect the run.

    Example: edit-coordinator watch --state my-run
    """
    from aggregator.operator_client import watch_run
    from edit.view.live import show

    folder = StateFolder(state)
    asyncio.run(show(lambda: watch_run(folder), Console(), time.time))


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    state: State = Path("edit-run"),
    beside: Beside = None,
) -> None:
    """Write the page of the run, as `web` shows it, to one file; also after its end, from metrics.jsonl.

    Example: edit-coordinator report --state my-run --beside another-run --out report.html
    """
    check_installed()
    from aggregator.past import whole_status
    from aggregator.swarm.beside import runs_beside
    from edit.view.overlaid import overlaid
    from edit.web.page import write_page

    check_outside(out, (state, *(beside or ())))
    status = whole_status(StateFolder(state))
    write_page(out, overlaid(status, runs_beside(beside or ())))
    typer.echo(f"{out}: {status.phase}, outer step {status.outer_step} of {status.outer_steps}")


@app.command()
def web(
    state: State = Path("edit-run"),
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page; port 0: any that is free.")] = "127.0.0.1:0",
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="The certificate of the page's server (PEM); a loopback address needs none. Default: the coordinator's."
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The key of --certificate (PEM).")] = None,
    beside: Beside = None,
) -> None:
    """Show the run as a page in the browser: members, rounds, curves, events, settings; pause, drain, evict.

    It is a process of its own. On loopback it prints a link that opens the page once; elsewhere a browser needs a
    member's certificate, and may only read. Needs: pip install 'edit-localsgd[web]'

    Example: edit-coordinator web --state my-run
    """
    check_installed()
    from aggregator.page import serve_operators_page

    others = {}
    if beside:
        from aggregator.swarm.beside import runs_beside  # imports torch, which the page's process does without

        others = runs_beside(beside)
    serve_operators_page(StateFolder(state), listen=listen, certificate=certificate, key=key, beside=others, say=typer.echo)


@app.command()
def members(state: State = Path("edit-run"), as_json: AsJson = False) -> None:
    """List all members that were ever enrolled, with their state and the reason for its last change.

    Example: edit-coordinator members --state my-run --json
    """
    from aggregator.operator_client import call_operator, read_status

    rows = call_operator(StateFolder(state), read_status).members
    if as_json:
        typer.echo(json_text([row.as_json() for row in rows], indent=2))
    else:
        print_members(Console(), rows)


@app.command()
def evict(
    name: Annotated[str, typer.Argument(help="The peer_id of the member.")],
    state: State = Path("edit-run"),
    reason: Annotated[str, typer.Option(help="Shown to the member's operator, and kept.")] = "evicted by the operator",
) -> None:
    """Remove a member from the run permanently: its certificate is refused from now on.

    The name of somebody who was invited and has not joined can be evicted, too: no invitation for it works any more. An evicted
    name is not invited again: choose another one.

    Example: edit-coordinator evict --state my-run university-a --reason "key lost"
    """
    from aggregator.operator_client import call_every, evict_peer

    call_every(StateFolder(state), evict_peer(name, reason)).check()
    typer.echo(f"{name} is evicted")


@app.command()
def pause(state: State = Path("edit-run")) -> None:
    """Pause the run until `resume`, even if `serve` is restarted. The open round is aborted; peers wait at their exchange.

    A run that drains is not paused: resume it first.

    Example: edit-coordinator pause --state my-run
    """
    from aggregator.operator_client import call_every, pause_run

    call_every(StateFolder(state), pause_run).check()
    typer.echo("paused")


@app.command()
def resume(state: State = Path("edit-run")) -> None:
    """Continue after `pause`, or after `drain` if outer steps are left (then `serve` and the peers are started again).

    Example: edit-coordinator resume --state my-run
    """
    from aggregator.operator_client import call_every, resume_run

    call_every(StateFolder(state), resume_run).check()
    typer.echo("resumed")


@app.command()
def drain(state: State = Path("edit-run")) -> None:
    """End the run early: finish the open round, write a checkpoint, then let every peer save and exit.

    Several aggregators end at one outer step: those that are behind open rounds until they are there.

    Example: edit-coordinator drain --state my-run
    """
    from aggregator.operator_client import drain_every

    answers = asyncio.run(drain_every(StateFolder(state)))
    ends = {number: "its open round" if end is None else f"outer step {end}" for number, end in answers.said.items()}
    if len(set(ends.values())) > 1:
        each = ", ".join(f"aggregator {number} with {end}" for number, end in ends.items())
        typer.echo(f"they do not end together: {each}", err=True)
    answers.check()
    typer.echo("draining; `status` shows finished when it is done")


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The .safetensors file to write, outside --state; with --format hf, the folder.")],
    state: Annotated[
        list[Path] | None,
        typer.Option("--state", help="The folder of the run; with several aggregators, repeat it for each."),
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", help="safetensors: one file; hf: a folder for from_pretrained, of an hf: model."),
    ] = "safetensors",
    averaged: Annotated[
        bool,
        typer.Option("--averaged", help="Write the average that the run keeps by its section [average]."),
    ] = False,
) -> None:
    """Write the outer parameters of the last commit to a file, also while the run is served.

    A tensor that a model uses under two names, as a tied head, is written once: load such a file with strict=False. Buffers, as
    BatchNorm's statistics, are in it where peers train with `buffers="average"`; else each peer has its own.

    Example: edit-coordinator export --state my-run --out model.safetensors
    """
    with loading():
        from aggregator.export import export_parameters, export_pretrained

    writers = {"safetensors": export_parameters, "hf": export_pretrained}
    if form not in writers:
        raise ConfigError(f"--format {form}: must be {' or '.join(writers)}")
    exported = writers[form]([StateFolder(path) for path in state or [Path("edit-run")]], out, averaged=averaged)
    typer.echo(f"{out}: {exported.told}")


def main() -> None:
    """Entry point of `edit-coordinator`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is imported by `export --format hf`, after this
    run_command("edit-coordinator", app)
