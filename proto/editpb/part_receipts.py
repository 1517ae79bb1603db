"""What a peer of a swarm holds an entry of the audit log of a part to: what it has sent itself, and the update that it took.

The entry comes from the host beside the peer, which keeps the log and has checked the rest before it held the update
(`editpb.part_entries`). The peer knows two things that no other member does: what it has signed, and that the owner has said
that all of it is there. So it alone notices an owner that leaves it out. It keeps which entries it has seen
(`editpb.seen_entries`), and holds later ones to these, also after a restart.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any

from edit.errors import RefusedError
from edit.records import Commit
from edit.trust.canonical import parse_canonical
from edit.trust.merkle import MerkleTree, leaf_hash, verify_consistency
from editpb.audit_log import DAMAGE, Signed, check_rounds
from editpb.limits import MAX_ENTRY_BYTES
from editpb.messages import LoggedEntry
from editpb.owner_signatures import check_owner
from editpb.receipts import Mine, ReceiptFault, check_mine
from editpb.seen_entries import SeenEntry

__all__ = ["ExpectedLog", "LoggedCommit", "Outcome", "check_logged"]


class Outcome(Enum):
    """What an entry says of this peer's contribution to its round."""

    MERGED = "merged"
    MISSING = "did not come"  # in the owner's words
    UNMERGED = "came too late to be merged"
    NOTHING = "nothing was sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLog:
    """What an entry is held to."""

    run_id: str
    part: int
    config_digest: str
    schema_hash: str  # of the part; empty: this peer has signed nothing yet
    commit: Commit  # the update that this peer took
    seen: SeenEntry | None  # the last entry before it that this peer has seen; None: it has seen none
    again: SeenEntry | None  # the entry of this outer step, as this peer has seen it before; None: it has not
    mine: Mine
    # The fragments of which the owner has said that it has them whole, by round.
    whole: Mapping[int, AbstractSet[int]]


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """An entry that fits."""

    owner: str
    round_id: int
    outcome: Outcome
    left_out: bool  # whether the owner has said of each fragment that it is there, and nothing of this peer is merged
    seen: SeenEntry
    linked: bool  # whether it is shown to go on from the entries that this peer has seen, if any


def check_logged(logged: LoggedEntry, expected: ExpectedLog) -> LoggedCommit:
    """Return what an entry says of this peer. Raises ReceiptFault, which names the owner where it has signed the entry."""
    owner = ""
    try:
        if len(logged.entry) > MAX_ENTRY_BYTES:
            raise ValueError(f"it has {len(logged.entry)} bytes")
        entry = parse_canonical(logged.entry)
        if not isinstance(entry, dict) or entry["kind"] != "commit":
            raise ValueError("it is no commit")
        check_owner(expected.run_id, entry)
        owner = str(entry["owner"])
        seen, linked = _follows(logged, entry, expected)
        _check_commit(entry, expected)
        outcome = _outcome(entry, expected)
    except RefusedError as error:  # a ReceiptFault, too
        raise ReceiptFault(_named(owner, str(error))) from error
    except DAMAGE as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ReceiptFault(_named(owner, f"the entry is no entry of a commit: {why}")) from error
    round_id = int(entry["round_id"])
    due = {fragment["fragment"] for fragment in entry["fragments"]}
    left_out = outcome is not Outcome.MERGED and bool(due) and due <= expected.whole.get(round_id, frozenset())
    return LoggedCommit(owner, round_id, outcome, left_out, seen, linked)


def _named(owner: str, why: str) -> str:
    return f"{why}, by the entry that {owner[:64]} has signed" if owner else why


def _follows(logged: LoggedEntry, entry: Mapping[str, Any], expected: ExpectedLog) -> tuple[SeenEntry, bool]:
    """Return the entry as it is seen now, and whether it is shown to follow those that were seen before."""
    step, leaf = expected.commit.outer_step, leaf_hash(logged.entry)
    tree = MerkleTree.after(step, logged.peaks)
    if (entry["index"], entry["root"]) != (step, tree.root().hex()):
        raise ReceiptFault(f"entry {step} of the log is not the one that follows the {step} entries before it")
    linked = expected.seen is None or _goes_on(expected.seen, step, tree.root(), logged.consistency)
    tree.append(leaf)
    seen = SeenEntry(step, leaf, tree.root())
    if expected.again is not None and expected.again != seen:
        raise ReceiptFault(f"entry {step} of the log is another one than this peer has seen before")
    return seen, linked


def _goes_on(seen: SeenEntry, size: int, root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether these entries are shown to begin with those that were seen. Raises ReceiptFault where they do not."""
    if seen.size < size and not proof:
        return False
    if not verify_consistency(seen.size, size, proof if seen.size < size else (), seen.root, root):
        raise ReceiptFault(f"the log does not go on from the {seen.size} entries that this peer has seen")
    return True


def _check_commit(entry: Mapping[str, Any], expected: ExpectedLog) -> None:
    commit = expected.commit
    known = {"part": expected.part, "outer_step": commit.outer_step, "config_digest": expected.config_digest}
    for name, value in known.items():
        if entry[name] != value:
            raise RefusedError(f"the log says {name} = {str(entry[name])[:64]}, this peer knows {value}")
    if entry["round_id"] != commit.round_id or entry["after"] != commit.digest:
        raise RefusedError(
            f"outer step {commit.outer_step} is of round {str(entry['round_id'])[:20]} and leads to {str(entry['after'])[:12]} "
            f"by the log, of round {commit.round_id} and to {commit.digest[:12]} by the update that this peer took"
        )
    logged = {one["fragment"]: one["verdicts"] for one in entry["fragments"]}
    if sorted(logged) != [one.fragment_id for one in commit.fragments]:
        raise RefusedError("the log has other fragments than the update that this peer took")
    for one in commit.fragments:
        said = {verdict.peer_id: [verdict.verdict.value, float(verdict.weight).hex()] for verdict in one.verdicts}
        if {peer: [verdict, weight] for peer, (verdict, _, weight, *_) in logged[one.fragment_id].items()} != said:
            raise RefusedError(f"the verdicts on fragment {one.fragment_id} are others by the log than by the update")
    try:
        check_rounds(entry, 0)  # rounds.max_staleness of a swarm that keeps logs
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _outcome(entry: Mapping[str, Any], expected: ExpectedLog) -> Outcome:
    """Return what the entry says of this peer's contribution, which must be as it was signed."""
    mine, named = expected.mine, entry["contributions"]
    fragments: Sequence[Mapping[str, Any]] = entry["fragments"]
    judged = {one["fragment"] for one in fragments if mine.peer_id in one["verdicts"]}
    given = named.get(mine.peer_id)
    if judged != {values[0] for values in (given["parts"] if given is not None else ())}:
        raise RefusedError("of this peer the log has a verdict or a contribution, and not both")
    if given is not None and not expected.schema_hash:  # of an earlier life; the host has verified the signature
        if not mine.has(base64.b64decode(given["key"], validate=True)):
            raise RefusedError("the log names another key as this peer's")
        return Outcome.MERGED
    check_mine(entry, mine, Signed(expected.run_id, expected.schema_hash, expected.config_digest))
    if given is not None:
        return Outcome.MERGED
    if mine.peer_id in entry["missing"]:
        return Outcome.MISSING
    return Outcome.UNMERGED if mine.peer_id in entry["unmerged"] else Outcome.NOTHING
