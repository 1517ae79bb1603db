"""Converts what the hosts of a swarm say to each other (`edit.council.events`) to and from council.proto.

`message_to_pb` never fails; `message_from_pb` raises RemoteProtocolError with one line, and nothing else: the bounds are
those of the values themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edit.council.events import Accepted, Append, Ask, Claim, Ended, Hello, Leave, Message, News, Release, Stall, Vote
from edit.council.record import (
    MOST_ADDRESSES,
    MOST_COUNT,
    MOST_MEMBERS,
    MOST_PARTS,
    MOST_TEXT,
    Enrolled,
    Member,
    PartState,
    Record,
    Stamp,
    Update,
    check_count,
    check_digest,
)
from edit.fragments.schema import Schema
from edit.plain_text import parse_json
from edit.rounds.work_claims import Work
from edit.trust.merkle import HASH_BYTES
from edit.trust.signatures import MOST_KEY_BYTES, SIGNATURE_BYTES
from editpb import council_pb2 as pb
from editpb.data_messages import contribution_header_from_pb, contribution_header_to_pb
from editpb.invitation import is_endpoint
from editpb.limits import (
    MAX_CONFIG_CHARS,
    MAX_COUNT,
    MAX_ENTRY_BYTES,
    MAX_PROOF_HASHES,
    MAX_STEP,
    at_most,
    check_id,
    check_text,
    fail,
    one_line,
    within,
)
from editpb.messages import PROTOCOL, ContributionHeader, LoggedEntry

__all__ = [
    "COUNCIL_BYTES",
    "MOST_TOLD",
    "NONCE_BYTES",
    "Introduction",
    "LogDoubt",
    "MergedContribution",
    "OfferHeader",
    "Offering",
    "PartOwner",
    "StateAsked",
    "StateDigest",
    "StateHeader",
    "SwapBegin",
    "SwarmDescription",
    "Told",
    "Word",
    "description_from_pb",
    "description_to_pb",
    "doubt_from_pb",
    "doubt_to_pb",
    "goes_on_from_pb",
    "goes_on_request_from_pb",
    "logged_from_pb",
    "logged_request_from_pb",
    "logged_to_pb",
    "merged_contribution_from_pb",
    "merged_contribution_to_pb",
    "message_from_pb",
    "message_to_pb",
    "offer_header_from_pb",
    "offer_header_to_pb",
    "owners_from_pb",
    "owners_to_pb",
    "state_header_from_pb",
    "state_header_to_pb",
    "swap_begin_from_pb",
    "swap_begin_to_pb",
    "waiting_from_pb",
    "waiting_to_pb",
]

COUNCIL_BYTES = 8 << 20  # the largest message: a record with as many members, and as much text of each, as it may have
NONCE_BYTES = 32
MOST_TENSORS = 1 << 19  # of a part's state
MOST_TOLD = 64  # outer steps after which it is said what a state comes to, unless that is asked again


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first message of each side. Who dials has a nonce, who is dialled a key and a proof (see `introductions`).

    started: which start of the member this is; of two with one folder, or copies of it, the later one has the larger number.
    0: not said.
    """

    run_id: str
    incarnation: int
    protocol: int = PROTOCOL
    nonce: bytes = b""
    key: bytes = b""  # SubjectPublicKeyInfo, DER
    proof: bytes = b""
    started: int = 0


@dataclass(frozen=True, slots=True)
class LogDoubt:
    """What a peer finds wrong with the audit log of a part at an outer step. reason: in words."""

    part: int
    outer_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Offering:
    """From an owner: fetch this update, and hold it."""

    update: Update


@dataclass(frozen=True, slots=True)
class StateAsked:
    """From who fetches the state of a part: say what yours comes to, now and after so many further outer steps."""

    part: int
    outer_steps: int  # 0: say no more

    def __post_init__(self) -> None:
        if not 0 <= self.part < MOST_PARTS or not 0 <= self.outer_steps <= MOST_TOLD:
            raise ValueError(f"part {self.part}, {self.outer_steps} outer steps")


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The answer: what the whole state of a part comes to here."""

    part: int
    outer_step: int
    name: str  # of the state, as in the record; "": there is none here that is whole
    digest: str  # of all of it; "" likewise

    def __post_init__(self) -> None:
        if not 0 <= self.part < MOST_PARTS or bool(self.name) is not bool(self.digest):
            raise ValueError(f"part {self.part}, {self.name!r:.80}, {self.digest!r:.80}")
        check_count("outer_step", self.outer_step)
        for digest in filter(None, (self.name, self.digest)):
            check_digest(digest)


@dataclass(frozen=True, slots=True)
class MergedContribution:
    """What an owner says of a shard of a contribution that it has merged. work: that the contribution counts for."""

    header: ContributionHeader
    work: Work


Told = Offering | StateAsked | StateDigest  # from shell to shell: the council hears nothing of it
Word = Introduction | Told | Message


@dataclass(frozen=True, slots=True)
class OfferHeader:
    """How many bytes of each kind an update has."""

    update: Update
    manifest_bytes: int
    body_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateHeader:
    """How many bytes of each kind a part's state has."""

    name: str  # digest of the state
    tokens: int
    description_bytes: int
    tensor_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapBegin:
    """What a side of a swap says of its offer."""

    record: Stamp  # from whose members the pairs are drawn
    outer_step: int  # swaps that it has taken
    inner_steps: int  # behind the contribution
    tokens: int


@dataclass(frozen=True, slots=True)
class PartOwner:
    """Who serves a part to peers that train."""

    peer_id: str
    first_round_id: int  # of its rounds: an owner that was given the part later has a greater one
    addresses: tuple[str, ...] = ()  # HOST:PORT


@dataclass(frozen=True, slots=True)
class SwarmDescription:
    """What a member, or a peer that trains, has to know of the swarm."""

    parts: int
    hosts: Mapping[str, tuple[str, ...]]  # HOST:PORT of those that accept connections, by peer_id
    run_toml: bytes = b""  # empty: not asked for
    schema: bytes = b""  # as in schema.json; empty for a built-in model


def message_to_pb(word: Word) -> pb.CouncilMessage:
    """Encode one message."""
    kinds = pb.CouncilMessage
    match word:
        case Introduction(run_id, incarnation, protocol, nonce, key, proof, started):
            shown = pb.Introduction(
                run_id=run_id,
                protocol=protocol,
                incarnation=incarnation,
                nonce=nonce,
                key=key,
                proof=proof,
                started=started,
            )
            return kinds(introduction=shown)
        case Hello(stamp, member):
            there = kinds.Member(
                incarnation=member.incarnation,
                addresses=member.addresses,
                maddr=member.maddr,
                reachable=member.reachable,
                authority=member.authority,
                relayed=member.relayed,
            )
            return kinds(hello=kinds.Hello(stamp=_stamp(stamp), member=there))
        case News(record):
            return kinds(news=kinds.News(record=_record(record)))
        case Ask(term, stamp, trial, sent):
            return kinds(ask=kinds.Ask(term=term, stamp=_stamp(stamp), trial=trial, sent=sent))
        case Vote(term, granted, trial, echo):
            return kinds(vote=kinds.Vote(term=term, granted=granted, trial=trial, echo=echo))
        case Append(stamp, committed, record, sent):
            written = _record(record) if record is not None else b""
            return kinds(append=kinds.Append(stamp=_stamp(stamp), committed=_stamp(committed), record=written, sent=sent))
        case Accepted(term, stamp, states, echo):
            found = [_state(state) for state in states]
            return kinds(accepted=kinds.Accepted(term=term, stamp=_stamp(stamp), states=found, echo=echo))
        case Release(part, grant, reason, away):
            return kinds(release=kinds.Release(part=part, grant=grant, reason=reason, away=away))
        case Ended(part, grant):
            return kinds(ended=kinds.Ended(part=part, grant=grant))
        case Leave():
            return kinds(leave=kinds.Leave())
        case Stall(part, grant, outer_step, waits):
            return kinds(stall=kinds.Stall(part=part, grant=grant, outer_step=outer_step, waits=waits))
        case Claim(peer_id, enrolled):
            number, key = bytes.fromhex(enrolled.invitation), bytes.fromhex(enrolled.key)
            return kinds(claim=kinds.Claim(peer_id=peer_id, invitation=number, key=key, observer=enrolled.observer))
        case Offering(update):
            return kinds(offering=kinds.Offering(update=_update(update)))
        case StateAsked(part, outer_steps):
            return kinds(state_asked=kinds.StateAsked(part=part, outer_steps=outer_steps))
        case StateDigest(part, outer_step, name, digest):
            named, all_of_it = bytes.fromhex(name), bytes.fromhex(digest)
            return kinds(state_digest=kinds.StateDigest(part=part, outer_step=outer_step, name=named, digest=all_of_it))


def description_to_pb(description: SwarmDescription) -> pb.SwarmDescription:
    """Encode what a swarm is."""
    hosts = [pb.HostAddresses(peer_id=peer_id, addresses=addresses) for peer_id, addresses in description.hosts.items()]
    return pb.SwarmDescription(parts=description.parts, hosts=hosts, run_toml=description.run_toml, schema=description.schema)


def description_from_pb(message: pb.SwarmDescription) -> SwarmDescription:
    """Decode what a swarm is."""
    within("parts", message.parts, 1, MOST_PARTS)
    at_most("hosts", message.hosts, MOST_MEMBERS)
    at_most("run_toml", message.run_toml, MAX_CONFIG_CHARS)
    hosts = {}
    for host in message.hosts:
        at_most("addresses", host.addresses, MOST_ADDRESSES)
        if wrong := next((each for each in host.addresses if not is_endpoint(each)), ""):
            fail(f"an address {wrong!r:.80}")
        hosts[check_id("peer_id", host.peer_id)] = tuple(host.addresses)
    return SwarmDescription(message.parts, hosts, message.run_toml, message.schema)


def message_from_pb(message: pb.CouncilMessage) -> Word:
    """Decode one message; every value is within its bounds."""
    read = _READERS.get(message.WhichOneof("kind") or "")
    if read is None:
        fail("a council message of a kind that is not known here")
    with _refused():
        return read(message)


def offer_header_to_pb(header: OfferHeader) -> pb.OfferHeader:
    """Encode the head of an update's bytes."""
    return pb.OfferHeader(update=_update(header.update), manifest_bytes=header.manifest_bytes, body_bytes=header.body_bytes)


def offer_header_from_pb(message: pb.OfferHeader) -> OfferHeader:
    """Decode the head of an update's bytes. The receiver bounds their number and sizes, by what the part can have."""
    at_most("bodies of an update", message.body_bytes, MOST_TENSORS)
    with _refused():
        return OfferHeader(_update_from(message.update), message.manifest_bytes, tuple(message.body_bytes))


def state_header_to_pb(header: StateHeader) -> pb.StateHeader:
    """Encode the head of a state's bytes."""
    return pb.StateHeader(
        name=bytes.fromhex(header.name),
        tokens=header.tokens,
        description_bytes=header.description_bytes,
        tensor_bytes=header.tensor_bytes,
    )


def state_header_from_pb(message: pb.StateHeader) -> StateHeader:
    """Decode the head of a state's bytes, as `offer_header_from_pb`."""
    at_most("tensors of a state", message.tensor_bytes, MOST_TENSORS)
    tokens = within("tokens", message.tokens, 0, MOST_COUNT)
    return StateHeader(_digest_from(message.name), tokens, message.description_bytes, tuple(message.tensor_bytes))


def swap_begin_to_pb(begin: SwapBegin) -> pb.SwapPart:
    """Encode the first message of a swap."""
    record, rest = _stamp(begin.record), (begin.outer_step, begin.inner_steps, begin.tokens)
    return pb.SwapPart(begin=pb.SwapBegin(record=record, outer_step=rest[0], inner_steps=rest[1], tokens=rest[2]))


def swap_begin_from_pb(message: pb.SwapBegin) -> SwapBegin:
    """Decode the first message of a swap. Raises RemoteProtocolError."""
    with _refused():
        record = _stamp_from(message.record)
    return SwapBegin(
        record,
        within("outer_step", message.outer_step, 0, MAX_COUNT),
        within("inner_steps", message.inner_steps, 0, MAX_COUNT),
        within("tokens", message.tokens, 0, MOST_COUNT),
    )


def owners_to_pb(parts: Sequence[PartOwner]) -> pb.Owners:
    """Encode the owners of all parts."""
    owners = [pb.Owners.Owner(peer_id=one.peer_id, first_round_id=one.first_round_id, addresses=one.addresses) for one in parts]
    return pb.Owners(parts=owners)


def owners_from_pb(message: pb.Owners) -> tuple[PartOwner, ...]:
    """Decode the owners of all parts. Raises RemoteProtocolError."""
    at_most("parts", message.parts, MOST_PARTS)
    return tuple(map(_owner_from, message.parts))


def waiting_to_pb(parts: Mapping[int, int]) -> pb.WaitingRequest:
    """Encode for which parts a peer waits, and the outer step that it is at in each."""
    kind = pb.WaitingRequest.Waiting
    return pb.WaitingRequest(parts=[kind(part=part, outer_step=outer_step) for part, outer_step in parts.items()])


def waiting_from_pb(message: pb.WaitingRequest) -> dict[int, int]:
    """Decode it. Raises RemoteProtocolError."""
    at_most("parts", message.parts, MOST_PARTS)
    return {
        within("part", one.part, 0, MOST_PARTS - 1): within("outer_step", one.outer_step, 0, MAX_COUNT) for one in message.parts
    }


def logged_request_from_pb(message: pb.LoggedRequest) -> tuple[int, int, int]:
    """Return part and outer step of the entry that is asked for, and how many were seen. Raises RemoteProtocolError."""
    part = within("part", message.part, 0, MOST_PARTS - 1)
    outer_step = within("outer_step", message.outer_step, 1, MAX_STEP)
    return part, outer_step, within("seen", message.seen, 0, outer_step - 1)


def logged_to_pb(logged: LoggedEntry) -> pb.LoggedReply:
    """Encode an entry of the audit log of a part."""
    return pb.LoggedReply(entry=logged.entry, peaks=logged.peaks, consistency=logged.consistency)


def goes_on_request_from_pb(message: pb.GoesOnRequest) -> tuple[int, int, int]:
    """Return part, and how many entries begin with how many. Raises RemoteProtocolError."""
    part = within("part", message.part, 0, MOST_PARTS - 1)
    new = within("new", message.new, 1, MAX_STEP)
    return part, within("old", message.old, 1, new), new


def goes_on_from_pb(message: pb.GoesOnReply) -> tuple[bytes, ...]:
    """Decode the hashes of a proof. Raises RemoteProtocolError. `edit.trust.merkle` checks it."""
    return _hashes("consistency", message.consistency)


def logged_from_pb(message: pb.LoggedReply) -> LoggedEntry:
    """Decode it. Raises RemoteProtocolError. What it says is checked by `editpb.part_receipts`."""
    at_most("bytes of an entry", message.entry, MAX_ENTRY_BYTES)
    return LoggedEntry(message.entry, _hashes("peaks", message.peaks), _hashes("consistency", message.consistency))


def _hashes(name: str, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    at_most(name, hashes, MAX_PROOF_HASHES)
    for each in hashes:
        within(f"bytes of a hash in {name}", len(each), HASH_BYTES, HASH_BYTES)
    return tuple(hashes)


def doubt_to_pb(doubt: LogDoubt) -> pb.LogDoubt:
    """Encode what a peer doubts."""
    return pb.LogDoubt(part=doubt.part, outer_step=doubt.outer_step, reason=one_line(doubt.reason))


def doubt_from_pb(message: pb.LogDoubt) -> LogDoubt:
    """Decode it. Raises RemoteProtocolError."""
    part = within("part", message.part, 0, MOST_PARTS - 1)
    return LogDoubt(part, within("outer_step", message.outer_step, 1, MAX_STEP), check_text("reason", message.reason))


def _owner_from(owner: pb.Owners.Owner) -> PartOwner:
    at_most("addresses", owner.addresses, MOST_ADDRESSES)
    return PartOwner(
        peer_id=check_id("peer_id", owner.peer_id),
        first_round_id=within("first_round_id", owner.first_round_id, 1, MAX_COUNT),
        addresses=tuple(check_text("addresses", address, MOST_TEXT) for address in owner.addresses),
    )


@contextmanager
def _refused() -> Iterator[None]:
    """What may not be said is the sender's fault."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        fail(f"a council message cannot be read ({error})")


def _stamp(stamp: Stamp) -> pb.Stamp:
    return pb.Stamp(lineage=stamp.lineage, term=stamp.term, version=stamp.version)


def _stamp_from(message: pb.Stamp) -> Stamp:
    return Stamp(message.lineage, message.term, message.version)


def _record(record: Record) -> bytes:
    return json.dumps(record.as_json(), separators=(",", ":"), allow_nan=False).encode()


def _record_from(data: bytes) -> Record:
    return Record.from_json(parse_json(data, finite=True))


def _update(update: Update) -> pb.PartUpdate:
    return pb.PartUpdate(
        part=update.part,
        outer_step=update.outer_step,
        grant=update.grant,
        id=bytes.fromhex(update.id),
        base=bytes.fromhex(update.base),
        digest=bytes.fromhex(update.digest),
        tokens=update.tokens,
    )


def merged_contribution_to_pb(merged: MergedContribution) -> pb.MergedContribution:
    """Encode what an owner says of a shard that it has merged."""
    header, work = contribution_header_to_pb(merged.header), merged.work
    return pb.MergedContribution(header=header, inner_steps=work.inner_steps, tokens=work.tokens)


def merged_contribution_from_pb(message: pb.MergedContribution, schema: Schema) -> MergedContribution:
    """Decode what an owner says of a shard that it has merged. schema: of the part."""
    inner_steps = within("inner_steps", message.inner_steps, 1, MAX_STEP)
    work = Work(inner_steps, within("tokens", message.tokens, 0, MAX_COUNT))
    return MergedContribution(contribution_header_from_pb(message.header, schema), work)


def _update_from(message: pb.PartUpdate) -> Update:
    return Update(
        message.part,
        message.outer_step,
        message.grant,
        message.id.hex(),
        message.base.hex(),
        message.digest.hex(),
        message.tokens,
    )


def _digest_from(data: bytes) -> str:
    if len(data) != 32:
        fail(f"a digest of {len(data)} bytes")
    return data.hex()


def _state(state: PartState) -> pb.PartState:
    held = _update(state.held) if state.held is not None else None
    return pb.PartState(outer_step=state.outer_step, digest=bytes.fromhex(state.digest), held=held)


def _state_from(message: pb.PartState) -> PartState:
    held = _update_from(message.held) if message.HasField("held") else None
    return PartState(message.outer_step, message.digest.hex(), held)


def _introduction(message: pb.CouncilMessage) -> Introduction:
    first = message.introduction
    within("incarnation", first.incarnation, 0, MOST_COUNT)
    within("started", first.started, 0, MOST_COUNT)
    for name, data, most in (
        ("nonce", first.nonce, NONCE_BYTES),
        ("key", first.key, MOST_KEY_BYTES),
        ("proof", first.proof, SIGNATURE_BYTES),
    ):
        within(f"bytes of the {name}", len(data), 0, most)
    shown = first.nonce, first.key, first.proof
    return Introduction(first.run_id, first.incarnation, first.protocol, *shown, first.started)


def _hello(message: pb.CouncilMessage) -> Hello:
    hello, there = message.hello, message.hello.member
    member = Member(
        incarnation=there.incarnation,
        addresses=tuple(there.addresses),
        maddr=there.maddr,
        reachable=there.reachable,
        authority=there.authority,
        relayed=there.relayed,
    )
    return Hello(_stamp_from(hello.stamp), member)


def _append(message: pb.CouncilMessage) -> Append:
    append = message.append
    record = _record_from(append.record) if append.record else None
    return Append(_stamp_from(append.stamp), _stamp_from(append.committed), record, append.sent)


def _accepted(message: pb.CouncilMessage) -> Accepted:
    accepted = message.accepted
    at_most("parts", accepted.states, MOST_PARTS)
    states = tuple(map(_state_from, accepted.states))
    return Accepted(accepted.term, _stamp_from(accepted.stamp), states, accepted.echo)


def _ask(message: pb.CouncilMessage) -> Ask:
    return Ask(message.ask.term, _stamp_from(message.ask.stamp), message.ask.trial, message.ask.sent)


def _vote(message: pb.CouncilMessage) -> Vote:
    return Vote(message.vote.term, message.vote.granted, message.vote.trial, message.vote.echo)


def _release(message: pb.CouncilMessage) -> Release:
    return Release(message.release.part, message.release.grant, message.release.reason, message.release.away)


def _stall(message: pb.CouncilMessage) -> Stall:
    return Stall(message.stall.part, message.stall.grant, message.stall.outer_step, message.stall.waits)


def _claim(message: pb.CouncilMessage) -> Claim:
    claim = message.claim
    return Claim(claim.peer_id, Enrolled(claim.invitation.hex(), claim.key.hex(), claim.observer))


def _state_digest(message: pb.CouncilMessage) -> StateDigest:
    said = message.state_digest
    return StateDigest(said.part, said.outer_step, said.name.hex(), said.digest.hex())


_READERS: dict[str, Callable[[pb.CouncilMessage], Word]] = {
    "introduction": _introduction,
    "hello": _hello,
    "news": lambda message: News(_record_from(message.news.record)),
    "ask": _ask,
    "vote": _vote,
    "append": _append,
    "accepted": _accepted,
    "release": _release,
    "stall": _stall,
    "ended": lambda message: Ended(message.ended.part, message.ended.grant),
    "leave": lambda message: Leave(),
    "claim": _claim,
    "offering": lambda message: Offering(_update_from(message.offering.update)),
    "state_asked": lambda message: StateAsked(message.state_asked.part, message.state_asked.outer_steps),
    "state_digest": _state_digest,
}
