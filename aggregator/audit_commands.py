"""The commands `edit-coordinator audit ...`: a run's audit log, verified, summed up and copied, with no running coordinator."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console
from rich.table import Column, Table

from aggregator.audit_verification import entries_of, verified_log
from aggregator.storage.configurations import authorities_of
from aggregator.storage.cosignatures import note_files
from aggregator.storage.log_key import open_log_key
from aggregator.storage.state_folder import AUDIT_COSIGNED, AUDIT_HEAD, AUDIT_KEY, AUDIT_LOG, AUTHORITY, StateFolder
from edit.command_line import loading
from edit.durable_files import check_outside, write_atomic
from edit.errors import ConfigError
from edit.plain_text import printable
from edit.trust.checkpoints import MOST_NOTE_BYTES, NoteKey
from edit.trust.envelopes import signed_envelope
from edit.trust.signatures import key_hash
from editpb.audit_log import LogFault, LogVerifier, Usage
from editpb.folder_kinds import kind_of_folder
from editpb.messages import DataStatement

__all__ = ["audit", "check_place", "print_keys", "print_usage", "usage_values"]

audit = typer.Typer(no_args_is_help=True, help="Verify, sum up or copy the audit log of a run (docs/audit.md).")
_Log = Annotated[Path, typer.Option("--state", help="The folder of the run, or one that an export has written.")]
_Key = Annotated[
    str,
    typer.Option(help="The log's public key, as the operator gave it to you. Without it: the one that the log names itself."),
]
_Hashes = Annotated[
    bool, typer.Option("--hashes", help="Leave out the signatures of contributions, which take nearly all of the time.")
]
_Sample = Annotated[
    int | None,
    typer.Option("--sample", min=1, help="Verify the signatures of this many commits, drawn at random, instead of all."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@audit.command()
def verify(
    state: _Log = Path("edit-run"), key: _Key = "", hashes: _Hashes = False, sample: _Sample = None, as_json: _Json = False
) -> None:
    """Verify the log: every entry, every signature of a contribution, the signed head, and those that members cosigned.

    Exit codes: 0 the log is valid; 2 it is not, and the message names the entry.

    Example: edit-coordinator audit verify --state my-run
    """
    if hashes and sample is not None:
        raise ConfigError("--sample: has no effect with --hashes, which leaves out all signatures")
    notes = _cosigned(state)  # first: the log may grow meanwhile
    log, signed, _ = _verified(state, key, 0 if hashes else sample)
    cosigned = {size: members for size, members in (_checked(log, path, note) for path, note in notes) if members}
    if as_json:
        typer.echo(json.dumps({**_said(log, signed), "cosigned": cosigned}))
        return
    assert log.key is not None
    signatures = "signatures left out" if hashes else f"{log.verified} signatures"
    if sample is not None and sample < log.commits:
        signatures += f" (those of {sample} commits, drawn at random)"
    typer.echo(f"run {printable(log.run_id)}: {len(log.tree)} entries, {log.commits} commits, {signatures}: verified")
    typer.echo(f"outer step  {log.outer_step}, digest {printable(log.digest[:12])}")
    typer.echo(f"head        {signed} entries, root {log.tree.root(signed).hex()}")
    for size, members in cosigned.items():
        count = f"{len(members)} member{'s' * (len(members) > 1)}"
        typer.echo(f"cosigned    {size} entries, by {count}: {', '.join(map(printable, members))}")
    typer.echo(f"key         {log.key.text()}{'' if key else ' (named by the log itself)'}")
    for change in log.changes:
        by = f", approved by {', '.join(map(printable, change.approvers))}" if change.approvers else ""
        typer.echo(f"changed     to configuration {change.number}, sha256:{change.config_digest}, in entry {change.entry}{by}")
    if log.confirmed or log.unconfirmed:
        typer.echo(f"masked      {_masked(log)}")
    if log.privacy:
        typer.echo(f"privacy     {printable(log.privacy)}")
    print_keys(log)
    if log.continued:
        typer.echo(f"continued   {_continued(log)}")


@audit.command()
def usage(state: _Log = Path("edit-run"), key: _Key = "", as_json: _Json = False) -> None:
    """Verify the log and show what each peer contributed by it.

    Example: edit-coordinator audit usage --state my-run
    """
    log, _, _ = _verified(state, key)
    if as_json:
        typer.echo(json.dumps(usage_values(log)))
        return
    print_usage(log)


@audit.command()
def replay(
    state: _Log = Path("edit-run"),
    step: Annotated[int | None, typer.Option("--step", min=1, help="The outer step.", show_default="the last one")] = None,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """Merge the contributions behind a commit once more, and compare verdicts, update and parameters with the log.

    For a run with audit.keep_contributions, and one of its last commits. Signatures of other commits are left out.

    Exit codes: 0 the result is what the log says; 2 it is not, and the message names what differs.

    Example: edit-coordinator audit replay --step 12 --state my-run
    """
    log, signed, _ = _verified(state, key, 0)
    assert log.key is not None
    with loading():
        from aggregator.audit_replay import replay_step

    done = replay_step(state, step or log.outer_step, signed)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    typer.echo(
        f"run {printable(log.run_id)}, outer step {done.outer_step}: {done.bytes:,} bytes of {len(done.peers)} peers merged "
        f"once more: the same verdicts, update and digest {printable(done.digest[:12])}"
    )
    for peer in done.less:
        typer.echo(f"{printable(peer)} claimed more inner steps or tokens than counted for it")


@audit.command()
def export(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    state: _Log = Path("edit-run"),
    key: _Key = "",
    provenance: Annotated[
        bool,
        typer.Option(
            "--provenance", help="Write where the model comes from, too: a signed statement of in-toto, for other tools."
        ),
    ] = False,
    of: Annotated[
        list[Path] | None,
        typer.Option("--of", help="With --provenance: a file of the model, as `export` wrote it; may be repeated."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Copy all that a replay of this outer step needs, too."),
    ] = None,
) -> None:
    """Verify the log and copy it, for somebody else to verify: the entries that the head is signed for, the head, the key, and
    the heads that members have cosigned.

    Repeated, it adds what came since; it does not write over another log, or a longer one.

    Example: edit-coordinator audit export my-audit --state my-run --provenance --of model.safetensors
    """
    if of and not provenance:
        raise ConfigError("--of: has no effect without --provenance")
    check_outside(out, (state,))
    notes = _cosigned(state)
    log, signed, head = _verified(state, key)
    assert log.key is not None
    for path, note in notes:
        _checked(log, path, note)
    lines = b"".join(line + b"\n" for line in itertools.islice(entries_of(state / AUDIT_LOG), signed))
    check_place(out, {out / AUDIT_LOG: lines})
    files = [(AUDIT_LOG, lines), (AUDIT_HEAD, head)]
    if authorities := authorities_of(state):
        files.append((AUTHORITY, b"".join(each.public_bytes(Encoding.PEM) for each in authorities)))
    if provenance:
        files += _provenance(state, log.key, lines, head, of or [])
    copied = _of_replay(state, step) if step is not None else []
    try:
        (out / AUDIT_COSIGNED if notes else out).mkdir(parents=True, exist_ok=True)
        write_atomic(out / AUDIT_KEY, log.key.text().encode() + b"\n", shared=True)  # by which `check_place` knows it again
        for old in note_files(out / AUDIT_COSIGNED).values():
            old.unlink()
        for path in copied:
            place = out / path.relative_to(state)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    for name, data in [*files, *((f"{AUDIT_COSIGNED}/{path.name}", note) for path, note in notes)]:
        write_atomic(out / name, data, shared=True)
    typer.echo(f"{out}: {signed} entries, outer step {log.outer_step}")


@audit.command()
def card(
    out: Annotated[Path, typer.Argument(help="The file to write, as README.md beside the exported model; it must not exist.")],
    state: _Log = Path("edit-run"),
    key: _Key = "",
) -> None:
    """Verify the log and write a model card by it: who took part, on what data, configuration, privacy, and the log's head.

    Example: edit-coordinator audit card my-model/README.md --state my-run
    """
    from aggregator.model_card import model_card

    if out.exists():
        raise ConfigError(f"{out}: exists; name a new file")
    log, signed, head = _verified(state, key)
    assert log.key is not None
    text = model_card(itertools.islice(entries_of(state / AUDIT_LOG), signed), log.key, head.decode())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out.parent}: cannot be created ({error.strerror})") from error
    write_atomic(out, text.encode(), shared=True)
    typer.echo(f"{out}: run {printable(log.run_id)}, outer step {log.outer_step}")


def check_place(out: Path, copies: Mapping[Path, bytes]) -> None:
    """Raise ConfigError where logs may not be copied to a folder.

    It is one of a run, a peer or a member, or a log in it is not the beginning of what is to be written there.
    """
    if not (out / AUDIT_KEY).exists() and (kind := kind_of_folder(out)):  # with that key it is a copy, and may have run.json
        raise ConfigError(f"{out}: is the folder of {kind}; export to another folder")
    there = {*out.glob("audit-log*.jsonl"), *out.glob("part-*/audit-log*.jsonl")}
    for path in sorted(there | {path for path in copies if path.exists()}):
        try:
            old = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        if not copies.get(path, b"").startswith(old):
            raise ConfigError(f"{path}: is another log, or one that has more entries; export to another folder")


def usage_values(log: LogVerifier) -> dict[str, object]:
    """Return what a verified log says of each peer, as JSON values."""
    data, consents, doubtful = _data(log), log.confirmed_consents, log.doubtful_consents
    return {
        peer: {
            **_fields(one),
            "verdicts": dict(one.verdicts),
            "consented": peer in consents,
            "doubtful_consent": doubtful.get(peer),
            "data": asdict(data[peer]) if peer in data else None,
        }
        for peer, one in _peers(log).items()
    }


def print_usage(log: LogVerifier) -> None:
    """Print what a verified log says of each peer."""
    headers = ("peer", "outer steps", "tokens", "share", "missing", "verdicts by fragment")
    table = Table(*(Column(header, overflow="fold") for header in headers), box=None)  # never cut
    for peer, one in _peers(log).items():
        verdicts = ", ".join(f"{count} {printable(verdict)}" for verdict, count in sorted(one.verdicts.items()))
        share = one.share / log.commits if log.commits else 0.0
        table.add_row(printable(peer), str(one.outer_steps), str(one.tokens), f"{share:.1%}", str(one.missing), verdicts)
    Console().print(table)
    if consents := log.confirmed_consents:
        typer.echo(f"consented: {', '.join(printable(peer) for peer in sorted(consents))}")
    for peer, said in sorted(_data(log).items()):
        typer.echo(f"{printable(peer)}'s data: {printable(_words_of(said))}")
    for peer, key in log.doubtful_consents.items():
        typer.echo(f"doubtful: {_doubtful(peer, key)}")
    if log.continued:
        typer.echo(f"continued: {_continued(log)}")
    typer.echo("Tokens, and what is said of data, are what each peer says of itself.")


def print_keys(log: LogVerifier, indent: str = "") -> None:
    """Print keys of which somebody should ask whose they are: the log does not show it."""
    for peer, key in log.doubtful_consents.items():
        typer.echo(f"{indent}doubtful    {_doubtful(peer, key)}")
    for owner, keys in log.doubtful_owners.items():
        for key in keys:
            said = f"what {printable(owner)} signed as owner, by a key that has signed no contribution of it: sha256:{key}"
            typer.echo(f"{indent}doubtful    {said}")
    for scorer, keys in _scorers(log).items():
        typer.echo(f"{indent}scored      by {printable(scorer)}, key {', '.join(f'sha256:{key}' for key in keys)}")
    for peer, known in sorted(log.contributors.items()):
        if len(known) > 1:
            each = ", ".join(f"sha256:{key_hash(key)}" for key in sorted(known))
            typer.echo(f"{indent}keys        of {printable(peer)}, which contributed with {len(known)}: {each}")


def _continued(log: LogVerifier) -> str:
    return f"at outer steps {', '.join(map(str, log.continued))}: earlier commits are not in the log, or were lost"


def _doubtful(peer: str, key: str) -> str:
    return f"the consent of {printable(peer)}, by a key that has signed no contribution of it: sha256:{key}"


def _scorers(log: LogVerifier) -> dict[str, list[str]]:
    return {scorer: sorted(map(key_hash, keys)) for scorer, keys in sorted(log.scorers.items())}


def _peers(log: LogVerifier) -> dict[str, Usage]:
    return {peer: log.usage.get(peer, Usage()) for peer in sorted(log.usage.keys() | log.consents.keys())}


def _data(log: LogVerifier) -> dict[str, DataStatement]:
    return {peer: consent.data for peer, consent in log.confirmed_consents.items() if consent.data}


def _of_replay(state: Path, step: int) -> list[Path]:
    """Return the files of a run's folder that a replay of this outer step reads. Raises ConfigError, StorageError."""
    from aggregator.storage.audit_files import replayed_files

    if not StateFolder.exists(state):
        raise ConfigError(f"--step: {state} is no run's folder")
    return replayed_files(StateFolder(state), step)


def _provenance(state: Path, key: NoteKey, lines: bytes, head: bytes, of: Sequence[Path]) -> list[tuple[str, bytes]]:
    """Return the files that say where the model comes from: the statement, signed, and the key that it is signed with."""
    from aggregator.provenance import PAYLOAD_TYPE, provenance_of

    signer = open_log_key(state, key.name)
    if signer.key != key:
        raise ConfigError(f"{state}: its log.key is not the one that the log is signed with; restore it from a copy")
    statement = json.dumps(provenance_of(lines.splitlines(), key, head, of), sort_keys=True).encode()
    return [("provenance.json", signed_envelope(PAYLOAD_TYPE, statement, signer)), ("audit-log.key.pem", key.pem())]


def _words_of(data: DataStatement) -> str:
    manifest = f"manifest sha256:{data.manifest}" if data.manifest else ""
    licence = f"licence {data.licence}" if data.licence else ""
    return "; ".join(filter(None, (data.statement, licence, manifest)))


def _verified(state: Path, key: str, sample: int | None = None) -> tuple[LogVerifier, int, bytes]:
    """Return the verifier after all entries, for how many of them the head is signed, and that head.

    Raises ConfigError for files that are not there, LogFault, StorageError for a damaged authority.
    """
    try:
        known = NoteKey.parse(key) if key else None
    except ValueError as error:
        raise ConfigError(f"--key: {error}") from error
    path = state / AUDIT_LOG
    if StateFolder.exists(state) and not (path.exists() or (state / AUDIT_HEAD).exists()):
        raise ConfigError(f"{path}: the run keeps no audit log; it does with audit.enabled = true in run.toml")
    try:
        head = (state / AUDIT_HEAD).read_bytes()  # first: entries may come meanwhile
        log = verified_log(entries_of(path), known, sample=sample, authorities=authorities_of(state))
        signed = log.check_head(head)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error
    except LogFault as error:
        raise LogFault(f"{path}: {printable(str(error))}") from error
    return log, signed, head


def _cosigned(state: Path) -> list[tuple[Path, bytes]]:
    """Return the heads that members have cosigned, smallest first. Raises ConfigError, StorageError."""
    found = []
    for path in note_files(state / AUDIT_COSIGNED).values():
        try:
            with path.open("rb") as file:
                found.append((path, file.read(MOST_NOTE_BYTES + 1)))
        except FileNotFoundError:  # the coordinator keeps newer ones instead
            continue
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return found


def _checked(log: LogVerifier, path: Path, note: bytes) -> tuple[int, tuple[str, ...]]:
    """Return size and members of a cosigned head. Raises LogFault that names the file."""
    try:
        return log.check_cosigned(note)
    except LogFault as error:
        raise LogFault(f"{path}: {printable(str(error))}") from error


def _fields(one: Usage) -> dict[str, object]:
    return {"outer_steps": one.outer_steps, "tokens": one.tokens, "share": one.share, "missing": one.missing}


def _masked(log: LogVerifier) -> str:
    """Return what a log says of masked sums, in words."""
    said = []
    if log.confirmed:
        said.append(f"{_steps(log.confirmed)}: more than two thirds of the peers that had keys confirmed whose sum it is")
    if log.unconfirmed:
        said.append(f"{_steps(log.unconfirmed)} without a word of who confirmed the sum, as earlier versions wrote them")
    return "; ".join(said)


def _steps(count: int) -> str:
    return f"{count} outer step{'s' * (count != 1)}"


def _said(log: LogVerifier, signed: int) -> dict[str, object]:
    return {
        "run_id": log.run_id,
        "entries": len(log.tree),
        "commits": log.commits,
        "signatures": log.verified,
        "outer_step": log.outer_step,
        "digest": log.digest,
        "signed_entries": signed,
        "root": log.tree.root(signed).hex(),
        "key": log.key.text() if log.key is not None else "",
        "continued": log.continued,
        "doubtful_consents": log.doubtful_consents,
        "scorers": _scorers(log),
        "changes": [change._asdict() for change in log.changes],
        **({"masked": {"confirmed": log.confirmed, "unconfirmed": log.unconfirmed}} if log.confirmed + log.unconfirmed else {}),
        **({"privacy": log.privacy} if log.privacy else {}),
    }
