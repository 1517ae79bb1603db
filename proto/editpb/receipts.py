"""The receipt of a commit: that it stands in the run's audit log, and that this is the log that the peer has seen before.

A receipt has the commit's entry, a signed head of the log, and proofs. Whoever keeps the head of each receipt holds the log to
it: no later log without those entries has a proof that it begins with them. Contributions carry their signer's last head, so
what one peer was shown is held to what every other one was.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edit.errors import RefusedError
from edit.trust.canonical import parse_canonical
from edit.trust.checkpoints import NoteKey, open_note, parse_checkpoint, signature_of
from edit.trust.merkle import EMPTY_ROOT, leaf_hash, verify_consistency, verify_inclusion
from edit.trust.signatures import key_hash
from editpb.audit_log import (
    DAMAGE,
    PART,
    Signed,
    agreed_set,
    check_rounds,
    counts_anybody,
    is_signed_part,
    left_out_fragments,
    seen_heads,
)
from editpb.messages import ContributionHeader, LogReceipt, SeenHead, UpdateManifest

__all__ = ["NOTHING_SEEN", "Expected", "Head", "Mine", "ReceiptFault", "SeenMasks", "check_mine", "check_receipt"]

_ROUNDS = 16  # the last ones whose contributions are remembered


class ReceiptFault(RefusedError):
    """A receipt does not fit what the peer has sent, or has seen of the log."""


@dataclass(frozen=True, slots=True)
class Head:
    """A head of the log, as a peer keeps it."""

    size: int
    root: bytes
    note: str = ""  # the signed note; empty where nothing was seen

    def seen(self, key: NoteKey) -> SeenHead | None:
        """Return what contributions carry of it; None of no entries."""
        return SeenHead(self.size, self.root, signature_of(self.note, key)) if self.size else None


NOTHING_SEEN = Head(0, EMPTY_ROOT)


@dataclass(frozen=True, slots=True)
class SeenMasks:
    """What a peer knows of a masked round."""

    roster: bytes  # the hash of the roster that it was shown
    # Who has shared keys, and whose sum it has signed for; None: it has signed for none.
    agreed: tuple[frozenset[str], frozenset[str]] | None = None


@dataclass(frozen=True, slots=True)
class Mine:
    """What a peer knows of its own contributions."""

    peer_id: str
    public_key: bytes  # DER
    # By round: the signatures of what rank 0 has sent, by fragment; one that was signed anew has several.
    signatures: Mapping[int, Mapping[int, Sequence[bytes]]] = field(default_factory=dict)
    since: int = 0  # the attempt that these begin with: what has an earlier one, an earlier process has sent
    # Round and fragment of what was said to be there whole, of rounds that take nothing that was sent for another round.
    delivered: frozenset[tuple[int, int]] = frozenset()
    masks: Mapping[int, SeenMasks] = field(default_factory=dict)  # by masked round
    earlier: frozenset[str] = frozenset()  # hashes of the keys that it had before, as its own folder or operator says

    def has(self, key: bytes) -> bool:
        """Return whether a public key (DER) is this peer's, or was."""
        return key == self.public_key or key_hash(key) in self.earlier

    def with_signed(self, header: ContributionHeader) -> Mine:
        """Return it with what the peer has signed now, too."""
        rounds = {number: dict(each) for number, each in self.signatures.items()}
        of_round = rounds.setdefault(header.round_id, {})
        of_round[header.fragment_id] = (*of_round.get(header.fragment_id, ()), header.signature)[-_ROUNDS:]
        last = {each: rounds[each] for each in sorted(rounds)[-_ROUNDS:]}
        since = self.since if self.signatures else header.attempt
        return replace(self, signatures=last, since=since)

    def with_delivered(self, round_id: int, fragment_id: int) -> Mine:
        """Return it with a fragment of which a round has said that it has all of a shard."""
        delivered = {*self.delivered, (round_id, fragment_id)}
        last = sorted({number for number, _ in delivered})[-_ROUNDS:]
        return replace(self, delivered=frozenset(each for each in delivered if each[0] in last))

    def with_masks(self, round_id: int, seen: SeenMasks) -> Mine:
        """Return it with what the peer knows of a masked round."""
        masks = {**self.masks, round_id: seen}
        return replace(self, masks={each: masks[each] for each in sorted(masks)[-_ROUNDS:]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a receipt is held to."""

    key: NoteKey  # of the log
    run_id: str
    schema_hash: str
    seen: Head  # the last head that was accepted
    manifest: UpdateManifest  # of the update that the receipt came with
    before: str  # digest of theta before the step; empty: not known
    mine: Mine
    # Hashes of the keys of the members that this peer knows, by name, earlier ones, too; None: of none.
    members: Mapping[str, tuple[str, ...]] | None = None
    masked: bool = False  # whether contributions are masked in this run
    # rounds.max_staleness, and `config_digest` of the configuration that has it; empty: it is that of the entry.
    max_staleness: int = 0
    config_digest: str = ""


def check_receipt(receipt: LogReceipt, expected: Expected) -> tuple[Head, dict[str, Any]]:
    """Return the head that is seen now, and the commit's entry. Raises ReceiptFault, which names what does not fit."""
    head = _head(receipt, expected)
    try:
        entry = parse_canonical(receipt.entry)
        _check_entry(receipt, entry, head, expected)
        _check_commit(entry, expected.manifest, expected.before)
        _check_contributions(entry, expected)
        _check_rounds(entry, expected)
        check_mine(entry, expected.mine, _signed(entry, expected))
        _check_masked(entry, expected)
        _check_seen(receipt, entry, head, expected)
    except DAMAGE as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ReceiptFault(f"the entry of the commit is no entry of a commit: {what}") from error
    return head, entry


def _head(receipt: LogReceipt, expected: Expected) -> Head:
    """Return the receipt's head: signed by the log, and of a log that begins with what was seen."""
    seen, key = expected.seen, expected.key
    try:
        text, _ = open_note(receipt.checkpoint, [key])
        checkpoint = parse_checkpoint(text)
    except ValueError as error:
        raise ReceiptFault(f"the head of the log is not signed with the key that this peer knows: {error}") from error
    if checkpoint.origin != key.name:
        raise ReceiptFault(f"the head is of the log {checkpoint.origin}, not of {key.name}")
    if checkpoint.size < seen.size:
        raise ReceiptFault(f"the log has {checkpoint.size} entries now, this peer has seen {seen.size}: entries were removed")
    if not verify_consistency(seen.size, checkpoint.size, receipt.consistency, seen.root, checkpoint.root):
        raise ReceiptFault(f"the log does not begin with the {seen.size} entries that this peer has seen")
    return Head(checkpoint.size, checkpoint.root, receipt.checkpoint)


def _check_entry(receipt: LogReceipt, entry: dict[str, Any], head: Head, expected: Expected) -> None:
    if entry["index"] != receipt.index:
        raise ReceiptFault(f"the entry of the commit is number {entry['index']}, the receipt says {receipt.index}")
    if not verify_inclusion(leaf_hash(receipt.entry), receipt.index, head.size, receipt.inclusion, head.root):
        raise ReceiptFault(f"entry {receipt.index} is not in the log of {head.size} entries")
    if entry["kind"] != "commit":
        raise ReceiptFault(f"entry {receipt.index} is of the kind {entry['kind']}, not a commit")


def _check_commit(entry: dict[str, Any], manifest: UpdateManifest, before: str) -> None:
    step = manifest.outer_step
    if (entry["outer_step"], entry["round_id"]) != (step, manifest.round_id):
        raise ReceiptFault(
            f"the entry is of outer step {entry['outer_step']}, round {entry['round_id']}; "
            f"the update is of outer step {step}, round {manifest.round_id}"
        )
    if entry["after"] != manifest.digest:
        raise ReceiptFault(
            f"theta after outer step {step} has the digest {str(entry['after'])[:12]} by the log, "
            f"{manifest.digest[:12]} by the update"
        )
    if before and entry["before"] != before:
        raise ReceiptFault(
            f"theta before outer step {step} has the digest {str(entry['before'])[:12]} by the log, {before[:12]} at this peer"
        )
    logged = {one["fragment"]: one for one in entry["fragments"]}
    if sorted(logged) != [update.commit.fragment_id for update in manifest.fragments]:
        raise ReceiptFault(f"outer step {step} has other fragments by the log than by the update")
    for update in manifest.fragments:
        commit = update.commit
        one = logged[commit.fragment_id]
        if (one["update"] is None) != (update.codec is None):
            raise ReceiptFault(f"fragment {commit.fragment_id} is rolled back by the log or by the update, and not by both")
        said = {verdict.peer_id: [verdict.verdict.value, float(verdict.weight).hex()] for verdict in commit.verdicts}
        if {peer: [verdict, weight] for peer, (verdict, _, weight, *_) in one["verdicts"].items()} != said:
            raise ReceiptFault(f"the verdicts on fragment {commit.fragment_id} are others by the log than by the update")


def _check_contributions(entry: dict[str, Any], expected: Expected) -> None:
    """Check that each verdict is of somebody whose contribution is named."""
    contributed: dict[int, set[str]] = {}
    for peer, given in entry["contributions"].items():
        for values in given["parts"]:
            contributed.setdefault(values[0], set()).add(peer)
    for peer, given in sorted(entry["contributions"].items()):
        _check_known(expected, peer, base64.b64decode(given["key"], validate=True))
    mine = expected.mine.peer_id
    for fragment in entry["fragments"]:
        named, judged = contributed.get(fragment["fragment"], set()), set(fragment["verdicts"])
        if mine in judged and mine not in named:
            raise ReceiptFault(
                f"the log lacks the contribution of this peer to fragment {fragment['fragment']}, which was merged"
            )
        if named != judged:
            who = ", ".join(sorted(named ^ judged))
            raise ReceiptFault(f"fragment {fragment['fragment']}: of {who} the log has a verdict or a contribution, not both")


def _check_rounds(entry: dict[str, Any], expected: Expected) -> None:
    """Check that what was merged was sent for this round, or is no older than the run permits.

    What was committed under another configuration, as before a restart of this peer, may be of any age.
    """
    known = expected.config_digest in ("", entry["config_digest"])
    try:
        check_rounds(entry, expected.max_staleness if known else entry["outer_step"])
    except ValueError as error:
        raise ReceiptFault(str(error)) from error


def _check_known(expected: Expected, peer_id: str, key: bytes) -> None:
    """Check that a key is one that this peer knows of a member, if it knows any of it."""
    known = (expected.members or {}).get(peer_id)
    own = peer_id == expected.mine.peer_id and expected.mine.has(key)
    if known is not None and not own and key_hash(key) not in known:
        raise ReceiptFault(f"the log names another key of {peer_id} than the one that this peer knows")


def check_mine(entry: Mapping[str, Any], mine: Mine, signed: Signed) -> None:
    """Check that an entry names a peer's own contribution as it was sent, or says that it is not in it.

    One that is signed with an earlier key of the peer must be to a round before those to which this process sent something.

    Raises ReceiptFault, and what DAMAGE has for what is no entry of a commit.
    """
    round_id = entry["round_id"]
    given = entry["contributions"].get(mine.peer_id)
    delivered = {fragment for number, fragment in mine.delivered if number == round_id}
    if given is None:
        named = mine.peer_id in entry["missing"] or mine.peer_id in entry.get("unmerged", ())
        if delivered and not named:
            raise ReceiptFault(
                f"the log neither names the contribution of this peer to round {round_id}, nor says that it is missing"
            )
        return
    named_of = {values[0] for values in given["parts"]}.union(left_out_fragments(entry).get(mine.peer_id, ()))
    if left := sorted(delivered.intersection(one["fragment"] for one in entry["fragments"]) - named_of):
        raise ReceiptFault(
            f"the log neither names the contribution of this peer to round {round_id}, fragment {left[0]}, nor says that it "
            "was not merged"
        )
    if not mine.has(key := base64.b64decode(given["key"], validate=True)):
        raise ReceiptFault("the log names another key as this peer's")
    heads = seen_heads(given)
    for values in given["parts"]:
        part = dict(zip(PART, values, strict=False))
        known = mine.signatures.get(part["round_id"])
        signature = base64.b64decode(part["signature"], validate=True)
        # Then it counts whether this peer has signed it.
        unknown = part["rank"] or known is None or part["attempt"] < mine.since
        if key != mine.public_key:  # this process has signed nothing with it
            unknown = all(part["round_id"] < each for each in mine.signatures)
        sent = unknown or (known is not None and signature in known.get(part["fragment"], ()))
        if not sent or not is_signed_part(signed, mine.peer_id, key, values, heads):
            raise ReceiptFault(
                f"the log names another contribution of this peer to round {part['round_id']}, fragment {part['fragment']} "
                "than it sent"
            )


def _check_masked(entry: dict[str, Any], expected: Expected) -> None:
    """Check that the sum that was opened is the one that this peer has signed for, and that enough others have signed, too."""
    round_id, seen = entry["round_id"], expected.mine.masks.get(entry["round_id"])
    try:
        if (agreed := agreed_set(expected.run_id, entry)) is not None:
            agreed.check()
    except ValueError as error:
        raise ReceiptFault(f"the masked round {round_id}: {error}") from error
    if agreed is None:
        if expected.masked and counts_anybody(entry):
            raise ReceiptFault(f"the log does not say whose sum was opened in round {round_id}, and who has confirmed that")
        return
    if seen is not None and seen.roster != agreed.roster.hash:
        raise ReceiptFault(f"the log has another roster of the masked round {round_id} than this peer was shown")
    if seen is not None and seen.agreed is not None and seen.agreed != (agreed.sharers, agreed.survivors):
        raise ReceiptFault(
            f"the log says that the sum of {', '.join(sorted(agreed.survivors))} was opened in round {round_id}, "
            f"this peer has signed for that of {', '.join(sorted(seen.agreed[1]))}"
        )
    for advert in agreed.roster.adverts:
        _check_known(expected, advert.peer_id, advert.public_key)


def _check_seen(receipt: LogReceipt, entry: dict[str, Any], head: Head, expected: Expected) -> None:
    """Check that the log is the one of which the others have seen the heads that they have signed with their contributions.

    The first of the parts that name a head is verified: who signs it has seen that head, whatever the other parts say.
    """
    signed = _signed(entry, expected)
    for peer, given in entry["contributions"].items():
        heads, key = seen_heads(given), base64.b64decode(given["key"], validate=True)
        first = {values[-1]: values for values in reversed(given["parts"]) if type(values[-1]) is int}
        if sorted(first) != list(range(len(heads))):
            raise ReceiptFault(f"the contribution of {peer} names other heads of the log than it carries")
        for place, values in first.items():
            if not is_signed_part(signed, peer, key, values, heads):
                raise ReceiptFault(f"what {peer} has seen of the log is not signed by it")
            one = heads[place]
            proof = receipt.seen.get(one.size)
            if proof is None or not verify_consistency(one.size, head.size, proof, one.root, head.root):
                raise ReceiptFault(
                    f"{peer} has seen another log of {one.size} entries, with the root {one.root.hex()}: this one does not "
                    "begin with it"
                )


def _signed(entry: dict[str, Any], expected: Expected) -> Signed:
    return Signed(expected.run_id, expected.schema_hash, str(entry["config_digest"]))
