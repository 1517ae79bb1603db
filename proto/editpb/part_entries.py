"""The entries of the audit log of one part of a swarm, which each member keeps, and what a member checks before it holds one.

The first one is the part's genesis, which all members compute alike. Entry t is the commit to outer step t, as of a run with a
coordinator (`editpb.audit_log`), with the part, its owner, the grant, and the owner's signature. Where sites have said since
the entry before that they consent to the configuration, it has their signed consents, too. A log that a member was not there to
see begin has in place of what it lacks a first line of the kind `begins`, which is no entry: the number of entries before, the
hashes that their tree goes on from, and the outer parameters there.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edit.config.run import RunConfig
from edit.errors import RemoteProtocolError
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.merkle import HASH_BYTES, MerkleTree, leaf_hash
from editpb.audit_log import DAMAGE, PART, PARTLY, Signed, consent_entry, consent_in, is_signed_part, left_out_fragments
from editpb.consents import check_consent
from editpb.limits import MAX_DATA_CHARS, MAX_ENTRY_BYTES, MAX_VERDICTS, is_id
from editpb.owner_signatures import check_owner
from editpb.signed_contributions import config_digest

__all__ = [
    "CONSENTS",
    "MOST_CONSENTS",
    "EntryFault",
    "ExpectedEntry",
    "begins_line",
    "begun_with",
    "check_entry",
    "consent_name",
    "consents_named",
    "genesis_line",
    "named_signatures",
]

CONSENTS = "consents"  # of sites, said since the entry before: entries as `audit_log.consent_entry` makes them, by peer
MOST_CONSENTS = 64  # in one entry

# What an entry has that a member cannot compute; it checks what it can of that.
_CLAIMED = {"time", "missing", "unmerged", "contributions", "key", "signature"}
_MOST_TIME = 1 << 53  # seconds since 1970
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("codec", "boxes", "payload", "signature")  # of PART; all others are numbers


class EntryFault(RemoteProtocolError):
    """An owner's entry of the audit log is not what it must be. The text says in what."""


def genesis_line(run_id: str, part: int, config: RunConfig, schema_hash: str, digest: str) -> bytes:
    """Return the first entry of a part's log. digest: of the outer parameters that the run was founded with."""
    known = {"run_id": run_id, "part": part, "config": config.to_json(), "config_digest": config_digest(config)}
    where = {"outer_step": 0, "digest": digest, "schema_hash": schema_hash}
    return canonical({"index": 0, "root": MerkleTree().root().hex(), "kind": "genesis", **known, **where})


def begins_line(
    run_id: str, part: int, config: RunConfig, schema_hash: str, outer_step: int, digest: str, peaks: Sequence[bytes]
) -> bytes:
    """Return the first line of a log whose entries before are not here. outer_step, digest: of the last of these.

    peaks: `MerkleTree.peaks` of them.
    """
    known = {"run_id": run_id, "part": part, "config_digest": config_digest(config), "schema_hash": schema_hash}
    where = {"outer_step": outer_step, "digest": digest, "peaks": [each.hex() for each in peaks]}
    return canonical({"kind": "begins", **known, **where})


def begun_with(line: bytes) -> tuple[MerkleTree, str]:
    """Return the tree after the first line of a log, and the digest of its configuration.

    Raises ValueError, KeyError, TypeError for a damaged one.
    """
    values = parse_canonical(line)
    if values["kind"] == "begins":
        tree = MerkleTree.after(int(values["outer_step"]) + 1, [bytes.fromhex(each) for each in values["peaks"]])
    else:
        tree = MerkleTree([leaf_hash(line)])
    return tree, str(values["config_digest"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEntry:
    """What an owner's entry is held to."""

    signed: Signed
    tree: MerkleTree  # of the entries before it
    says: Mapping[str, object]  # what the member has computed itself, or knows
    numel: Mapping[int, int]  # elements of each fragment that is due
    # Returns whether a member's key counts for the entry, or raises OutdatedError; None: the members have agreed on the entry
    # before, and a key may have been replaced since.
    counts: Callable[[str, bytes], bool] | None


def check_entry(line: bytes, expected: ExpectedEntry) -> None:
    """Raise EntryFault, which says what is wrong, unless a member may hold an update with this entry.

    Raises OutdatedError where that cannot be told here: see `ExpectedEntry.counts`.
    """
    try:
        if len(line) > MAX_ENTRY_BYTES:
            raise ValueError(f"it has {len(line)} bytes, at most {MAX_ENTRY_BYTES} are read")
        entry = parse_canonical(line)
        _check_says(entry, expected)
        _check_claims(entry)
        _check_contributions(entry, expected)
        if CONSENTS in entry:
            _check_consents(entry[CONSENTS], expected)
        _check_key(str(entry["owner"]), base64.b64decode(entry["key"], validate=True), expected)
        check_owner(expected.signed.run_id, entry)
    except RemoteProtocolError as error:
        raise EntryFault(f"the owner's entry of the audit log: {error}") from error
    except DAMAGE as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise EntryFault(f"the owner's entry of the audit log: {why}") from error


def named_signatures(line: bytes) -> dict[tuple[int, str, int], bytes]:
    """Return the signature of each shard that an entry names, by fragment, peer and rank. Raises EntryFault."""
    try:
        return {
            (part["fragment"], peer, part["rank"]): base64.b64decode(part["signature"], validate=True)
            for peer, given in parse_canonical(line)["contributions"].items()
            for part in map(_part, given["parts"])
        }
    except DAMAGE as error:
        raise EntryFault(f"the owner's entry of the audit log: {error}") from error


def _check_says(entry: Any, expected: ExpectedEntry) -> None:
    tree = expected.tree
    says = {name: each for name, each in expected.says.items() if name not in _CLAIMED}
    wanted = {"index": len(tree), "root": tree.root().hex(), **parse_canonical(canonical(says))}
    if not isinstance(entry, dict) or entry.keys() - {CONSENTS, PARTLY} != wanted.keys() | _CLAIMED | {"owner"}:
        raise ValueError("it has not the fields of the commit of a part")
    for name, value in wanted.items():
        if canonical(entry[name]) != canonical(value):
            raise ValueError(f"{_where(name, entry[name], value)}: it says otherwise than was computed here")


def _where(name: str, said: Any, wanted: Any) -> str:
    """Return what differs, in words."""
    if name == "fragments" and isinstance(said, list) and len(said) == len(wanted):
        for theirs, ours in zip(said, wanted, strict=True):
            if theirs != ours and isinstance(theirs, dict):
                keys = [key for key in ours if theirs.get(key) != ours[key]]
                return f"{keys[0] if keys else 'description'} of fragment {ours['fragment']}"
    return name


def _check_claims(entry: Mapping[str, Any]) -> None:
    if type(entry["time"]) is not int or not 0 <= entry["time"] < _MOST_TIME:
        raise ValueError("its time is no time")
    if not _is_name(entry["owner"]):
        raise ValueError("its owner is no member")
    for name in ("missing", "unmerged"):
        peers = entry[name]
        if not isinstance(peers, list) or len(peers) > MAX_VERDICTS or not all(map(_is_name, peers)):
            raise ValueError(f"its {name} is no list of members")
        if peers != sorted(set(peers)):
            raise ValueError(f"its {name} is not in order, each member once")
    left_out_fragments(entry)


def _check_contributions(entry: Mapping[str, Any], expected: ExpectedEntry) -> None:
    """Check that each verdict is of a whole contribution to this round, signed by who is enrolled under its name."""
    counted: dict[tuple[int, str], int] = {}  # elements, by fragment and peer
    for peer, given in entry["contributions"].items():
        if not _is_name(peer) or given.keys() != {"key", "parts"} or not given["parts"]:
            raise ValueError(f"what it names of {str(peer)[:64]} is no contribution")
        key = base64.b64decode(given["key"], validate=True)
        _check_key(peer, key, expected)
        shards = set[tuple[int, int]]()
        for values in given["parts"]:
            part = _part(values)
            i, who = part["fragment"], f"the contribution of {peer} to fragment {part['fragment']}"
            if (i, part["rank"]) in shards or i not in expected.numel:
                raise ValueError(f"{who} is there twice, or the fragment is not due")
            shards.add((i, part["rank"]))
            if (part["round_id"], part["outer_step"]) != (entry["round_id"], entry["outer_step"] - 1):
                raise ValueError(f"{who} is to another round than was merged")
            if not is_signed_part(expected.signed, peer, key, values, ()):
                raise ValueError(f"{who}: {peer} has not signed what the entry says")
            counted[i, peer] = counted.get((i, peer), 0) + part["numel"]
    for fragment in entry["fragments"]:
        i = fragment["fragment"]
        if named := set(fragment["verdicts"]) ^ {peer for of, peer in counted if of == i}:
            who = ", ".join(sorted(named))
            raise ValueError(f"of {who} it has a verdict on fragment {i} or a contribution to it, not both")
    for (i, peer), numel in counted.items():
        if numel != expected.numel[i]:
            raise ValueError(f"the contribution of {peer} to fragment {i} has {numel} elements, not {expected.numel[i]}")


def consent_name(said: Mapping[str, Any]) -> str:
    """Return by what a consent of an entry is known: all of it but the signature, which may be made anew."""
    return leaf_hash(canonical({name: each for name, each in said.items() if name != "signature"})).hex()


def consents_named(line: bytes) -> dict[str, str]:
    """Return the `consent_name` of each consent in an entry that was verified, by peer."""
    if f'"{CONSENTS}":['.encode() not in line:
        return {}
    said = parse_canonical(line).get(CONSENTS, ())
    return {str(each["peer"]): consent_name(each) for each in said}


def _check_consents(said: Any, expected: ExpectedEntry) -> None:
    """Check that these are consents of members, each with its own key, to the run's configuration."""
    if not isinstance(said, list) or not 0 < len(said) <= MOST_CONSENTS:
        raise ValueError("its consents are no list of some")
    peers = [each["peer"] for each in said]
    if not all(map(_is_name, peers)) or peers != sorted(set(peers)):
        raise ValueError("its consents are not in order, one of each member")
    for each in said:
        peer_id, consent = consent_in(each)
        data = consent.data
        texts = [text.isprintable() and len(text) <= MAX_DATA_CHARS for text in (data.statement, data.licence)]
        if canonical(consent_entry(peer_id, consent)) != canonical(each) or not all(texts):
            raise ValueError(f"the consent of {peer_id} is written otherwise")
        if any(text and not _DIGEST.fullmatch(text) for text in (data.manifest, consent.policy_digest)):
            raise ValueError(f"the consent of {peer_id} names a digest that is none")
        check_consent(consent, expected.signed.run_id, peer_id, expected.signed.config_digest)
        _check_key(peer_id, consent.public_key, expected)


def _part(values: Any) -> dict[str, Any]:
    """Return what `PART` names. Raises ValueError for values of other kinds: a signature would not tell 1 from true."""
    if not isinstance(values, list) or len(values) != len(PART):
        raise ValueError("a shard of a contribution has other values than are known")
    part = dict(zip(PART, values, strict=True))
    for name, value in part.items():
        number = type(value) is int and value >= int(name == "numel")
        if not (type(value) is str if name in _TEXTS else number):
            raise ValueError(f"a shard of a contribution has the {name} {str(value)[:40]}")
    if len(base64.b64decode(part["payload"], validate=True)) != HASH_BYTES:
        raise ValueError("the hash of a contribution is none")
    return part


def _check_key(peer: str, key: bytes, expected: ExpectedEntry) -> None:
    if expected.counts is not None and not expected.counts(peer, key):
        raise ValueError(f"it names a key of {peer} that it is not enrolled for")


def _is_name(peer: object) -> bool:
    return isinstance(peer, str) and is_id(peer)
