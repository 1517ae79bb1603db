"""The record that all members of a swarm agree on, and what else each of them keeps on disk.

A version of the record is known by its stamp (lineage, term, version). Stamps grow. Of two versions of one lineage the later
was made with knowledge of the earlier, if the earlier was ever committed; so a newer version may always replace an older one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from blake3 import blake3

from edit.durable_files import check_format
from edit.errors import StorageError
from edit.plain_text import parse_json

__all__ = [
    "FORMAT",
    "MOST_ADDRESSES",
    "MOST_COUNT",
    "MOST_ENROLLED",
    "MOST_EVICTED",
    "MOST_HOLDERS",
    "MOST_LEASE_S",
    "MOST_MEMBERS",
    "MOST_PARTS",
    "MOST_ROOTS",
    "MOST_TEXT",
    "MOST_UNKNOWN",
    "MOST_VOTERS",
    "Enrolled",
    "Member",
    "Part",
    "PartState",
    "Phase",
    "Record",
    "Root",
    "Saved",
    "Stamp",
    "Update",
    "check_count",
    "check_digest",
    "check_id",
    "check_name",
    "check_seconds",
    "check_text",
    "incarnation_of",
    "is_quorum",
    "name_of",
    "peer_of",
    "recoveries",
    "update_id",
]

# Of the bytes of `Saved`. 5: of each name that was enrolled, whether it only looks on; 6: who is relayed; 7: a drain's end.
FORMAT = 7
OLDER = (4, 5, 6)  # formats that can be read
MOST_COUNT = 2**62  # of a term, version, step, grant, incarnation or count of tokens
MOST_VOTERS = 7
MOST_MEMBERS = 1024
MOST_EVICTED = 4096
MOST_UNKNOWN = 1024  # of these, names that nobody was enrolled with
MOST_ENROLLED = 4096
MOST_HOLDERS = 16
MOST_PARTS = 1024
MOST_ADDRESSES = 16
MOST_ROOTS = 4
MOST_ROOT = 4096  # characters of a certificate
MOST_TEXT = 256  # characters of an address, a reason
MOST_LEASE_S = 60.0

_MOST_GRANT = 2**41  # that is taken from others: round ids begin with it. Of other counts it is half of MOST_COUNT

# Grants of a new lineage begin so far above those that the survivor knows: what was signed for a round of the lost members is
# of no use in it.
_RECOVERED = 1 << 20


def recoveries(grant: int) -> int:
    """Return how often the swarm was recovered before a grant was made."""
    return grant // _RECOVERED


_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"(?!\.{1,2}#)[A-Za-z0-9._-]{1,64}#[0-9]{1,19}")
_INVITATION = re.compile(r"[0-9a-f]{32}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Phase(Enum):
    """What the run is doing. The engines of all parts follow it."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"


class Stamp(NamedTuple):
    """Which version of the record. Ordered; (0, 0, 0) is that of a member that has none."""

    lineage: int  # one more with each recovery by an operator
    term: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where a member is, and which of its lives it is in.

    A member whose disk was lost forgot what it voted for and accepted, so it must never count as the one before: it comes back
    with a larger incarnation. The shell draws it (milliseconds since 1970) when it makes the member's folder.
    """

    incarnation: int
    addresses: tuple[str, ...] = ()  # host:port
    maddr: str = ""  # of its libp2p node
    reachable: bool = True  # whether it accepts connections; one that does not is neither leader nor owner
    authority: str = ""  # whose certificate it has: `Root.name`
    relayed: bool = False  # whether others reach it through a relay; it owns parts where nobody can who is reached directly

    def __post_init__(self) -> None:
        check_count("incarnation", self.incarnation)
        _check(isinstance(self.addresses, tuple) and len(self.addresses) <= MOST_ADDRESSES, f"addresses {self.addresses!r:.80}")
        for field_name in ("reachable", "relayed"):
            _check(isinstance(value := getattr(self, field_name), bool), f"{field_name} = {value!r:.40}")
        for text in (*self.addresses, self.maddr, self.authority):
            check_text(text)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """With which invitation a name was enrolled last, and for which key."""

    invitation: str  # its number, 32 hexadecimal digits: of two for one name the later one has the greater
    key: str  # SHA-256 of the public key
    observer: bool = False  # whether it only looks on: it contributes nothing

    def __post_init__(self) -> None:
        _check(isinstance(self.observer, bool), f"observer = {self.observer!r:.40}")
        right = isinstance(self.invitation, str) and _INVITATION.fullmatch(self.invitation) is not None
        _check(right, f"no invitation: {self.invitation!r:.80}")
        check_digest(self.key)


@dataclass(frozen=True, slots=True)
class Root:
    """The certificate of an authority of the run, and the word of the one before it that it takes its place. Both in base64.

    The shell reads them: a leader that lies makes nobody trust an authority that the one before has not endorsed.
    """

    certificate: str  # DER
    endorsement: str = ""  # a signature of the certificate; "": the run was founded with it

    def __post_init__(self) -> None:
        for text in (self.certificate, self.endorsement):
            right = isinstance(text, str) and len(text) <= MOST_ROOT and _BASE64.fullmatch(text) is not None
            _check(right, f"no certificate: {text!r:.80}")

    @property
    def name(self) -> str:
        """By which members say whose certificate they have."""
        return blake3(self.certificate.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the model: who advances it, and how far it is."""

    owner: str  # peer_id
    grant: int  # a new one for each new owner; only the present one may propose
    outer_step: int
    digest: str  # of the part's state at this outer step
    update: str = ""  # the update that led there; "": none did
    tokens: int = 0  # merged so far
    verifiers: tuple[str, ...] = ()  # peer_ids: an update needs these holders, too; they compute it themselves

    def __post_init__(self) -> None:
        for peer_id in (self.owner, *self.verifiers):
            check_id(peer_id)
        for field_name in ("grant", "outer_step", "tokens"):
            check_count(field_name, getattr(self, field_name))
        check_digest(self.digest)
        if self.update:
            check_digest(self.update)


@dataclass(frozen=True, slots=True)
class Update:
    """What leads a part from one outer step to the next: its description, without its bytes."""

    part: int
    outer_step: int  # it leads there
    grant: int  # under which its owner made it
    id: str  # `update_id`
    base: str  # digest of the state that it continues
    digest: str  # of the state that it leads to
    tokens: int = 0  # merged in all

    def __post_init__(self) -> None:
        for field_name in ("part", "outer_step", "grant", "tokens"):
            check_count(field_name, getattr(self, field_name))
        for digest in (self.id, self.base, self.digest):
            check_digest(digest)

    def continues(self, part: Part) -> bool:
        """Return whether this is an update that the part's owner made to go on from where the record is."""
        return (self.outer_step, self.grant, self.base) == (part.outer_step + 1, part.grant, part.digest)


@dataclass(frozen=True, slots=True)
class PartState:
    """What a member has of a part on disk: its state after an outer step, and the update to the next one, if it holds one."""

    outer_step: int = 0
    digest: str = ""  # "": it has no state yet
    held: Update | None = None

    def __post_init__(self) -> None:
        check_count("outer_step", self.outer_step)
        if self.digest:
            check_digest(self.digest)

    def has(self, part: Part) -> bool:
        """Return whether the part's state that the record names is here, or can be computed from what is."""
        return (self.outer_step, self.digest) == (part.outer_step, part.digest) or self.leads_to(part)

    def leads_to(self, part: Part) -> bool:
        """Return whether the update is held that the record names as the next one."""
        return self.held is not None and (self.held.outer_step, self.held.id) == (part.outer_step, part.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all members agree on. Immutable; raises ValueError, one line, for values that no member may send."""

    run_id: str
    lineage: int
    term: int
    version: int
    members: Mapping[str, Member]  # by peer_id
    voters: tuple[str, ...]  # names (`name_of`), oldest first
    parts: tuple[Part, ...]
    before: tuple[str, ...] = ()  # the voters until now, while they change; else empty
    evicted: Mapping[str, str] = field(default_factory=dict)  # why, by peer_id
    phase: Phase = Phase.RUNNING
    config_hash: str = ""
    schema_hash: str = ""
    lease_s: float = 1.0
    verify: int = 0  # how many hosts beside its owner compute each update
    holders: tuple[str, ...] = ()  # peer_ids of those that were given the key of the run's authority, in order
    enrolled: Mapping[str, Enrolled] = field(default_factory=dict)  # by peer_id
    # By peer_id: who came to other bits of an update than this peer. Of two both are in it.
    disputes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roots: tuple[Root, ...] = ()  # the run's authority last, and those before it, while members have certificates of them
    last_step: int = 0  # the outer step at which all parts of a drained run end; 0: of one that is not drained

    def __post_init__(self) -> None:
        for count in ("lineage", "term", "version", "last_step"):
            check_count(count, getattr(self, count))
        for peer_id in (self.run_id, *self.members, *self.evicted, *self.holders, *self.enrolled, *self.disputes):
            check_id(peer_id)
        for others in self.disputes.values():
            right = isinstance(others, tuple) and len({*others}) == len(others) <= MOST_VOTERS
            _check(right, f"disputes {others!r:.80}")
            for other in others:
                check_id(other)
        for reason in self.evicted.values():
            check_text(reason)
        for digest in (self.config_hash, self.schema_hash):
            if digest:
                check_digest(digest)
        for names in (self.voters, self.before):
            right = isinstance(names, tuple) and len(names) <= MOST_VOTERS and len({*names}) == len(names)
            _check(right, f"voters {names!r:.80}")
            for voter in names:
                check_name(voter)
        _check(bool(self.voters), "no voters")
        _check(len(self.members) <= MOST_MEMBERS, f"{len(self.members)} members")
        _check(len(self.evicted) <= MOST_EVICTED, f"{len(self.evicted)} evicted members")
        right = isinstance(self.holders, tuple) and len({*self.holders}) == len(self.holders) <= MOST_HOLDERS
        _check(right, f"holders {self.holders!r:.80}")
        _check(len(self.enrolled) <= MOST_ENROLLED, f"{len(self.enrolled)} enrolled members")
        _check(len(self.disputes) <= MOST_ENROLLED, f"disputes of {len(self.disputes)} members")
        _check(1 <= len(self.parts) <= MOST_PARTS, f"{len(self.parts)} parts")
        right = isinstance(self.roots, tuple) and len(self.roots) <= MOST_ROOTS
        _check(right, f"{len(self.roots)} authorities")
        check_count("verify", self.verify)
        _check(self.verify < MOST_VOTERS, f"verify = {self.verify}")
        check_seconds("lease_s", self.lease_s, MOST_LEASE_S)

    @property
    def stamp(self) -> Stamp:
        """Which version this is."""
        return Stamp(self.lineage, self.term, self.version)

    @property
    def has_room(self) -> bool:
        """Whether none of its counts is so large that what a swarm and its recoveries add to it later might not fit."""
        counts = (self.lineage, self.term, self.version, *(part.outer_step for part in self.parts))
        return max(counts) <= MOST_COUNT // 2 and all(part.grant <= _MOST_GRANT for part in self.parts)

    @property
    def electors(self) -> frozenset[str]:
        """The names of all voters, new and old."""
        return frozenset((*self.voters, *self.before))

    @property
    def names(self) -> frozenset[str]:
        """The names of all members."""
        return frozenset(name_of(peer_id, member.incarnation) for peer_id, member in self.members.items())

    def agreed(self, names: Set[str]) -> bool:
        """Return whether these are a quorum: of the voters, and while they change of those before, too."""
        return is_quorum(self.voters, names) and (not self.before or is_quorum(self.before, names))

    def knows(self, name: str) -> bool:
        """Return whether this is a member in its present life, or a voter; nobody who was evicted, unless still a voter."""
        member = self.members.get(peer_of(name))
        return (member is not None and member.incarnation == incarnation_of(name)) or name in self.electors

    def enrols_as(self, other: Record | None) -> bool:
        """Return whether another record enrols the same peers, with the same keys, and has evicted the same."""
        return other is not None and self.enrolled == other.enrolled and self.evicted.keys() == other.evicted.keys()

    def may_enter(self, peer_id: str) -> bool:
        """Return whether this is the name of somebody who was enrolled. A certificate alone lets nobody in."""
        return not self.roots or peer_id in self.enrolled

    @property
    def distrusted(self) -> frozenset[str]:
        """Whom two others did not agree with: who of them is wrong, nobody else can tell from one."""
        return frozenset(peer_id for peer_id, others in self.disputes.items() if len(others) > 1)

    def disputed(self, one: str, other: str) -> Record:
        """Return the record where these two did not agree about an update."""
        disputes = dict(self.disputes)
        for peer_id, against in ((one, other), (other, one)):
            said = disputes.get(peer_id, ())
            room = len(said) < MOST_VOTERS and (peer_id in disputes or len(disputes) < MOST_ENROLLED)
            if room and against not in said:
                disputes[peer_id] = (*said, against)
        return replace(self, disputes=disputes) if disputes != self.disputes else self

    def settled(self, peer_id: str) -> Record:
        """Return the record where nothing is known of disputes with this peer: it was evicted, or invited anew."""
        left = {
            name: tuple(other for other in self.disputes[name] if other != peer_id) for name in self.disputes if name != peer_id
        }
        disputes = {name: others for name, others in left.items() if others}
        return replace(self, disputes=disputes) if disputes != self.disputes else self

    def leads(self, name: str) -> bool:
        """Return whether this voter may lead and own parts: it accepts connections, or no voter does."""
        reachable = {peer_id for peer_id, member in self.members.items() if member.reachable}
        return peer_of(name) in reachable or not any(peer_of(voter) in reachable for voter in self.voters)

    @property
    def direct(self) -> frozenset[str]:
        """The peers to which others connect without a relay: they own parts before others do."""
        return frozenset(peer_id for peer_id, member in self.members.items() if member.reachable and not member.relayed)

    def assigned(
        self,
        live: Set[str],
        fit: Sequence[Collection[str]],
        avoid: Mapping[int, Set[str]],
        distrusted: Set[str] = frozenset(),
    ) -> Record:
        """Return the record with an owner, and verifiers, for each part that has none which is live. Each change is a grant.

        Args:
            live: the peers that may go on owning and verifying what they have.
            fit: per part, the peers that may take it over: live, and up to date on this part.
            avoid: parts that change hands in any case, and the peers that should not get them if others can.
            distrusted: peers that own and verify nothing if others can. One of them verifies where nobody else does.
        """
        parts, direct = list(self.parts), self.direct
        for i, part in enumerate(parts):
            others = {*fit[i]} - {part.owner}
            served = part.owner in live and live >= {*part.verifiers}
            if i not in avoid and served and len(part.verifiers) >= self._verifiers_of(others, distrusted):
                continue
            avoided, load = avoid.get(i, frozenset()), [other.owner for other in parts].count
            able = sorted(fit[i])
            able.sort(key=lambda p: (p in avoided, p in distrusted, p not in direct, p != part.owner, load(p)))
            if able:
                owner, *others_able = able
                most = self._verifiers_of({*others_able}, distrusted)
                others_able.sort(key=lambda p: (p in distrusted, p in avoided, p not in direct))
                parts[i] = replace(part, owner=owner, grant=part.grant + 1, verifiers=tuple(others_able[:most]))
        return replace(self, parts=tuple(parts)) if tuple(parts) != self.parts else self

    def _verifiers_of(self, others: Set[str], distrusted: Set[str]) -> int:
        """Return how many of these verify a part: as many as are wanted and trusted; one that is not, if nobody is."""
        return min(self.verify, max(len(others - distrusted), 1 if others else 0))

    def balanced(self, fit: Sequence[Collection[str]]) -> Record:
        """Return the record with one part moved, if there is a better owner for one.

        From an owner that others reach through a relay it goes to one that they reach directly, and never back; else from the
        owner of most to one of at least two fewer.
        """
        load, direct = [part.owner for part in self.parts].count, self.direct
        moves = [
            (to in direct and p.owner not in direct, load(p.owner) - load(to), i, to)
            for i, p in enumerate(self.parts)
            for to in fit[i]
            if to not in p.verifiers and (to in direct or p.owner not in direct)
        ]
        nearer, gain, i, to = max(moves, default=(False, 0, 0, ""))
        better = nearer or gain >= 2
        return self.with_part(i, replace(self.parts[i], owner=to, grant=self.parts[i].grant + 1)) if better else self

    def with_part(self, i: int, part: Part) -> Record:
        """Return the record with another part `i`."""
        return replace(self, parts=(*self.parts[:i], part, *self.parts[i + 1 :]))

    def as_json(self) -> dict[str, object]:
        """Return it as values for JSON. A member of before format 7 reads those of a run that is not drained."""
        values = {**asdict(self), "phase": self.phase.value}
        return values if self.last_step else {name: value for name, value in values.items() if name != "last_step"}

    @classmethod
    def from_json(cls, values: object) -> Record:
        """Return what `as_json` wrote. Raises ValueError for anything else."""
        found = _strict(cls, {"last_step": 0, **_mapping(values)})
        found["members"] = {
            peer_id: Member(**_strict(Member, {"relayed": False, **_mapping(each)}))  # formats 4 and 5 do not say
            for peer_id, each in _mapping(found["members"]).items()
        }
        found["parts"] = tuple(Part(**_strict(Part, each)) for each in found["parts"])
        found["enrolled"] = {
            peer_id: Enrolled(**_strict(Enrolled, {"observer": False, **_mapping(each)}))  # format 4 does not say
            for peer_id, each in _mapping(found["enrolled"]).items()
        }
        found["roots"] = tuple(Root(**_strict(Root, each)) for each in found["roots"])
        found["evicted"] = dict(_mapping(found["evicted"]))
        found["disputes"] = {peer_id: _listed(each) for peer_id, each in _mapping(found["disputes"]).items()}
        found["phase"] = Phase(found["phase"])
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a member must have on disk before it says it: which term it is in, whom it voted for, and its version of the record.

    The bytes carry a format and a checksum. The shell writes them as `edit.durable_files` does: whole, synced, mode 0600.
    """

    incarnation: int
    term: int = 0
    vote: str = ""  # the name that it voted for in this term; "": nobody
    record: Record | None = None  # the newest that it accepted, committed or not; None: it has not been let in yet

    @classmethod
    def founded(cls, record: Record) -> Saved:
        """Return what the founder keeps: it is the only voter."""
        (founder,) = record.voters
        return cls(incarnation=incarnation_of(founder), term=record.term, record=record)

    def recovered(self, peer_id: str, states: Sequence[PartState]) -> Saved:
        """Return what a survivor keeps when an operator decides that the majority is gone for good.

        The lineage is new, and the survivor the only member: all others join anew, and cannot be confused with who they were.
        The parts go on from what the survivor has. A run that had finished runs again if a part goes back.

        Raises StorageError if the survivor lacks a part, or has a record whose counts cannot grow.
        """
        if self.record is None:
            raise StorageError("this member has no record to recover from")
        if self.term > MOST_COUNT // 2 or not self.record.has_room:
            raise StorageError(
                "a count in this member's record is too large, as one that lied may have written it: recover at another"
            )
        parts, phase, last_step = [], self.record.phase, self.record.last_step
        for part, state in zip(self.record.parts, states, strict=True):
            if not state.has(part):
                if not state.digest:
                    raise StorageError(f"this member has no state of a part that is at outer step {part.outer_step}")
                part = replace(part, outer_step=state.outer_step, digest=state.digest, update="")
                phase, last_step = (Phase.RUNNING, 0) if phase is Phase.FINISHED else (phase, last_step)
            parts.append(replace(part, owner=peer_id, grant=part.grant + _RECOVERED, verifiers=()))
        old, me = self.record, name_of(peer_id, self.incarnation)
        member = replace(old.members.get(peer_id, Member(incarnation=self.incarnation)), incarnation=self.incarnation)
        changed: dict[str, Any] = {
            "members": {peer_id: member},
            "voters": (me,),
            "before": (),
            "parts": tuple(parts),
            "disputes": {},
            "phase": phase,
            "last_step": last_step,
        }
        record = replace(old, lineage=old.lineage + 1, term=self.term + 1, version=0, **changed)
        return replace(self, term=record.term, vote="", record=record)

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        body = {
            "incarnation": self.incarnation,
            "term": self.term,
            "vote": self.vote,
            "record": self.record.as_json() if self.record else None,
        }
        return json.dumps({"format": FORMAT, "check": _checksum(body), **body}).encode()

    @classmethod
    def decode(cls, data: bytes, file: object) -> Saved:
        """Return what `encode` wrote. Raises StorageError for a damaged file, FormatError for another format; both name it."""
        try:
            values = _mapping(parse_json(data))
            check_format(file, values.pop("format", None), FORMAT, OLDER)
            if values.pop("check", None) != _checksum(values):
                raise ValueError("wrong checksum")
            found = _strict(cls, values)
            if found["record"] is not None:
                found["record"] = Record.from_json(found["record"])
            saved = cls(**found)
            check_count("incarnation", saved.incarnation)
            check_count("term", saved.term)
            return saved
        except (ValueError, TypeError) as error:
            raise StorageError(f"{file}: is damaged ({error})") from error


def is_quorum(voters: Sequence[str], names: Collection[str]) -> bool:
    """Return whether these names are a quorum: more than half of the voters, or exactly half with the first (oldest) in it.

    Any two quorums of one list share a voter.
    """
    present = sum(voter in names for voter in voters)
    return 2 * present > len(voters) or (2 * present == len(voters) and bool(voters) and voters[0] in names)


def name_of(peer_id: str, incarnation: int) -> str:
    """Return what voters are called: a peer, in one of its lives."""
    return f"{peer_id}#{incarnation}"


def peer_of(name: str) -> str:
    """Return the peer_id in a name."""
    return name.partition("#")[0]


def incarnation_of(name: str) -> int:
    """Return the incarnation in a name."""
    return int(name.partition("#")[2])


def update_id(run_id: str, part: int, outer_step: int, base: str, manifest: bytes, payload_hashes: Iterable[bytes] = ()) -> str:
    """Return the id (hex) of the update TO `outer_step`.

    Args:
        base: digest (hex) of the part's state that the update continues. Without it, equal bytes on two states would be one.
        manifest: the update's description, as bytes.
        payload_hashes: BLAKE3 (32 bytes each) of the encoded fragments, in order.
    """
    head = json.dumps([run_id, part, outer_step, base, len(manifest)]).encode() + b"\n"
    return blake3(b"".join((head, manifest, *payload_hashes))).hexdigest()


def check_count(what: str, value: object) -> None:
    """Raise ValueError unless this is an integer from 0 to MOST_COUNT."""
    _check(type(value) is int and 0 <= value <= MOST_COUNT, f"{what} = {value!r:.40}")


def check_seconds(what: str, value: object, most: float) -> None:
    """Raise ValueError unless this is a positive number of seconds, at most so many."""
    _check(isinstance(value, (int, float)) and 0 < value <= most, f"{what} = {value!r:.40}")  # NaN is neither


def check_digest(value: object) -> None:
    """Raise ValueError unless this is a BLAKE3 in hex."""
    _check(isinstance(value, str) and _DIGEST.fullmatch(value) is not None, f"no digest: {value!r:.80}")


def check_name(value: object) -> None:
    """Raise ValueError unless this is a name (`name_of`)."""
    _check(isinstance(value, str) and _NAME.fullmatch(value) is not None, f"no name: {value!r:.80}")


def check_id(value: object) -> None:
    """Raise ValueError unless this is a peer_id or a run_id."""
    _check(isinstance(value, str) and _ID.fullmatch(value) is not None, f"no id: {value!r:.80}")


def check_text(value: object) -> None:
    """Raise ValueError unless this is printable text of at most MOST_TEXT characters."""
    _check(isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable(), f"no text: {value!r:.40}")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the record cannot be read: {what}")


def _strict(kind: type, values: object) -> dict[str, Any]:
    """Return the values of a dataclass, lists as tuples; raise ValueError unless exactly its fields are there."""
    found, wanted = _mapping(values), {each.name for each in fields(kind)}
    _check(found.keys() == wanted, f"{kind.__name__} has {sorted(found.keys() ^ wanted)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def _mapping(values: object) -> dict[str, Any]:
    _check(isinstance(values, dict), f"no object: {values!r:.40}")
    return dict(values)  # type: ignore[call-overload,no-any-return]


def _listed(values: object) -> tuple[Any, ...]:
    _check(isinstance(values, (list, tuple)), f"no list: {values!r:.40}")
    return tuple(values)  # type: ignore[arg-type]


def _checksum(body: Mapping[str, object]) -> str:
    return blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
