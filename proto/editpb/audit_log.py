"""The entries of an audit log, and their verification by anybody who has a copy.

An entry is one line of canonical JSON (`edit.trust.canonical`). Each has its `index`, the `root` of the tree of all entries
before it (RFC 6962), its `kind` and the `time` (unix seconds) by the coordinator's clock.

    genesis    the first one: the run, the log's public key, the configuration, the outer parameters' digest
    config     the configuration is another one from here on
    continued  the log goes on from this outer step: commits between were not logged, or were lost
    consent    a peer's site consents to this configuration, signed with the peer's key
    approval   an approver approves a change of this configuration to another one, signed with the approver's key
    score      what a scorer says of the contributions to the commit before it (`edit.merging.trust`), signed
    commit     one outer step: what was contributed, with signatures, the verdicts, and the digests before and after it

In a swarm there is a log of each part, and no key of it: the owner of the part signs each entry (`editpb.part_entries`).
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from edit.config.run import RunConfig
from edit.council.record import recoveries
from edit.errors import ConfigError, EditError, RefusedError, RemoteProtocolError
from edit.plain_text import parse_json
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.checkpoints import NoteKey, open_note, parse_checkpoint, signatures_under
from edit.trust.mask_roster import Advert, AgreedSet, Roster, RoundName
from edit.trust.merkle import HASH_BYTES, MerkleTree, leaf_hash
from edit.trust.signatures import is_signed, key_hash
from editpb.approvals import ApprovalRules
from editpb.consents import check_consent
from editpb.limits import MAX_ENTRY_BYTES, is_id
from editpb.logged_privacy import LoggedPrivacy, bound_of
from editpb.messages import (
    Approval,
    ConfigChange,
    Configuration,
    Consent,
    ContributionHeader,
    DataStatement,
    ScoreReport,
    SeenHead,
)
from editpb.owner_signatures import check_owner
from editpb.signed_contributions import boxes_digest, config_digest, contribution_statement
from editpb.signed_scores import check_scores

if TYPE_CHECKING:  # torch, which whoever verifies need not load
    from cryptography.x509 import Certificate

    from edit.merging.injection import Injected
    from edit.merging.outer_state import MergeRecord, Staged
    from edit.merging.trust import Trust
    from edit.records import Commit, EncodedTensor, PeerVerdict

__all__ = [
    "DAMAGE",
    "Changed",
    "LogFault",
    "LogVerifier",
    "Recovered",
    "RoundFacts",
    "Signed",
    "Usage",
    "agreed_set",
    "approval_entry",
    "approval_in",
    "check_length",
    "check_rounds",
    "claimed_privacy",
    "commit_entry",
    "completed",
    "config_entry",
    "consent_entry",
    "consent_in",
    "continued_entry",
    "counts_anybody",
    "entry_line",
    "fragment_entry",
    "genesis_entry",
    "is_masked",
    "is_signed_part",
    "left_out_fragments",
    "log_origin",
    "score_entry",
    "seen_heads",
    "verify_signatures",
]

_Entry = dict[str, Any]
PART = (
    "fragment",
    "rank",
    "round_id",
    "outer_step",
    "attempt",
    "inner_steps",
    "tokens",
    "codec",
    "numel",
    "bytes",
    "boxes",  # "whole", or a hash: `editpb.signed_contributions.boxes_digest`
    "payload",  # BLAKE3
    "signature",
)
"""What the list of a shard has, in this order; then of a masked one its norm, a text; and of one whose signer has seen a head
of the log, that head's place in the peer's list `seen`, a number. Bytes are base64."""


PARTLY = "unmerged_fragments"  # see `RoundFacts.partly`; where there are some

_RESULT_BYTES = len(f',"update":"{"0" * 64}"')  # of the hash of an update in an entry; of the digest after it, no more


_LAST_TIME = 253_402_300_799  # the end of the year 9999


DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What reading an entry raises that is not as it should be."""


class LogFault(EditError):
    """A log, or its signed head, does not hold together. The text names the entry."""

    exit_code = 2


# ---- writing -----------------------------------------------------------------------------------------------------------------


def log_origin(run_id: str, aggregator: int = 0) -> str:
    """Return the name of a log and of its key: each aggregator of a run keeps a log of its fragments; 0: the coordinator."""
    return f"edit/{run_id}/{aggregator}" if aggregator else f"edit/{run_id}"


def entry_line(tree: MerkleTree, time: float, entry: Mapping[str, object]) -> bytes:
    """Return the next entry of a log as its line, without the line end. tree: of the entries so far."""
    return canonical({"index": len(tree), "root": tree.root().hex(), "time": int(time), **entry})


def genesis_entry(run_id: str, key: NoteKey, config: RunConfig, schema_hash: str, outer_step: int, digest: str) -> _Entry:
    """Return the first entry of a log. outer_step, digest: of the outer parameters where it begins."""
    where = {"outer_step": outer_step, "digest": digest, "schema_hash": schema_hash}
    return {"kind": "genesis", "run_id": run_id, "key": key.text(), **_config(config), **where}


def config_entry(config: RunConfig) -> _Entry:
    """Return the entry of another configuration."""
    return {"kind": "config", **_config(config)}


def continued_entry(outer_step: int, digest: str) -> _Entry:
    """Return the entry of a log that goes on elsewhere than after its last commit."""
    return {"kind": "continued", "outer_step": outer_step, "digest": digest}


def consent_entry(peer_id: str, consent: Consent) -> _Entry:
    """Return the entry of a site's consent to the configuration of the entries before."""
    return {
        "kind": "consent",
        "peer": peer_id,
        "config_digest": consent.config_digest,
        "policy_digest": consent.policy_digest,
        "key": base64.b64encode(consent.public_key).decode(),
        "signature": base64.b64encode(consent.signature).decode(),
        **({"data": asdict(consent.data)} if consent.data else {}),
    }


def consent_in(entry: Mapping[str, Any]) -> tuple[str, Consent]:
    """Return the peer and the consent of an entry. Whether it is signed is not looked at. Raises what DAMAGE has."""
    key, signature = (base64.b64decode(str(entry[name]), validate=True) for name in ("key", "signature"))
    said = entry.get("data", {})
    data = DataStatement(**{name: str(said[name]) for name in ("statement", "manifest", "licence") if said})
    consent = Consent(str(entry["config_digest"]), str(entry["policy_digest"]), key, signature, data)
    return str(entry["peer"]), consent


def approval_entry(approver: str, approval: Approval) -> _Entry:
    """Return the entry of an approval of a change of the configuration of the entries before."""
    return {
        "kind": "approval",
        "approver": approver,
        "config_digest": approval.config_digest,
        "before_digest": approval.before_digest,
        "number": approval.number,
        "certificate": _text(approval.certificate),
        "signature": _text(approval.signature),
    }


def approval_in(entry: Mapping[str, Any]) -> Approval:
    """Return the approval of an entry. Raises what DAMAGE has."""
    certificate, signature = (base64.b64decode(str(entry[name]), validate=True) for name in ("certificate", "signature"))
    digests = str(entry["config_digest"]), str(entry["before_digest"])
    return Approval(*digests, int(entry["number"]), certificate, signature)


def score_entry(scorer: str, report: ScoreReport) -> _Entry:
    """Return the entry of what a scorer says, signed, of a commit."""
    return {
        "kind": "score",
        "scorer": scorer,
        "outer_step": report.outer_step,
        "scores": {peer: float(value) for peer, value in report.scores.items()},
        "key": base64.b64encode(report.public_key).decode(),
        "signature": base64.b64encode(report.signature).decode(),
    }


def _config(config: RunConfig) -> _Entry:
    return {"config": config.to_json(), "config_digest": config_digest(config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """What the entry of a commit says of its round, beside what was merged."""

    round_id: int
    # The one that the commit leads to.
    outer_step: int
    reason: str
    # Peers that were awaited in vain.
    missing: Sequence[str] = ()
    # Peers that had begun to contribute, and of whom nothing is in it.
    unmerged: Collection[str] = ()
    # Of the others, by peer: the fragments that it had begun to contribute, and that were merged without it.
    partly: Mapping[str, Collection[int]] = field(default_factory=dict)
    # What of a run above came in with it.
    injected: Injected | None = None
    # What differential privacy the run has spent; None: its coordinator adds no noise.
    privacy: Mapping[str, object] | None = None
    # With masks, whose sum was opened; None: there are no masks, or nothing was opened.
    agreed: AgreedSet | None = None
    # Inner steps and tokens behind what was merged; (0, 0): not known.
    trained: tuple[int, int] = (0, 0)
    # Whose scores count with it, and the trust in peers that follows; None: nobody's.
    scorers: Sequence[str] = ()
    trust: Mapping[str, Trust] | None = None


def commit_entry(
    facts: RoundFacts,
    *,
    digests: tuple[str, str],
    config: str,
    records: Sequence[MergeRecord],
    staged: Mapping[int, Staged] | None,
    contributions: Mapping[int, Sequence[ContributionHeader]],
    taken_with: Mapping[str, object] | None = None,
    merged: bool = True,
) -> _Entry:
    """Return the entry of a commit.

    Args:
        digests: of the outer parameters before and after it.
        config: `config_digest` of the run.
        records, staged: what is committed of each fragment, and the update that is published of it. Without `staged` the entry
            lacks what the commit leads to, the digest after it included: `completed` adds that.
        contributions: the signed headers of all that was in hand, by fragment.
        taken_with: H, batch, outer learning rate and momentum of it (`edit.config.in_force`).
        merged: name the merged pseudo-gradient, which only those can compare who have all contributions.
    """
    headers = [header for i in sorted(contributions) for header in contributions[i]]
    peers = sorted({header.peer_id for header in headers})
    return {
        "kind": "commit",
        "round_id": facts.round_id,
        "outer_step": facts.outer_step,
        "reason": facts.reason,
        "before": digests[0],
        **({} if staged is None else {"after": digests[1]}),
        "config_digest": config,
        "missing": sorted(facts.missing),
        "unmerged": sorted(facts.unmerged),
        **({PARTLY: {peer: sorted(facts.partly[peer]) for peer in sorted(facts.partly)}} if facts.partly else {}),
        "injected": facts.injected.to_json() if facts.injected is not None else None,
        "fragments": [
            fragment_entry(record, None if staged is None else staged[record.fragment_id], merged=merged) for record in records
        ],
        "contributions": {
            peer: _of_peer([header for header in headers if header.peer_id == peer]) for peer in peers
        },
        **({} if facts.privacy is None else {"privacy": dict(facts.privacy)}),
        **({} if taken_with is None else {"in_force": dict(taken_with)}),
        **({} if facts.agreed is None else {"secagg": _agreed(facts.agreed)}),
        **({} if facts.trust is None else {"trust": _trust(facts.scorers, facts.trust)}),
    }  # fmt: skip


def _trust(scorers: Sequence[str], trust: Mapping[str, Trust]) -> _Entry:
    return {"scorers": sorted(scorers), "peers": {peer: [float(one.mean), one.count] for peer, one in trust.items()}}


def claimed_privacy(config: RunConfig) -> dict[str, object] | None:
    """Return what an entry says of the bound that each peer keeps for itself, where there is one."""
    return bound_of(config.privacy) if config.privacy.of_examples else None


def completed(entry: bytes, commit: Commit) -> bytes:
    """Return the line of a commit's entry with what the commit has led to; one that has it already as it is.

    Raises what DAMAGE has for a line that is no such entry.
    """
    said = parse_canonical(entry)
    if "after" in said:
        return entry
    payloads = {fragment.fragment_id: fragment.payload for fragment in commit.fragments}
    fragments = [{**one, "update": _hash(payloads[one["fragment"]])} for one in said["fragments"]]
    return canonical({**said, "after": commit.digest, "fragments": fragments})


def check_length(line: bytes, entry: _Entry) -> None:
    """Raise RefusedError for the entry of a commit that is too long to be read by others; it says who contributes the most."""
    to_come = 0 if "after" in entry else _RESULT_BYTES * (1 + len(entry["fragments"]))
    if len(line) + to_come > MAX_ENTRY_BYTES:  # honest ones have a few hundred bytes for each shard of a fragment
        parts = {peer: len(given["parts"]) for peer, given in entry["contributions"].items()}
        most = max(sorted(parts), key=lambda peer: parts[peer])
        raise RefusedError(f"the entry of the audit log would be too long: {most} contributes {parts[most]} shards; evict it")


def fragment_entry(record: MergeRecord, staged: Staged | None, *, merged: bool = True) -> _Entry:
    """Return what a commit's entry says of one fragment. staged, merged: see `commit_entry`."""
    return {
        "fragment": record.fragment_id,
        "merged_norm": float(record.merged_norm),
        "clip": float(record.clip),
        **({"merged": _hash(record.payload)} if merged else {}),
        **({} if staged is None else {"update": _hash(staged.payload)}),
        "verdicts": {one.peer_id: _verdict(one) for one in record.verdicts},
    }


def _hash(payload: EncodedTensor | None) -> str | None:
    return blake3(payload.data).hexdigest() if payload is not None else None


def _agreed(agreed: AgreedSet) -> _Entry:
    """Return what a commit's entry says of a masked round: all that its roster's hash is of, who shared, who is in the sum."""
    return {
        "plan": agreed.roster.round.plan.hex(),
        "hash": agreed.roster.hash.hex(),
        "roster": {each.peer_id: [_text(each.public_key), _text(each.mask_key)] for each in agreed.roster.adverts},
        "sharers": sorted(agreed.sharers),
        "survivors": sorted(agreed.survivors),
        "confirmed": {peer: _text(signature) for peer, signature in agreed.signatures.items()},
    }


def _verdict(one: PeerVerdict) -> list[object]:
    return [one.verdict.value, float(one.norm), float(one.weight), one.staleness]


def _of_peer(headers: Sequence[ContributionHeader]) -> _Entry:
    heads = list(dict.fromkeys(header.seen for header in headers if header.seen is not None))
    parts = [_part(header, heads) for header in headers]
    seen = {"seen": [[head.size, _text(head.root), _text(head.signature)] for head in heads]} if heads else {}
    return {"key": _text(headers[0].public_key), "parts": parts, **seen}


def _part(header: ContributionHeader, heads: Sequence[SeenHead]) -> list[object]:
    """Return what PART names, of one shard of a fragment, and what follows."""
    return [
        header.fragment_id,
        header.rank,
        header.round_id,
        header.outer_step,
        header.attempt,
        header.inner_steps,
        header.tokens,
        header.codec,
        header.numel,
        header.total_bytes,
        boxes_digest(header),
        _text(header.payload_blake3),
        _text(header.signature),
        *(() if header.norm is None else (header.norm,)),
        *(() if header.seen is None else (heads.index(header.seen),)),
    ]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ---- verifying ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """What the log says of one peer."""

    outer_steps: int = 0  # in which something of it counted
    tokens: int = 0  # that it said were behind these, once for each
    share: float = 0.0  # the sum of its weights, each fragment counting alike, over all commits
    missing: int = 0  # commits that waited for it in vain
    verdicts: Counter[str] = field(default_factory=Counter)  # by verdict: fragments


class Changed(NamedTuple):
    """A change of the configuration."""

    entry: int  # of the log
    number: int  # of the configuration that it led to
    config_digest: str  # likewise
    approvers: tuple[str, ...]  # empty: it needed nobody's approval


class Recovered(NamedTuple):
    """Where a survivor of a swarm goes on with the log of a part alone. The entry names all before it by their root."""

    entry: int  # the first one of the new lineage
    lineage: int
    root: str  # of the entries before it, hex
    owner: str  # who has signed the entry


class Signed(NamedTuple):
    """What the signatures of an entry are of, beside what stands in it."""

    run_id: str
    schema_hash: str
    config_digest: str


def verify_signatures(signed: Signed, entries: Sequence[tuple[int, bytes]]) -> int:
    """Verify the signatures of entries that a `LogVerifier` has taken without them; return how many there are.

    Args:
        entries: the index and the line of each.

    Raises LogFault.
    """
    verified = 0
    for index, line in entries:
        try:
            verified += _check_signatures(signed, parse_canonical(line))
        except DAMAGE as error:
            raise _fault(index, error) from error
    return verified


def _fault(index: int, error: Exception) -> LogFault:
    return LogFault(f"entry {index}: {f'lacks {error}' if isinstance(error, KeyError) else error}")


def _where(peer: str, values: Sequence[Any]) -> str:
    return f"the contribution of {peer} to fragment {values[0]}, rank {values[1]}"


def _check_signatures(signed: Signed, entry: _Entry) -> int:
    """Check those of one commit; return how many there are. Raises what `DAMAGE` has."""
    verified = 0
    for peer, given in entry["contributions"].items():
        key = base64.b64decode(given["key"], validate=True)
        heads = seen_heads(given)
        for values in given["parts"]:
            if not is_signed_part(signed, peer, key, values, heads):
                raise ValueError(f"{_where(peer, values)}: its signature is not of what the log says")
            verified += 1
    if (agreed := agreed_set(signed.run_id, entry)) is not None:
        agreed.check()
        verified += len(agreed.signatures)
    return verified


def left_out_fragments(entry: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return by peer what a commit says it has merged others of, and not this: fragments. Raises what `DAMAGE` has."""
    said = entry.get(PARTLY, {})
    due = {one["fragment"] for one in entry["fragments"]}
    for peer, fragments in said.items():
        merged = {values[0] for values in entry["contributions"][peer]["parts"]}
        if not fragments or fragments != sorted(set(fragments)) or not set(fragments) <= due - merged:
            raise ValueError(f"what it says was not merged of {_name(peer)} was merged, or is no list of fragments in order")
    return dict(said)


def check_rounds(entry: Mapping[str, Any], max_staleness: int) -> None:
    """Check that each contribution of a commit was sent for its round, or is no older than is permitted, as its verdict says.

    max_staleness: rounds.max_staleness of the commit's configuration. Raises what `DAMAGE` has.
    """
    round_id, before = entry["round_id"], entry["outer_step"] - 1
    verdicts = {one["fragment"]: one["verdicts"] for one in entry["fragments"]}
    for peer, given in entry["contributions"].items():
        for values in given["parts"]:
            fragment, _, number, base = values[:4]
            behind, where = before - base, _where(peer, values)
            if number > round_id or (number != round_id and not max_staleness) or not 0 <= behind <= max_staleness:
                raise ValueError(
                    f"{where} is to round {number}, from outer step {base}; merged was round {round_id}, from outer step "
                    f"{before}, with rounds.max_staleness = {max_staleness}"
                )
            _, _, _, *staleness = verdicts.get(fragment, {}).get(peer, ("", "", ""))  # earlier versions wrote none
            if staleness and staleness[0] != behind:
                raise ValueError(f"{where} has staleness {staleness[0]} by its verdict, and {behind} by what was signed")


def _max_staleness(text: str) -> int:
    """Return rounds.max_staleness of a configuration as it is sent, also of one with settings of other versions."""
    values = parse_json(text)
    section = values.get("rounds", {}) if isinstance(values, Mapping) else None
    staleness = section.get("max_staleness", 0) if isinstance(section, Mapping) else None
    if type(staleness) is not int or staleness < 0:
        raise ValueError("rounds.max_staleness of the configuration is no number")
    return staleness


def agreed_set(run_id: str, entry: _Entry) -> AgreedSet | None:
    """Return whose sum was opened by the entry of a commit; None where it says nothing of masks. Raises what DAMAGE has.

    Checked is all but the signatures: that the roster's hash is of this round and this roster, that the sum is of those that
    the verdicts count, that something is held against each other contribution, and that each key is the contributor's.
    """
    if (said := entry.get("secagg")) is None:
        return None
    name = RoundName(
        run_id=run_id,
        config_digest=str(entry["config_digest"]),
        round_id=str(int(entry["round_id"])),
        outer_step=int(entry["outer_step"]) - 1,
        plan=bytes.fromhex(said["plan"]),
    )
    keys = {str(peer): [base64.b64decode(each, validate=True) for each in given] for peer, given in said["roster"].items()}
    adverts = (Advert(peer_id=peer, public_key=key, mask_key=mask, signature=b"") for peer, (key, mask) in sorted(keys.items()))
    roster = Roster(name, tuple(adverts))
    if roster.hash.hex() != said["hash"]:
        raise ValueError("the hash of the masked round's roster is not that of its peers, their keys and this round")
    agreed = AgreedSet(
        roster=roster,
        sharers=frozenset(map(str, said["sharers"])),
        survivors=frozenset(map(str, said["survivors"])),
        signatures={str(peer): base64.b64decode(each, validate=True) for peer, each in said["confirmed"].items()},
    )
    for fragment in entry["fragments"]:
        counted = {peer for peer, (_, _, weight, *_) in fragment["verdicts"].items() if float.fromhex(weight) > 0}
        if counted != agreed.survivors:
            who = ", ".join(sorted(counted ^ agreed.survivors))
            raise ValueError(
                f"fragment {fragment['fragment']}: the sum is not of those who count by the verdicts; not both: {who}"
            )
    for peer, given in sorted(entry["contributions"].items()):
        said_of = {verdicts[peer][0] for verdicts in (each["verdicts"] for each in entry["fragments"]) if peer in verdicts}
        if peer not in agreed.survivors and said_of <= {"ok", "rejected"}:
            raise ValueError(f"{peer} contributed and is left out of the sum, though no verdict is against it")
        if peer in agreed.survivors and base64.b64decode(given["key"], validate=True) != keys[peer][0]:
            raise ValueError(f"{peer} has signed its contribution with another key than it has on the masked round's roster")
    return agreed


def is_masked(entry: _Entry) -> bool:
    """Return whether masked contributions were merged by a commit. Raises what DAMAGE has."""
    parts = (values for given in entry["contributions"].values() for values in given["parts"])
    return any(len(values) > len(PART) and isinstance(values[len(PART)], str) for values in parts) and counts_anybody(entry)


def counts_anybody(entry: _Entry) -> bool:
    """Return whether a contribution has a weight in a commit. Raises what DAMAGE has."""
    weights = (weight for each in entry["fragments"] for _, _, weight, *_ in each["verdicts"].values())
    return any(float.fromhex(weight) > 0 for weight in weights)


def seen_heads(given: _Entry) -> list[SeenHead]:
    """Return the heads of the log that a peer of a commit has seen, as its parts name them. Raises what DAMAGE has."""
    decoded = ((size, *(base64.b64decode(each, validate=True) for each in rest)) for size, *rest in given.get("seen", ()))
    heads = [SeenHead(int(size), root, signature) for size, root, signature in decoded]
    if any(head.size < 1 or len(head.root) != HASH_BYTES for head in heads):
        raise ValueError("what a peer has seen of the log is no head of it")
    return heads


def is_signed_part(signed: Signed, peer: str, key: bytes, values: Sequence[Any], heads: Sequence[SeenHead]) -> bool:
    """Return whether the holder of a key has signed what stands of a shard in a commit. Raises what DAMAGE has.

    values: see PART. heads: `seen_heads` of the peer.
    """
    part, extra = dict(zip(PART, values, strict=False)), list(values[len(PART) :])
    norm = float.fromhex(extra.pop(0)) if extra and isinstance(extra[0], str) else None
    seen = heads[_place(extra.pop(0))] if extra else None
    if extra:
        raise ValueError("a shard has more values than are known; a later version wrote it")
    header = ContributionHeader(
        run_id=signed.run_id,
        round_id=part["round_id"],
        outer_step=part["outer_step"],
        peer_id=peer,
        fragment_id=part["fragment"],
        schema_hash=signed.schema_hash,
        inner_steps=part["inner_steps"],
        tokens=part["tokens"],
        codec=part["codec"],
        numel=part["numel"],
        total_bytes=part["bytes"],
        rank=part["rank"],
        attempt=part["attempt"],
        norm=norm,
        seen=seen,
        payload_blake3=base64.b64decode(part["payload"], validate=True),
        public_key=key,
    )
    signature = base64.b64decode(part["signature"], validate=True)
    return is_signed(key, signature, contribution_statement(header, signed.config_digest, part["boxes"]))


def _name(peer: object) -> str:
    if not isinstance(peer, str) or not is_id(peer):
        raise ValueError(f"{str(peer)[:80]!r} is no name of a peer")
    return peer


def _place(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("the place of a head is no number")
    return value


class LogVerifier:
    """Verifies a log entry by entry, in order.

    Args:
        key: the log's public key, from somebody who is trusted with it; None: what the log itself says, which shows damage but
            not that this is the log of the run.
        signatures: verify the signatures of contributions, too, which takes nearly all of the time. False: whoever
            calls may leave them to other processes (`verify_signatures`).
        authorities: of the run: who approves a change must have a certificate of one. Empty: any certificate counts.
    """

    def __init__(
        self, key: NoteKey | None = None, *, signatures: bool = True, authorities: Collection[Certificate] = ()
    ) -> None:
        self.key, self._signatures, self._authorities = key, signatures, authorities
        self.tree = MerkleTree()
        self.run_id, self.outer_step, self.digest, self.commits, self.verified = "", 0, "", 0, 0
        self.part: int | None = None  # of a swarm, whose log it is; None: of a run with a coordinator
        self.before = 0  # entries that are not here, but known by the hashes that the tree goes on from
        self.grant = -1  # of the last entry of a part's log; -1: there was none
        self.recovered: list[Recovered] = []  # in a part's log: where another lineage begins
        self.continued: list[int] = []  # outer steps where the log begins, or goes on, after commits that it lacks
        self.usage: dict[str, Usage] = {}
        self.consents: dict[str, Consent] = {}  # by peer: the last one; whose key it is, `confirmed_consents` says
        self.keys: dict[str, set[bytes]] = {}  # by peer: its public keys, DER, by contributions, consents and scores
        # By peer: those that have signed contributions, and the first entry that names each.
        self.contributors: dict[str, dict[bytes, int]] = {}
        # In a part's log, by owner: those that have signed entries, and which.
        self.owners: dict[str, dict[bytes, list[int]]] = {}
        self.scorers: dict[str, set[bytes]] = {}  # by scorer: those that have signed scores
        self.confirmed = 0  # commits of a masked sum that says which peers have confirmed it
        self.unconfirmed = 0  # and those that do not: an earlier version wrote them
        self.changes: list[Changed] = []  # of the configuration
        self.configuration = Configuration(0, "")  # the present one
        self._approvals: list[tuple[str, Approval]] = []  # of changes of the present configuration: approver and approval
        # What `edit.merging.trust` has of each peer after the last commit: mean and count.
        self.trust: dict[str, tuple[float, int]] = {}
        self._knows_trust = False  # whether that is all; not where the log begins, or goes on, in the middle of a run
        self._scores: dict[str, dict[str, float]] = {}  # since the last commit, by scorer: the last ones that it said
        self._privacy = LoggedPrivacy()
        self._config = self._schema_hash = ""
        self._max_staleness = 0  # of the present configuration; a swarm with a log has no other
        self._merged: dict[str, dict[tuple[int, int], int]] = {}  # by peer: fragment, rank -> round of what was merged last

    def take(self, line: bytes) -> _Entry:
        """Verify the next line, without its line end, and return the entry. Raises LogFault."""
        index = len(self.tree)
        try:
            entry = parse_canonical(line)
            if not self.run_id and isinstance(entry, dict) and entry.get("kind") == "begins":
                self._begin(entry)
                return entry
            if not isinstance(entry, dict) or entry["index"] != index:
                raise ValueError(f"is not number {index}")
            if entry["root"] != self.tree.root().hex():
                raise LogFault(f"entry {index - 1} was changed, or one before it, or what entry {index} says of them")
            if (entry["kind"] == "genesis") != (index == 0):
                raise ValueError("the first entry is a log's genesis, and no other is")
            of_part = self.part is not None or (index == 0 and "part" in entry)  # whose entries have no time
            if not of_part and not (type(entry["time"]) is int and 0 <= entry["time"] <= _LAST_TIME):
                raise ValueError("its time is none")
            if self.part is not None and entry["kind"] != "commit":
                raise ValueError(f"is of the kind {entry['kind']}, and only commits are in the log of a swarm's part")
            if "config" in entry and entry["kind"] not in ("genesis", "config"):
                raise ValueError(f"is of the kind {entry['kind']}, and names a configuration, which nobody verifies there")
            match entry["kind"]:
                case "genesis":
                    self._genesis(entry)
                case "config":
                    self._take_config(entry)
                case "continued":
                    self.outer_step, self.digest = int(entry["outer_step"]), str(entry["digest"])
                    self.continued.append(self.outer_step)
                    self._knows_trust = False
                    self._privacy.gap()
                case "commit":
                    self._commit(entry)
                case "consent":
                    self._take_consent(entry)
                case "approval":
                    self._take_approval(entry)
                case "score":
                    self._take_score(entry)
                case kind:
                    raise ValueError(f"is of an unknown kind {kind!r}; a later version wrote it")
        except LogFault:
            raise
        except DAMAGE as error:
            raise _fault(index, error) from error
        self.tree.append(leaf_hash(line))
        return entry

    @property
    def confirmed_consents(self) -> dict[str, Consent]:
        """The consents that are signed with a key that has signed contributions of their peer, by peer.

        A consent names its key itself, and with a key of its own a coordinator makes up any. It cannot show a peer a receipt
        with a contribution that is not the peer's.
        """
        return {peer: each for peer, each in self.consents.items() if each.public_key in self.contributors.get(peer, ())}

    @property
    def doubtful_consents(self) -> dict[str, str]:
        """By peer, of the other consents: SHA-256 of the key."""
        confirmed = self.confirmed_consents
        return {peer: key_hash(each.public_key) for peer, each in sorted(self.consents.items()) if peer not in confirmed}

    @property
    def doubtful_owners(self) -> dict[str, list[str]]:
        """By owner that has contributed: SHA-256 of its keys that have signed entries and none of its contributions."""
        found = {
            owner: sorted(key_hash(each) for each in keys if each not in self.contributors[owner])
            for owner, keys in sorted(self.owners.items())
            if owner in self.contributors
        }
        return {owner: keys for owner, keys in found.items() if keys}

    @property
    def privacy(self) -> str:
        """What the last commit says of differential privacy, in words."""
        return self._privacy.words

    @property
    def signed(self) -> Signed:
        """What the signatures of the last entry are of, beside what stands in it."""
        return Signed(self.run_id, self._schema_hash, self._config)

    def check_head(self, note: str | bytes) -> int:
        """Check the signed head of this log; return for how many entries it stands. Raises LogFault.

        Entries behind it are those of a coordinator that was killed before it signed; they are not signed for.
        """
        if self.key is None:
            raise LogFault("the log is empty")
        try:
            text, _ = open_note(note, [self.key])
            head = parse_checkpoint(text)
        except ValueError as error:
            raise LogFault(f"the signed head: {error}") from error
        if head.origin != self.key.name:
            raise LogFault(f"the signed head is of {head.origin}, not of {self.key.name}")
        if head.size > len(self.tree):
            raise LogFault(f"the signed head says {head.size} entries, the log has {len(self.tree)}: entries were removed")
        if head.root != self.tree.root(head.size):
            raise LogFault(
                f"entry {head.size - 1} was changed, or the head: it is signed for others than these {head.size} entries"
            )
        return head.size

    def check_cosigned(self, note: bytes) -> tuple[int, tuple[str, ...]]:
        """Check a head of this log that members have cosigned; return its size, and who has signed it. Raises LogFault.

        All entries are to be taken before: the keys of the members are those that they name. Who has signed it with a key
        that has signed none of its contributions is not named.
        """
        size = self.check_head(note)
        assert self.key is not None
        try:
            members = [NoteKey.of_member(peer, key) for peer, known in self.keys.items() for key in known]
            named = {(each.name, each.key_id) for each in (self.key, *members)}
            for name, key_id, _ in signatures_under(note):
                if (name, key_id) not in named:
                    raise ValueError(f"{name} has cosigned with a key that no entry names")
            _, signed = open_note(note, [self.key, *members])
        except ValueError as error:
            raise LogFault(f"the cosigned head of {size} entries: {error}") from error
        return size, tuple(sorted(each.name for each in signed if each.public in self.contributors.get(each.name, ())))

    def _begin(self, entry: _Entry) -> None:
        """Take what a log of a part says of the entries before its first one."""
        self.outer_step, self.digest = int(entry["outer_step"]), str(entry["digest"])
        self.before = self.outer_step + 1
        self.tree = MerkleTree.after(self.before, [bytes.fromhex(each) for each in entry["peaks"]])
        self.part, self.run_id = int(entry["part"]), str(entry["run_id"])
        self._config, self._schema_hash = str(entry["config_digest"]), str(entry["schema_hash"])

    def _genesis(self, entry: _Entry) -> None:
        if "part" in entry:
            self.part = int(entry["part"])
        else:
            said = NoteKey.parse(entry["key"])
            if self.key is not None and said != self.key:
                raise LogFault(f"entry 0: the log says that its key is {said.text()}, the given one is {self.key.text()}")
            self.key = said
        self.run_id, self._schema_hash = str(entry["run_id"]), str(entry["schema_hash"])
        self.outer_step, self.digest = int(entry["outer_step"]), str(entry["digest"])
        self._knows_trust = self.outer_step == 0
        if self.outer_step:
            self.continued.append(self.outer_step)
            self._privacy.gap()
        self._take_config(entry)

    def _take_config(self, entry: _Entry) -> None:
        self._config = str(entry["config_digest"])
        if hashlib.sha256(str(entry["config"]).encode()).hexdigest() != self._config:
            raise ValueError("config_digest is not that of the configuration")
        self._privacy.configure(str(entry["config"]))
        self._max_staleness = _max_staleness(str(entry["config"]))
        before, after = self.configuration, Configuration(self.configuration.number + 1, str(entry["config"]))
        if before.number:
            given = tuple(each for _, each in self._approvals if each.config_digest == after.digest)
            try:
                names = self._rules.check_change(before, ConfigChange(after, given))
            except (RefusedError, ConfigError) as error:
                raise ValueError(str(error)) from error
            self.changes.append(Changed(len(self.tree), after.number, after.digest, tuple(sorted(names))))
        self.configuration, self._approvals = after, []

    @property
    def _rules(self) -> ApprovalRules:
        return ApprovalRules(self.run_id, self._authorities)

    def _take_approval(self, entry: _Entry) -> None:
        approval = approval_in(entry)
        try:
            name = self._rules.check(approval, self.configuration, approval.config_digest)
        except (RemoteProtocolError, ConfigError) as error:
            raise ValueError(str(error)) from error
        if name != entry["approver"]:
            raise ValueError(f"is said to be the approval of {entry['approver']}, and is that of {name}")
        if any((name, approval.config_digest) == (other, each.config_digest) for other, each in self._approvals):
            raise ValueError(f"{name} approves sha256:{approval.config_digest} twice")
        self._approvals.append((name, approval))

    def _take_consent(self, entry: _Entry) -> None:
        peer_id, consent = consent_in(entry)
        try:
            check_consent(consent, self.run_id, peer_id, self._config)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error
        self.consents[_name(peer_id)] = consent
        self.keys.setdefault(peer_id, set()).add(consent.public_key)

    def _commit(self, entry: _Entry) -> None:
        if entry["outer_step"] != self.outer_step + 1 or entry["before"] != self.digest:
            raise ValueError(f"leads from elsewhere than outer step {self.outer_step}, digest {self.digest[:12]}")
        if entry["config_digest"] != self._config:
            raise ValueError("was made under another configuration than the log's")
        if self.part is not None:
            if entry["part"] != self.part:
                raise ValueError(f"is of part {entry['part']}, the log of part {self.part}")
            owner, key = _name(entry["owner"]), check_owner(self.run_id, entry)
            self.owners.setdefault(owner, {}).setdefault(key, []).append(entry["index"])
            self._take_grant(entry)
            for consent in entry.get("consents", ()):
                self._take_consent(consent)
        self.outer_step, self.digest = entry["outer_step"], str(entry["after"])
        self.commits += 1
        contributed: dict[int, set[str]] = {}
        for peer in (*entry["missing"], *entry["unmerged"], *entry["contributions"]):
            _name(peer)
        left_out_fragments(entry)
        for peer, given in entry["contributions"].items():
            self._check_seen(peer, seen_heads(given))
            key = base64.b64decode(given["key"], validate=True)
            self.keys.setdefault(peer, set()).add(key)
            if given["parts"]:
                self.contributors.setdefault(peer, {}).setdefault(key, entry["index"])
            merged = self._merged.setdefault(peer, {})
            for values in given["parts"]:
                fragment, rank, number = values[:3]
                if not merged.get((fragment, rank), -1) < number <= entry["round_id"]:
                    raise ValueError(f"{_where(peer, values)}: round {number} was merged before, or is none yet")
                merged[fragment, rank] = number
                contributed.setdefault(fragment, set()).add(peer)
        for fragment in entry["fragments"]:
            if set(fragment["verdicts"]) != contributed.get(fragment["fragment"], set()):
                raise ValueError(f"fragment {fragment['fragment']}: the verdicts are not of those who contributed")
        check_rounds(entry, self._max_staleness)
        if agreed_set(self.run_id, entry) is not None:
            self.confirmed += 1
        elif is_masked(entry):
            self.unconfirmed += 1
        if self._signatures:
            self.verified += _check_signatures(self.signed, entry)
        self._privacy.commit(entry.get("privacy"))
        self._take_trust(entry.get("trust"))
        self._count(entry)

    def _take_grant(self, entry: _Entry) -> None:
        """Take under which grant an owner has signed: they only grow, and a recovery makes them much greater."""
        before, self.grant = self.grant, int(entry["grant"])
        if self.grant < before:
            raise ValueError(f"was made under grant {self.grant}, and one before it under grant {before}")
        lineage, known = recoveries(self.grant) + 1, before >= 0 or not self.before
        if known and lineage > recoveries(max(before, 0)) + 1:
            self.recovered.append(Recovered(entry["index"], lineage, str(entry["root"]), str(entry["owner"])))

    def _take_score(self, entry: _Entry) -> None:
        if entry["outer_step"] != self.outer_step:
            raise ValueError(f"scores of outer step {entry['outer_step']}, and the last one is {self.outer_step}")
        scores = {_name(peer): float.fromhex(value) for peer, value in entry["scores"].items()}
        if not all(abs(value) <= 1 for value in scores.values()):
            raise ValueError("a score is not between -1 and 1")
        scorer = _name(entry["scorer"])
        key, signature = (base64.b64decode(entry[name], validate=True) for name in ("key", "signature"))
        report = ScoreReport(run_id=self.run_id, outer_step=self.outer_step, scores=scores, public_key=key, signature=signature)
        try:
            check_scores(report, scorer)
        except RemoteProtocolError as error:
            raise ValueError(str(error)) from error
        self._scores[scorer] = scores
        for keys in (self.keys, self.scorers):
            keys.setdefault(scorer, set()).add(key)

    def _take_trust(self, said: _Entry | None) -> None:
        """Compute what the trust in peers comes to, by the scores that count, and compare."""
        scores, self._scores = self._scores, {}
        if said is None:
            return
        from edit.merging.trust import Trust, after_scores, agreed  # needs torch, which few logs do

        logged = {_name(peer): (float.fromhex(mean), int(count)) for peer, (mean, count) in said["peers"].items()}
        if not self._knows_trust:
            self.trust, self._knows_trust = logged, True
            return
        before = {peer: Trust(*known) for peer, known in self.trust.items()}
        after = after_scores(before, agreed([scores[scorer] for scorer in said["scorers"]]))
        self.trust = {peer: (each.mean, each.count) for peer, each in after.items()}
        if self.trust != logged:
            raise ValueError("the trust in peers does not follow from the scores before it")

    def _check_seen(self, peer: str, heads: Sequence[SeenHead]) -> None:
        """Raise LogFault unless this log begins with what a peer has seen of it."""
        for head in heads:
            if head.size > len(self.tree) or self.tree.root(head.size) != head.root:
                where = f"entry {len(self.tree)}: {peer} has seen another log than this one, of {head.size} entries"
                raise LogFault(f"{where} with the root {head.root.hex()}")

    def _count(self, entry: _Entry) -> None:
        fragments, tokens = entry["fragments"], PART.index("tokens")
        for peer in entry["missing"]:
            self._usage_of(peer).missing += 1
        shares = dict.fromkeys(entry["contributions"], 0.0)
        for fragment in fragments:
            for peer, (verdict, _, weight, *_) in fragment["verdicts"].items():
                if not isinstance(verdict, str):
                    raise ValueError(f"the verdict of {peer} is none")
                self._usage_of(peer).verdicts[verdict] += 1
                shares[peer] += float.fromhex(weight)
        for peer, share in shares.items():
            if share > 0:
                usage = self.usage[peer]
                usage.outer_steps += 1
                usage.share += share / len(fragments)
                usage.tokens += max(part[tokens] for part in entry["contributions"][peer]["parts"])

    def _usage_of(self, peer: str) -> Usage:
        if (known := self.usage.get(peer)) is None:
            known = self.usage[peer] = Usage()
        return known
