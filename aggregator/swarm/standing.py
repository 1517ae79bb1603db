"""How a swarm stands: what one host says of itself (`Standing`), and what several say together (`Report`), in words.

A host knows its own parts and engines; the leader knows how far every member is; an owner knows its round. No sockets here.
What others say is bounded when it is decoded, and made printable when it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from edit.council.machine import Role
from edit.council.record import (
    MOST_COUNT,
    MOST_MEMBERS,
    MOST_PARTS,
    MOST_VOTERS,
    Part,
    PartState,
    Phase,
    Record,
    name_of,
    peer_of,
)
from edit.errors import RemoteProtocolError
from edit.plain_text import parse_json
from editpb.limits import MAX_SHOWN, one_line
from editpb.validity import duration

__all__ = [
    "EngineStanding",
    "GossipStanding",
    "PartStanding",
    "PeerStanding",
    "Report",
    "Standing",
    "lasting",
    "quorum_words",
    "report",
    "state_of",
]

MOST_NOTICES = 8
MOST_WORDS = 512  # characters of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStanding:
    """The round of a part, at its owner."""

    grant: int
    phase: str
    round_id: int  # 0: none is open
    waiting_for: str  # in words
    reason: str  # why the run cannot go on as it stands, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStanding:
    """A part at one host."""

    outer_step: int
    digest: str  # empty: there is no state yet
    work: str  # what is under way, in words; empty: nothing
    engine: EngineStanding | None  # None: it is not served here


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipStanding:
    """With gossip: the outer steps of a host's own peer. All of it is that host's word."""

    outer_step: int  # swaps and settlings
    settlings: int  # of these
    trains: bool
    partner: str  # of the last swap; empty: none
    said: str  # what came of it, in words
    distance: float | None  # of the outer parameters of both then, as the partner sent its own; None: not known
    together: int  # swaps of this process; of these taken with the partner
    alone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStanding:
    """Another member, as one host sees it."""

    peer_id: str
    connected: bool
    since_s: float  # it has been so for so long
    why: str  # it is not connected: of the last attempt
    live: bool | None  # None: this host does not lead, and does not judge
    silent_s: float | None  # likewise; None also: it never said anything
    states: tuple[tuple[int, str], ...]  # outer step and digest of each part, of what it says it has, or can compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one host says. Raises ValueError for what no host may say."""

    run_id: str
    peer_id: str
    role: str
    leader: str  # peer_id, as far as this host hears one
    term: int
    committed: bool  # whether `record` is known to be
    record: Record | None
    parts: tuple[PartStanding, ...]
    peers: tuple[PeerStanding, ...]
    notices: tuple[str, ...] = ()  # the last, newest last
    leaving: bool = False
    authority: bool = False  # whether it has a copy of the authority's key
    gossip: GossipStanding | None = None  # None: the steps are the swarm's

    def encode(self) -> bytes:
        """Return it as JSON."""
        values = asdict(self) | {"record": self.record.as_json() if self.record is not None else None}
        return json.dumps(values, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Standing:
        """Return what `encode` wrote. Raises RemoteProtocolError for anything else."""
        try:
            found = _values(cls, parse_json(data, finite=True))
            if found["record"] is not None:
                found["record"] = Record.from_json(found["record"])
            found["parts"] = tuple(map(_part, _list(found["parts"], MOST_PARTS)))
            found["peers"] = tuple(map(_peer, _list(found["peers"], 2 * MOST_MEMBERS)))
            found["notices"] = tuple(map(_words, _list(found["notices"], MOST_NOTICES)))
            if found["gossip"] is not None:
                found["gossip"] = _gossip(found["gossip"])
            Role(found["role"])
            _count(found["term"])
            _flags(found["committed"], found["leaving"], found["authority"])
            return cls(**found)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RemoteProtocolError(one_line(f"how a host stands cannot be read ({error})")) from error


def _part(values: object) -> PartStanding:
    found = _values(PartStanding, values)
    if found["engine"] is not None:
        found["engine"] = EngineStanding(**_values(EngineStanding, found["engine"]))
        _count(found["engine"].round_id)
        _count(found["engine"].grant)
    _count(found["outer_step"])
    return PartStanding(**found)


def _gossip(values: object) -> GossipStanding:
    found = _values(GossipStanding, values)
    _flags(found["trains"])
    for count in ("outer_step", "settlings", "together", "alone"):
        _count(found[count])
    _length(found["distance"] if found["distance"] is not None else 0.0)
    return GossipStanding(**found)


def _peer(values: object) -> PeerStanding:
    found = _values(PeerStanding, values)
    states = [(_count(step), _words(digest)) for step, digest in _list(found["states"], MOST_PARTS)]
    _flags(found["connected"], found["live"] is not None and found["live"])
    _seconds(found["since_s"])
    _seconds(found["silent_s"] if found["silent_s"] is not None else 0.0)
    return PeerStanding(**found | {"states": tuple(states)})


def _values(kind: type, values: object) -> dict[str, Any]:
    """Return the fields of a value; texts are bounded."""
    if not isinstance(values, dict) or values.keys() != {each.name for each in fields(kind)}:
        raise ValueError(f"no {kind.__name__}")
    return {key: _words(value) if each == "str" else value for key, value in values.items() for each in (_kind(kind, key),)}


def _kind(kind: type, key: str) -> str:
    return next(str(each.type) for each in fields(kind) if each.name == key)


def _words(value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_WORDS:
        raise ValueError(f"no text: {value!r:.40}")
    return value


def _list(value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of at most {most}: {value!r:.40}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"no count: {value!r:.40}")
    return value


def _seconds(value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value <= 1e12:  # type: ignore[operator]
        raise ValueError(f"no seconds: {value!r:.40}")


def _length(value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value <= MAX_SHOWN:  # type: ignore[operator]
        raise ValueError(f"no length: {value!r:.40}")


def _flags(*values: object) -> None:
    if not all(isinstance(value, bool) for value in values):
        raise ValueError("no flag")


# -- what several hosts say together ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the swarm stands: the values of `status --json`."""

    source: str  # who was asked; or which file was read, because nobody answered
    run_id: str
    phase: str
    leader: str  # empty: there is none, or it is not known
    quorum: str  # in words
    has_quorum: bool | None  # None: not known
    lineage: int
    term: int
    version: int
    parts: tuple[Mapping[str, Any], ...]
    members: tuple[Mapping[str, Any], ...]
    evicted: Mapping[str, str]  # why, by peer_id
    holders: tuple[str, ...]  # who was given the key of the run's authority
    notes: tuple[str, ...]  # what else is to be said: who did not answer, what was noticed
    outer_chosen: str = ""  # what outer.preset = "auto" chose, and why; empty: nothing, or the folder has no settings yet

    def as_json(self) -> dict[str, object]:
        """Return the values of `status --json`: stable names for scripts."""
        return asdict(self)


def report(record: Record, source: str, standings: Mapping[str, Standing], silent: Mapping[str, str], term: int = 0) -> Report:
    """Put together what was learned.

    Args:
        record: the newest that is known.
        source: who was asked first.
        standings: what hosts answered, by peer_id.
        silent: why others did not.
        term: the newest that is known.
    """
    leading = [each for each in standings.values() if each.role == Role.LEADER.value]
    leads = max(leading, key=lambda each: each.term, default=None)
    leader = leads.peer_id if leads is not None else next((each.leader for each in standings.values() if each.leader), "")
    seen = {each.peer_id: each for each in leads.peers} if leads is not None else {}
    present = _present(record, leads, standings)
    members = tuple(_member(record, peer_id, leader, leads, seen, standings, silent) for peer_id in sorted(record.members))
    parts = tuple(_part_row(record, i, leads, standings, silent) for i in range(len(record.parts)))
    notes = [f"{peer_id} does not answer: {why}" for peer_id, why in silent.items()]
    notes += _holder_notes(record, standings)
    notes += _distrust_words(record)
    notes += [f"{each.peer_id} is leaving" for each in standings.values() if each.leaving]
    notes += [f"{each.peer_id}: {text}" for each in standings.values() for text in each.notices[-3:]]
    notes += _gossip_words(standings)
    return Report(
        source=source,
        run_id=record.run_id,
        phase=record.phase.value,
        leader=leader,
        quorum=quorum_words(record, present),
        has_quorum=record.agreed(present) if present is not None else None,
        lineage=record.lineage,
        term=max((term, record.term, *(each.term for each in standings.values()))),
        version=record.version,
        parts=parts,
        members=members,
        evicted=dict(record.evicted),
        holders=record.holders,
        notes=tuple(one_line(note, MOST_WORDS) for note in notes),
    )


def _holder_notes(record: Record, standings: Mapping[str, Standing]) -> list[str]:
    """Say where copies of the authority's key are that should not be, or are not that should be."""
    notes = []
    for peer_id in record.holders:
        if peer_id in record.evicted:
            notes.append(f"{peer_id} was evicted, and was given the authority's key, which counts until new-authority is said")
        elif (said := standings.get(peer_id)) is not None and not said.authority:
            notes.append(f"{peer_id} has no copy of the authority's key yet: say share-authority {peer_id} again")
    if len(record.roots) > 1:
        late = [peer_id for peer_id, each in sorted(record.members.items()) if each.authority != record.roots[-1].name]
        notes.append(f"the authority is being replaced: {', '.join(late) or 'nobody'} has no certificate of the new one yet")
    more = [each.peer_id for each in standings.values() if each.authority and each.peer_id not in record.holders]
    return notes + [f"{peer_id} has a copy of the authority's key that is not agreed on" for peer_id in more]


def _distrust_words(record: Record) -> list[str]:
    """Say who is not trusted with a part, and why."""
    return [
        f"{peer_id} owns and verifies nothing while others can: {' and '.join(record.disputes[peer_id])} came to other bits; "
        "find out who is wrong, and evict"
        for peer_id in sorted(record.distrusted & record.members.keys())
    ]


def _gossip_words(standings: Mapping[str, Standing]) -> list[str]:
    """Say of each peer how far it is, and how its last swap went; and how far apart the partners were."""
    found = {each.peer_id: each.gossip for each in standings.values() if each.gossip is not None and each.gossip.trains}
    words = [
        f"{peer_id}: outer step {one.outer_step}, {one.settlings} of it settlings; {one.said or 'no swap yet'}; "
        f"since its start {one.together} swaps together, {one.alone} alone"
        for peer_id, one in sorted(found.items())
    ]
    far = [one.distance for one in found.values() if one.distance is not None]
    if far:
        words.append(f"partners were {sum(far) / len(far):.4g} apart in the mean, by their own word")
    return words


def quorum_words(record: Record, present: frozenset[str] | None) -> str:
    """Return how many voters are here, and how many are needed. present: names; None: nobody knows."""
    voters, oldest = record.voters, peer_of(record.voters[0])
    more, half = len(voters) // 2 + 1, len(voters) / 2
    needed = f"{more} needed" if len(voters) % 2 else f"{more} needed, or {half:.0f} with {oldest}, the oldest"
    here = f"{len([v for v in voters if v in present])} of {len(voters)} here" if present is not None else f"{len(voters)} vote"
    changing = "; the voters change, and as many of the former ones are needed" if record.before else ""
    return f"{here}, {needed}{changing}" if len(voters) > 1 else f"{oldest} alone votes{changing}"


def _present(record: Record, leads: Standing | None, standings: Mapping[str, Standing]) -> frozenset[str] | None:
    """Return the names of the voters that are here: by the leader's judgment, else by whom the first host is connected to."""
    first = leads or next(iter(standings.values()), None)
    if first is None:
        return None
    here = {each.peer_id for each in first.peers if (each.connected if each.live is None else each.live)}
    return frozenset(name for name in record.electors if peer_of(name) in here | {first.peer_id})


def _part_row(
    record: Record, i: int, leads: Standing | None, standings: Mapping[str, Standing], silent: Mapping[str, str]
) -> dict[str, Any]:
    part = record.parts[i]
    holders = None
    if leads is not None:
        holders = [each.peer_id for each in leads.peers if i < len(each.states) and _has(each.states[i], part)]
        holders += (
            [leads.peer_id] if i < len(leads.parts) and _has((leads.parts[i].outer_step, leads.parts[i].digest), part) else []
        )
    owner = standings.get(part.owner)
    engine = owner.parts[i].engine if owner is not None and i < len(owner.parts) else None
    return {
        "part": i,
        "owner": part.owner,
        "grant": part.grant,
        "outer_step": part.outer_step,
        "digest": part.digest,
        "tokens": part.tokens,
        "holders": sorted(holders) if holders is not None else None,
        "phase": engine.phase if engine is not None else "",
        "round_id": engine.round_id if engine is not None else 0,
        "waits": _waits(record, part, engine, owner, silent),
    }


def _waits(record: Record, part: Part, engine: EngineStanding | None, owner: Standing | None, silent: Mapping[str, str]) -> str:
    """Say what the part's round waits for."""
    if record.phase is Phase.FINISHED:
        return ""
    if owner is None:
        return f"{part.owner} does not answer" if part.owner in silent else f"{part.owner} was not asked"
    if owner.gossip is not None:
        return "the next settling"
    if engine is None or engine.grant != part.grant:
        return f"{part.owner} is about to serve it"
    reason = engine.reason if engine.phase != "paused" else ""  # which says that it is
    return "; ".join(filter(None, (engine.waiting_for and f"waits for {engine.waiting_for}", reason)))


def _has(state: tuple[int, str], part: Part) -> bool:
    return state == (part.outer_step, part.digest)


def _member(
    record: Record,
    peer_id: str,
    leader: str,
    leads: Standing | None,
    seen: Mapping[str, PeerStanding],
    standings: Mapping[str, Standing],
    silent: Mapping[str, str],
) -> dict[str, Any]:
    member = record.members[peer_id]
    voter = name_of(peer_id, member.incarnation) in record.voters
    state, why = _state(record, peer_id, leads, seen.get(peer_id), standings)
    if peer_id == leader and state == "here":
        state = "leads"
    if not voter and not why:
        why = f"{MOST_VOTERS} vote already" if len(record.voters) == MOST_VOTERS else "it is about to vote"
    if not member.reachable and state in ("here", "late"):
        why = "; ".join(filter(None, ("nobody can dial it, so it owns no part and does not lead", why)))
    return {
        "peer_id": peer_id,
        "voter": voter,
        "state": state,
        "why": why,
        "owns": [i for i, part in enumerate(record.parts) if part.owner == peer_id],
        "addresses": list(member.addresses),
        "reachable": member.reachable,
    }


def _state(
    record: Record, peer_id: str, leads: Standing | None, seen: PeerStanding | None, standings: Mapping[str, Standing]
) -> tuple[str, str]:
    """Return how a member is (here, late, away, unknown), and why."""
    own = standings.get(peer_id)
    if leads is None:
        if own is None:
            return "unknown", _absent_words(
                next(filter(None, map(_seen_by(peer_id), standings.values())), None), record, peer_id
            )
        return _progress(record, [(part.outer_step, part.digest) for part in own.parts], own)
    if peer_id == leads.peer_id:
        return _progress(record, [(part.outer_step, part.digest) for part in leads.parts], leads)
    if seen is None:
        return "unknown", f"{leads.peer_id} has not met it"
    if seen.live:
        return _progress(record, seen.states, own)
    if seen.connected and seen.silent_s is not None:
        return "away", f"silent for {lasting(seen.silent_s)}, though its connection stands: stopped, or its disk hangs"
    if seen.connected:
        return "away", "connected, and has not said what it has yet"
    return "away", _absent_words(seen, record, peer_id)


def _seen_by(peer_id: str) -> Any:
    return lambda standing: next((each for each in standing.peers if each.peer_id == peer_id), None)


def _absent_words(seen: PeerStanding | None, record: Record, peer_id: str) -> str:
    """Say why a member is not here."""
    if seen is None:
        return ""
    if seen.connected:
        return "connected; only the leader knows how far it is"
    member, since = record.members[peer_id], f"not connected for {lasting(seen.since_s)}"
    if not member.reachable or not member.addresses:
        return f"{since}; it has no address, so it must come by itself"
    why = seen.why.rpartition(": ")[2] if seen.why.startswith("failed to connect") else seen.why  # gRPC's is long
    return f"{since}: {why}" if why else since


def _progress(record: Record, states: Sequence[tuple[int, str]], own: Standing | None) -> tuple[str, str]:
    """Return whether a member that is here has everything, and what it lacks.

    An update counts once a quorum holds it, so others lack it for a moment at every outer step: one update behind is not late.
    """
    work = [part.work for part in own.parts if part.work] if own is not None else []
    if len(states) < len(record.parts) or not all(digest for _, digest in states):
        return "late", "; ".join(("it has no state yet: a snapshot is fetched", *work[:2]))
    behind = {
        i: part.outer_step - step
        for i, ((step, digest), part) in enumerate(zip(states, record.parts, strict=False))
        if step != part.outer_step or digest != part.digest
    }
    words = [_behind_words(i, states[i][0], record.parts[i].outer_step) for i in list(behind)[:2]]
    more = [f"and {len(behind) - 2} more parts"] if len(behind) > 2 else []
    if all(steps == 1 for steps in behind.values()):
        return "here", "; ".join((*words, *more))
    return "late", "; ".join((*words, *more, *work[:2]))


def _behind_words(i: int, step: int, agreed: int) -> str:
    """Say how far a member is with a part that it has otherwise than the record names it."""
    if step > agreed:
        return f"part {i} is at outer step {step}, the swarm at {agreed}: were others restored from an earlier backup?"
    return f"part {i} is at outer step {step} of {agreed}" if step < agreed else f"part {i} is damaged, or of another history"


def lasting(seconds: float) -> str:
    """Return a duration for people: `35 s`, `40 min`, `5 h`."""
    return f"{seconds:.0f} s" if seconds < 120 else duration(seconds)


def state_of(state: PartState, part: Part) -> tuple[int, str]:
    """Return the outer step and the digest that a member has of a part. An update counts that it holds and the record names."""
    return (part.outer_step, part.digest) if state.has(part) else (state.outer_step, state.digest)
