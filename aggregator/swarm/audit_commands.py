"""The verbs of `python -m aggregator.swarm audit`: the logs of a member's parts, verified, summed up, replayed and copied.

The member's host may run meanwhile, and appends to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from aggregator.audit_commands import print_usage, usage_values
from aggregator.audit_verification import entries_of, verified_log
from aggregator.storage.state_folder import part_logs
from edit.council.record import recoveries
from edit.durable_files import write_atomic
from edit.errors import ConfigError
from edit.plain_text import printable
from editpb.audit_log import LogFault, LogVerifier

__all__ = ["audit"]

audit = typer.Typer(no_args_is_help=True, help="Verify, sum up, replay or copy the audit log that a member keeps of each part.")
_Folder = Annotated[Path, typer.Argument(help="The folder of a member, or one that an export has written.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class _Log(NamedTuple):
    """A log in a folder, verified."""

    part: int
    path: Path
    log: LogVerifier


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
    newest = {part: path for part, path, _ in found}
    typer.echo(f"run {printable(found[0].log.run_id)}")
    for part, path, log in found:
        signatures = "signatures of contributions left out" if hashes else f"{log.verified} signatures of contributions"
        if sample is not None and sample < log.commits:
            signatures += f" (those of {sample} commits, drawn at random)"
        typer.echo(f"part {part}: {log.commits} commits, each signed by the part's owner, {signatures}: verified")
        if log.before:
            typer.echo(f"  begins      with entry {log.before}: this member took a snapshot of outer step {log.before - 1}")
        for one in log.recovered:
            entries = f"it goes on from the {one.entry} entries before, root {one.root}"
            typer.echo(
                f"  recovered   lineage {one.lineage} begins with entry {one.entry}, of {printable(one.owner)}: {entries}"
            )
        if log.before and recoveries(log.grant) and not log.recovered:
            typer.echo(f"  lineage     {recoveries(log.grant) + 1}: the swarm was recovered before this log begins")
        if path != newest[part]:
            typer.echo("  ends        before a snapshot; a later log follows")
        typer.echo(f"  outer step  {log.outer_step}, digest {printable(log.digest[:12])}")
        typer.echo(f"  head        {len(log.tree)} entries, root {log.tree.root().hex()}")
        if log.privacy:
            typer.echo(f"  privacy     {printable(log.privacy)}")


@audit.command()
def usage(folder: _Folder, as_json: _Json = False) -> None:
    """Verify the logs, and show what each peer contributed to each part by them."""
    found = list(_verified(folder, None))
    if as_json:
        typer.echo(json.dumps([{**_values(each), "peers": usage_values(each.log)} for each in found]))
        return
    for part, _, log in found:
        first = log.outer_step - log.commits + 1
        typer.echo(f"part {part}, outer steps {first} to {log.outer_step}" if log.commits else f"part {part}: no commit")
        print_usage(log)


@audit.command()
def replay(
    folder: _Folder,
    step: Annotated[int | None, typer.Option("--step", min=1, help="The outer step.", show_default="the last one")] = None,
    part: Annotated[int | None, typer.Option("--part", min=0, help="The part.", show_default="all")] = None,
    as_json: _Json = False,
) -> None:
    """Merge the contributions behind a commit of each part once more, and compare the result with the log."""
    from aggregator.audit_replay import replay_part

    newest: dict[int, list[_Log]] = {}
    for each in _verified(folder, 0):
        newest.setdefault(each.part, []).append(each)
    if part is not None and part not in newest:
        raise ConfigError(f"--part {part}: {folder} has the parts {', '.join(map(str, newest))}")
    found, lacking = [], list[str]()
    for number, logs in newest.items():
        if part not in (None, number):
            continue
        outer_step = step or logs[-1].log.outer_step
        having = [each for each in logs if each.log.before <= outer_step < len(each.log.tree)]
        try:
            if not having:
                raise ConfigError(f"part {number}: no log in {folder} has outer step {outer_step}")
            _, path, log = having[-1]
            found.append((number, replay_part(folder, number, log.run_id, path, outer_step, len(log.tree))))
        except ConfigError as error:
            if part is not None:
                raise
            lacking.append(f"part {number} was not merged once more: {error}")
    if not found:
        raise ConfigError("; ".join(lacking))
    if as_json:
        typer.echo(json.dumps([{"part": number, **asdict(done)} for number, done in found]))
        return
    for number, done in found:
        typer.echo(
            f"part {number}, outer step {done.outer_step}: {done.bytes:,} bytes of {len(done.peers)} peers merged once more: "
            f"the same verdicts, update and digest {printable(done.digest[:12])}"
        )
        for peer in done.less:
            typer.echo(f"  {printable(peer)} claimed more inner steps or tokens than counted for it")
    for text in lacking:
        typer.echo(printable(text))


@audit.command()
def export(folder: _Folder, out: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Verify the logs and copy them, for somebody else to verify."""
    for part, path, log in _verified(folder, None):
        lines = log.commits + 1  # those that were verified: there may be more by now
        copied = b"".join(line + b"\n" for line, _ in zip(entries_of(path), range(lines), strict=False))
        place = out / f"part-{part}" / path.name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{place.parent}: cannot be created ({error.strerror})") from error
        write_atomic(place, copied)
        typer.echo(f"{place}: {log.commits} commits, outer step {log.outer_step}")


def _verified(folder: Path, sample: int | None) -> Iterator[_Log]:
    """Yield each log after all its entries. sample: as `verified_log`. Raises ConfigError where there is none, LogFault."""
    parts = sorted(int(path.name[5:]) for path in folder.glob("part-*") if path.name[5:].isdigit())
    logs = [(part, path) for part in parts for _, path in part_logs(folder / f"part-{part}")]
    if not logs:
        raise ConfigError(f"{folder}: has no audit log; a member keeps one if run.toml has audit.enabled = true")
    run_id = ""
    for part, path in logs:
        try:
            log = verified_log(entries_of(path), sample=sample)
            if log.part != part or (run_id and log.run_id != run_id):
                raise LogFault(f"is the log of part {log.part} of the run {log.run_id}")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except LogFault as error:
            raise LogFault(f"{path}: {printable(str(error))}") from error
        run_id = log.run_id
        yield _Log(part, path, log)


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
        "recovered": [each._asdict() for each in log.recovered],
    }
