"""`edit-coordinator audit replay`, `edit-peer swarm audit replay`: merge the contributions behind a commit once more, and
compare the result with the log.

The log proves what each peer signed, and what the coordinator, or the owner of a swarm's part, says came of it. With the
contributions themselves, and the outer parameters before them, anybody can see that the one follows from the other: the same
code gives the same bits on every machine.

 1. The log holds together up to its signed head, and has the commit.
 2. What is kept is what the entry names: each shard has the signature that stands there, which is of its header and of what the
    entry says of it, and its bytes have the hash that was signed. Nothing is missing, nothing is there beside it.
 3. What counted for a contribution is no more than its peer claimed; less where the claim was not believed. Inner steps may be
    more up to the fewest that any contribution counts for (`edit.rounds.work_claims`).
 4. Verdicts, weights, norms, the merged pseudo-gradient, the update and the outer parameters after it are those of the entry.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from aggregator.audit_verification import entries_of
from aggregator.data.contributions import Contributions
from aggregator.storage.configurations import configurations_of
from aggregator.storage.kept_contributions import Kept, kept_files, load_kept
from aggregator.storage.state_folder import AUDIT_LOG, StateFolder, contributions_of
from aggregator.storage.store import read_outer
from aggregator.storage.upload_buffer import UploadBuffer
from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, StorageError
from edit.merging.merge import Measured, measure
from edit.merging.mergers import admission, screen
from edit.merging.outer_state import MergeRecord, OuterState
from edit.plain_text import printable
from edit.rounds.work_claims import UsualWork, Work
from edit.trust.canonical import canonical, parse_canonical
from editpb.audit_log import DAMAGE, PART, LogFault, Signed, fragment_entry, is_signed_part, seen_heads
from editpb.signed_contributions import check_signature, config_digest

__all__ = ["OwnedElsewhere", "Replayed", "replay_part", "replay_step"]

_MOST_SHOWN = 200  # characters of a value in a message


class OwnedElsewhere(ConfigError):
    """Another member owned the part at that outer step, and has what is merged."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A commit that was merged once more, with the result that the log has."""

    outer_step: int
    digest: str  # of the outer parameters after it
    peers: tuple[str, ...]
    shards: int
    bytes: int
    less: tuple[str, ...]  # peers for whom less counted than they claimed


def replay_step(state: Path, outer_step: int, signed: int) -> Replayed:
    """Merge what is behind the commit to this outer step once more. signed: entries of the log that are verified.

    Raises ConfigError where that cannot be done (another configuration, files that are not kept), StorageError for damaged
    files, LogFault where the result, or what was merged, is not what the log says.
    """
    folder = StateFolder(state)
    entry, trust = _entry_of(entries_of(state / AUDIT_LOG), outer_step, signed, state / AUDIT_LOG)
    _check_config(config := configurations_of(folder).config, entry, folder.run_toml)
    if entry["injected"] is not None:
        raise ConfigError(f"outer step {outer_step} brought values of a run above, which are not kept")
    outer = read_outer(folder.outer, config, folder.run_id, outer_step - 1)
    if outer is None:
        raise ConfigError(
            f"{folder.path}: holds no outer step, but its audit log has outer step {outer_step}; "
            "restore the folder outer from a copy"
        )
    return _replayed(entry, trust, outer, load_kept(folder.contributions, outer_step, outer.schema))


def replay_part(home: Path, part: int, run_id: str, log: Path, outer_step: int, entries: int, member: str = "") -> Replayed:
    """Merge what is behind the commit to this outer step of a swarm's part once more, from the folder of a member.

    Only who owned the part at that outer step has what its peers sent.

    Args:
        log: of the part, which has the commit.
        entries: number of the last one that is verified, and one.
        member: whose folder it is; '': it is not known.

    Raises as `replay_step`, but ConfigError for damaged files; OwnedElsewhere where it cannot be done in the folder of a member
    that did not own the part.
    """
    folder = home / f"part-{part}"
    entry, trust = _entry_of(entries_of(log), outer_step, entries, log)
    owner = printable(str(entry["owner"]))
    owned = f"; {owner} owned part {part} then: replay it in the folder of {owner}" if owner != member else ""
    cannot = OwnedElsewhere if owned and member else ConfigError
    if not contributions_of(folder).is_dir():
        raise cannot(f"{folder}: no contributions are kept here{owned}")
    if not (home / "run.toml").exists():
        raise cannot(f"{home}: has no run.toml, without which nothing is merged here{owned}")
    _check_config(config := RunConfig.from_toml(home / "run.toml"), entry, home / "run.toml")
    try:
        kept_files(contributions_of(folder), outer_step)
        outer = read_outer(folder, config, run_id, outer_step - 1)
        if outer is None:
            raise cannot(f"{folder}: this member has no state of the part{owned}")
        kept = load_kept(contributions_of(folder), outer_step, outer.schema)
    except StorageError as error:
        raise cannot(f"{error}{owned}") from error
    if any(one.header.round_id != entry["round_id"] for one in kept):
        raise cannot(f"what is kept here of outer step {outer_step} is of a round that came to nothing{owned}")
    return _replayed(entry, trust, outer, kept)


def _check_config(config: RunConfig, entry: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for another configuration than a commit was made under."""
    if (digest := config_digest(config)) != entry["config_digest"]:
        raise ConfigError(
            f"{path}: outer step {entry['outer_step']} was committed under another configuration "
            f"({entry['config_digest'][:12]}, this one is {digest[:12]}); a replay needs the run.toml of then"
        )


def _replayed(entry: Mapping[str, Any], trust: Mapping[str, Any] | None, outer: OuterState, kept: Sequence[Kept]) -> Replayed:
    """Merge once more, and compare. outer: the state before it; trust: what the log says of the trust in peers there."""
    outer_step = outer.outer_step + 1
    if outer.digest != entry["before"]:
        raise LogFault(f"outer step {outer_step - 1} has digest {outer.digest[:12]}, the log says {entry['before'][:12]}")
    if trust is not None and {peer: [each.mean.hex(), each.count] for peer, each in outer.trust.items()} != trust:
        raise LogFault(f"outer step {outer_step - 1}: the trust in peers is not what the log says")
    try:
        _check_kept(kept, entry, UsualWork.of(outer.config))
        _compare(asyncio.run(_merged(kept, outer)), outer, entry)
    except DAMAGE as error:
        raise LogFault(f"the commit to outer step {outer_step}: {error!r}") from error
    return Replayed(
        outer_step=outer_step,
        digest=entry["after"],
        peers=tuple(sorted({one.header.peer_id for one in kept})),
        shards=len(kept),
        bytes=sum(one.header.total_bytes for one in kept),
        less=tuple(sorted({one.header.peer_id for one in kept if _less(one)})),
    )


def _entry_of(
    lines: Iterable[bytes], outer_step: int, signed: int, path: Path
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the last commit to this outer step among the entries that are verified, and the trust in peers before it.

    None: no entry says it, and the log lacks commits. Without such a gap, nobody is trusted before an entry says so.
    """
    found: Mapping[str, Any] | None = None
    trust: Mapping[str, Any] | None = None
    for line in lines:
        if (entry := parse_canonical(line)).get("index") == signed:
            break
        if entry["kind"] in ("genesis", "continued"):
            trust = None if entry["outer_step"] else {}
        if entry["kind"] != "commit":
            continue
        if entry["outer_step"] == outer_step:
            found = entry
        elif entry["outer_step"] < outer_step and "trust" in entry:
            trust = entry["trust"]["peers"]
    if found is None:
        raise ConfigError(f"{path}: has no commit to outer step {outer_step}")
    return found, trust


def _less(one: Kept) -> bool:
    return one.work.inner_steps < one.header.inner_steps or one.work.tokens < one.header.tokens


def _check_kept(kept: Sequence[Kept], entry: Mapping[str, Any], usual: UsualWork) -> None:
    """Rules 2 and 3. Raises LogFault, and what DAMAGE has."""
    named: dict[tuple[str, int, int], tuple[tuple[str, str, str], Sequence[Any]]] = {}
    for peer, given in entry["contributions"].items():
        for values in given["parts"]:
            part = dict(zip(PART, values, strict=False))
            named[peer, part["fragment"], part["rank"]] = (given["key"], part["payload"], part["signature"]), values
    for one in kept:
        header = one.header
        what = f"the contribution of {printable(header.peer_id)} to fragment {header.fragment_id}, rank {header.rank}"
        said, values = named.pop((header.peer_id, header.fragment_id, header.rank), (None, ()))
        given = tuple(base64.b64encode(each).decode() for each in (header.public_key, header.payload_blake3, header.signature))
        if said != given:
            raise LogFault(f"{what} is kept, and is not the one that the log names")
        try:
            check_signature(header, entry["config_digest"])
        except EditError as error:
            raise LogFault(f"{what} is kept with a header that its peer has not signed") from error
        signed = Signed(header.run_id, header.schema_hash, entry["config_digest"])
        heads = seen_heads(entry["contributions"][header.peer_id])
        if not is_signed_part(signed, header.peer_id, header.public_key, values, heads):
            raise LogFault(f"{what}: the log says other things of it than its peer has signed")
        if blake3(one.data).digest() != header.payload_blake3:
            raise LogFault(f"{what} is kept with other bytes than were signed")
        most = usual.most_inner_steps(header.inner_steps, header.outer_step, entry["outer_step"] - 1)
        if one.work.tokens > header.tokens or one.work.inner_steps > most:
            raise LogFault(f"{what} counted for more than its peer claimed")
    for peer, fragment, rank in sorted(named):
        raise LogFault(
            f"the contribution of {printable(peer)} to fragment {fragment}, rank {rank} is in the log, and is not kept"
        )


async def _merged(kept: Sequence[Kept], outer: OuterState) -> list[MergeRecord]:
    """Measure what is to be merged as when it arrived, and merge it. Changes nothing of `outer`."""
    with tempfile.TemporaryDirectory(prefix="edit-replay-") as spill, ThreadPoolExecutor(1) as files:
        uploads = UploadBuffer(outer.config.storage.buffer_bytes, Path(spill), files)
        contributions = Contributions(outer.schema, outer.config.codec.uplink, uploads)
        work: dict[tuple[int, str], Work] = {}
        for one in kept:
            header, what = one.header, f"of {printable(one.header.peer_id)} to fragment {one.header.fragment_id}"
            shard = contributions.declare(header, outer.due)
            if shard is None:
                raise LogFault(f"a contribution {what} is kept twice")
            await shard.upload.write(0, one.data)
            contributions.fragment_of(shard).measured(shard, measure(shard.read()))
            if work.setdefault((header.fragment_id, header.peer_id), one.work) != one.work:
                raise LogFault(f"the shards {what} count differently")
        fragments: dict[int, list[Measured]] = {i: [] for i in outer.due}
        for (fragment_id, peer_id), counts in work.items():
            held = contributions.of_peer(peer_id)
            assert held is not None
            whole = held.whole(fragment_id, outer.outer_step)
            fragments[fragment_id].append(replace(whole, inner_steps=counts.inner_steps, tokens=counts.tokens))
        policy = admission(outer.config)
        screened = {i: screen(policy, outer.schema.fragments[i], measured) for i, measured in fragments.items()}
        if not outer.config.robust.of_model:
            return [outer.record(each.and_rejected(outer.reduce(i, each.admitted))) for i, each in screened.items()]
        chosen = outer.choose(fragments, {verdict.peer_id for each in screened.values() for verdict in each.rejected})
        return [outer.record(outer.reduce_chosen(i, measured, chosen)) for i, measured in fragments.items()]


def _compare(records: Sequence[MergeRecord], outer: OuterState, entry: Mapping[str, Any]) -> None:
    """Rule 4. Raises LogFault, and what DAMAGE has."""
    staged = outer.stage_all(records, None, {})
    logged = {one["fragment"]: one for one in entry["fragments"]}
    for record in records:
        i = record.fragment_id
        mine = parse_canonical(canonical(fragment_entry(record, staged[i], merged="merged" in logged[i])))
        for key in sorted(mine.keys() | logged[i].keys()):
            if mine.get(key) != logged[i].get(key):
                raise LogFault(
                    f"outer step {entry['outer_step']}, fragment {i}: merged once more, {_NAMES.get(key, key)} is "
                    f"{_shown(mine.get(key))}, the log says {_shown(logged[i].get(key))}"
                )
    if (digest := outer.digest_after(staged)) != entry["after"]:
        raise LogFault(
            f"outer step {entry['outer_step']}: it leads to digest {digest[:12]}, the log says {entry['after'][:12]}"
        )


_NAMES = {"merged": "the merged pseudo-gradient", "merged_norm": "its norm", "update": "the update", "verdicts": "who counted"}


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
