"""The verbs of `python -m aggregator.swarm audit`: the logs of a member's parts, verified, summed up, replayed and copied.

The member's host may run meanwhile, and appends to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from cryptography import x509

from aggregator.audit_commands import check_place, print_keys, print_usage, usage_values
from aggregator.audit_verification import entries_of, verified_log
from aggregator.storage.state_folder import part_logs
from aggregator.swarm.host_folder import check_folder, identity_of
from aggregator.swarm.member_folder import MemberFolder
from edit.config.run import RunConfig
from edit.council.record import recoveries
from edit.durable_files import check_outside, write_atomic
from edit.errors import ConfigError
from edit.plain_text import printable
from edit.trust.canonical import parse_canonical
from edit.trust.signatures import key_hash
from editpb.audit_log import LogFault, LogVerifier
from editpb.earlier_keys import earlier_keys, public_key_of
from editpb.seen_entries import SeenBy, SeenEntry, seen_entries, seen_file

__all__ = ["audit"]

audit = typer.Typer(no_args_is_help=True, help="Verify, sum up, replay or copy the audit log that a member keeps of each part.")
_Folder = Annotated[Path, typer.Argument(help="The folder of a member, or one that an export has written.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class _Log(NamedTuple):
    """A log in a folder, verified."""

    part: int
    path: Path
    log: LogVerifier
    seen: int  # how many entries of the part this member's peer has kept that it has seen


@audit.command()
def verify(
    folder: _Folder,
    hashes: Annotated[bool, typer.Option("--hashes", help="Leave out the signatures of contributions.")] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Verify those of so many commits of each log, drawn at random.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Verify every entry, its owner's signature, those of the contributions, and the chain of digests; name what is wrong."""
    if hashes and sample is not None:
        raise ConfigError("--sample: has no effect with --hashes, which leaves out all signatures of contributions")
    found = list(_verified(folder, 0 if hashes else sample))
    if as_json:
        typer.echo(json.dumps([_values(each) for each in found]))
        return
    newest = {each.part: each.path for each in found}
    typer.echo(f"run {printable(found[0].log.run_id)}")
    for part, path, log, seen in found:
        signatures = "signatures of contributions left out" if hashes else f"{log.verified} signatures of contributions"
        if sample is not None and sample < log.commits:
            signatures += f" (those of {sample} commits, drawn at random)"
        typer.echo(f"part {part}: {log.commits} commits, each signed by the owner that it names, {signatures}: verified")
        if log.before:
            typer.echo(f"  begins      with entry {log.before}: this member took a snapshot of outer step {log.before - 1}")
        for one in log.recovered:
            entries = f"it goes on from the {one.entry} entries before, root {one.root}"
            typer.echo(
                f"  recovered   lineage {one.lineage} begins with entry {one.entry}, of {printable(one.owner)}: {entries}"
            )
        if log.before and log.grant >= 0 and recoveries(log.grant) and not log.recovered:
            typer.echo(f"  lineage     {recoveries(log.grant) + 1}: the swarm was recovered before this log begins")
        if path != newest[part]:
            typer.echo("  ends        before a snapshot; a later log follows")
        typer.echo(f"  outer step  {log.outer_step}, digest {printable(log.digest[:12])}")
        typer.echo(f"  head        {len(log.tree)} entries, root {log.tree.root().hex()}")
        if seen and path == newest[part]:
            typer.echo(f"  seen        the log has the last {seen} entries that this member's peer has seen")
        if log.privacy:
            typer.echo(f"  privacy     {printable(log.privacy)}")
        for owner, keys in _owners(log).items():
            for key, commits in keys.items():
                typer.echo(f"  owned       by {printable(owner)}, {commits} commits, key sha256:{key}")
        print_keys(log, "  ")


@audit.command()
def usage(folder: _Folder, as_json: _Json = False) -> None:
    """Verify the logs, and show what each peer contributed to each part by them."""
    found = list(_verified(folder, None))
    if as_json:
        typer.echo(json.dumps([{**_values(each), "peers": usage_values(each.log)} for each in found]))
        return
    for part, path, log, _ in found:
        if not log.commits:
            typer.echo(f"part {part}: no commit in {path.name}")
            continue
        typer.echo(f"part {part}, outer steps {log.outer_step - log.commits + 1} to {log.outer_step}")
        print_usage(log)


@audit.command()
def replay(
    folder: _Folder,
    step: Annotated[int | None, typer.Option("--step", min=1, help="The outer step.", show_default="the last one")] = None,
    part: Annotated[int | None, typer.Option("--part", min=0, help="The part.", show_default="all")] = None,
    as_json: _Json = False,
) -> None:
    """Merge the contributions behind a commit of each part once more, and compare the result with the log.

    A part that another member owned is named, and is no fault unless there is no other part.
    """
    from aggregator.audit_replay import OwnedElsewhere, Replayed, replay_part

    newest: dict[int, list[_Log]] = {}
    for each in _verified(folder, 0):
        newest.setdefault(each.part, []).append(each)
    if part is not None and part not in newest:
        raise ConfigError(f"--part {part}: {folder} has the parts {', '.join(map(str, newest))}")
    if (run_toml := folder / "run.toml").exists() and not RunConfig.from_toml(run_toml).audit.keep_contributions:
        raise ConfigError(f"{run_toml}: audit.keep_contributions = 0: no member keeps what a replay merges")
    found, lacking = dict[int, Replayed](), dict[int, ConfigError | LogFault]()
    member = identity_of(folder).peer_id if (folder / "peer.pem").exists() else ""
    for number, logs in newest.items():
        if part not in (None, number):
            continue
        outer_step = step or logs[-1].log.outer_step
        having = [each for each in logs if each.log.before <= outer_step < len(each.log.tree)]
        try:
            if not having:
                lost = part is not None or not member  # else another member has owned it, or the part is not there yet
                missing = ConfigError if lost else OwnedElsewhere
                raise missing(f"no log in {folder / f'part-{number}'} has outer step {outer_step}")
            _, path, log, _ = having[-1]
            found[number] = replay_part(folder, number, log.run_id, path, outer_step, len(log.tree), member)
        except (ConfigError, LogFault) as error:
            lacking[number] = error
    elsewhere = {number: str(error) for number, error in lacking.items() if isinstance(error, OwnedElsewhere)}
    if as_json:
        rows = [{"part": number, "merged": True, **asdict(done)} for number, done in found.items()]
        for number, reason in lacking.items():
            rows.append({"part": number, "merged": False, "elsewhere": number in elsewhere, "why": str(reason)})
        typer.echo(json.dumps(rows))
    else:
        for number, done in found.items():
            typer.echo(
                f"part {number}, outer step {done.outer_step}: {done.bytes:,} bytes of {len(done.peers)} peers merged once "
                f"more: the same verdicts, update and digest {printable(done.digest[:12])}"
            )
            for peer in done.less:
                typer.echo(f"  {printable(peer)} claimed more inner steps or tokens than counted for it")
        for number, why in elsewhere.items() if found else ():
            typer.echo(printable(f"part {number} was not merged once more: {why}"))
    failed = {number: reason for number, reason in lacking.items() if not (found and number in elsewhere)}
    if failed:
        kind = LogFault if any(isinstance(reason, LogFault) for reason in failed.values()) else ConfigError
        raise kind("; ".join(f"part {number}: {reason}" for number, reason in failed.items()))


@audit.command()
def export(folder: _Folder, out: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Verify the logs and copy them, for somebody else to verify."""
    check_outside(out, (folder,))
    copies: dict[Path, tuple[bytes, _Log]] = {}
    for each in _verified(folder, None):
        lines = each.log.commits + 1  # those that were verified: there may be more by now
        copied = b"".join(line + b"\n" for line, _ in zip(entries_of(each.path), range(lines), strict=False))
        copies[out / f"part-{each.part}" / each.path.name] = copied, each
    check_place(out, {path: copied for path, (copied, _) in copies.items()})
    if (run_toml := folder / "run.toml").exists():
        _write(out / run_toml.name, run_toml.read_bytes())
    for path, (copied, each) in copies.items():
        _write(path, copied)
        typer.echo(f"{path}: {each.log.commits} commits, outer step {each.log.outer_step}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be created ({error.strerror})") from error
    write_atomic(path, data, shared=True)


def _verified(folder: Path, sample: int | None) -> Iterator[_Log]:
    """Yield each log after all its entries. sample: as `verified_log`.

    Raises ConfigError where there is none, or none of a part, LogFault.
    """
    parts = sorted(int(path.name[5:]) for path in folder.glob("part-*") if path.name[5:].isdigit())
    logs = {part: [path for _, path in part_logs(folder / f"part-{part}")] for part in parts}
    if not parts:  # an export has some
        check_folder(folder)
    if not any(logs.values()):
        raise ConfigError(f"{folder}: has no audit log; a member keeps one if run.toml has audit.enabled = true")
    for part in range(_part_count(folder, logs)):
        if not logs.get(part):
            raise ConfigError(f"{folder / f'part-{part}'}: has no audit log, and the run has one of each part")
    seen = {part: _seen(folder, part) for part in logs}  # before the logs are read, which may grow
    member, run_id = MemberFolder(folder), ""
    for part, paths in logs.items():
        for path in paths:
            try:
                log = verified_log(entries_of(path), sample=sample)
                if log.part != part or (run_id and log.run_id != run_id):
                    raise LogFault(f"is the log of part {log.part} of the run {log.run_id}")
                _check_seen(log, seen[part], newest=path == paths[-1])
                _check_owners(log, member)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
            except LogFault as error:
                raise LogFault(f"{path}: {printable(str(error))}") from error
            run_id = log.run_id
            yield _Log(part, path, log, len(seen[part]))


def _part_count(folder: Path, logs: Mapping[int, Sequence[Path]]) -> int:
    """Return how many parts the run's model has: by run.toml, or by the first entry of a log, or else at least."""
    if (run_toml := folder / "run.toml").exists():
        config = RunConfig.from_toml(run_toml)
    else:
        first = next((line for paths in logs.values() for path in paths for line in [next(iter(entries_of(path)), b"")]), b"")
        try:
            config = RunConfig.from_json(str(parse_canonical(first)["config"]))
        except (ValueError, KeyError, TypeError):  # a log that begins later, or a damaged one, which is named when it is read
            return max(logs) + 1
    return max(max(logs) + 1, config.swarm.parts if config.swarm is not None else 0)


def _seen(folder: Path, part: int) -> list[SeenEntry]:
    """Return which entries this member's peer has seen. Raises ConfigError."""
    path = seen_file(folder, part)
    if not path.exists() or not (folder / "peer.pem").exists():
        return []
    identity = identity_of(folder)
    present = x509.load_pem_x509_certificate(_content(folder / "peer.pem"))
    keys = (public_key_of(present), *earlier_keys(folder, identity))
    by = SeenBy(identity.run_id, identity.peer_id, part)
    return list(seen_entries(path, _content(path).split(b"\n")[:-1], by, keys))


def _check_seen(log: LogVerifier, seen: Sequence[SeenEntry], *, newest: bool) -> None:
    """Raise LogFault where a log lacks what this member's peer has seen. newest: whether no log follows."""
    for each in seen:
        if each.size > len(log.tree):
            if newest:
                raise LogFault(f"has {len(log.tree)} entries, and this member's peer has seen {each.size}")
        elif each.size > log.before and log.tree.root(each.size) != each.root:
            raise LogFault(f"entry {each.outer_step}, or one before it, is another one than this member's peer has seen")


def _check_owners(log: LogVerifier, member: MemberFolder) -> None:
    """Raise LogFault where an entry is signed with a key that its owner was never enrolled for, as far as the record tells.

    The record has the last key of each name, so another one may be of before. It is not where the founder was never invited
    again, nor after an entry that names the last one. An export has no record. Raises StorageError.
    """
    saved = member.saved() if member.founded else None  # after the log was read: of an owner in it the record knows
    if saved is None or (record := saved.record) is None:
        return
    for owner, keys in log.owners.items():
        if not record.may_enter(owner):
            first = min(entries[0] for entries in keys.values())
            raise LogFault(f"entry {first} is signed by {owner}, and nobody of that name is enrolled by this member's record")
        if (enrolled := record.enrolled.get(owner)) is None:
            continue
        named = [(key, entries[0]) for key, entries in keys.items()] + [*log.contributors.get(owner, {}).items()]
        known = [first for key, first in named if key_hash(key) == enrolled.key] + [-1] * (not int(enrolled.invitation, 16))
        for key, entries in keys.items():
            if key_hash(key) != enrolled.key and known and entries[-1] > min(known):
                wrong = next(entry for entry in entries if entry > min(known))
                raise LogFault(f"entry {wrong} is signed with a key for which {owner} was not enrolled: sha256:{key_hash(key)}")


def _owners(log: LogVerifier) -> dict[str, dict[str, int]]:
    """Return how many commits each owner has signed with each of its keys, by SHA-256."""
    return {owner: {key_hash(key): len(of) for key, of in keys.items()} for owner, keys in sorted(log.owners.items())}


def _values(one: _Log) -> dict[str, object]:
    log = one.log
    return {
        "part": one.part,
        "run_id": log.run_id,
        "file": one.path.name,
        "before": log.before,
        "entries": len(log.tree),
        "commits": log.commits,
        "signatures": log.verified,
        "outer_step": log.outer_step,
        "digest": log.digest,
        "root": log.tree.root().hex(),
        "doubtful_consents": log.doubtful_consents,
        "owners": _owners(log),
        "doubtful_owners": log.doubtful_owners,
        "recovered": [each._asdict() for each in log.recovered],
    }
