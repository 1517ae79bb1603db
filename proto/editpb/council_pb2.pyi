from editpb import data_pb2 as _data_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stamp(_message.Message):
    __slots__ = ("lineage", "term", "version")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    term: int
    version: int
    def __init__(self, lineage: _Optional[int] = ..., term: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class PartUpdate(_message.Message):
    __slots__ = ("part", "outer_step", "grant", "id", "base", "digest", "tokens")
    PART_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    part: int
    outer_step: int
    grant: int
    id: bytes
    base: bytes
    digest: bytes
    tokens: int
    def __init__(self, part: _Optional[int] = ..., outer_step: _Optional[int] = ..., grant: _Optional[int] = ..., id: _Optional[bytes] = ..., base: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., tokens: _Optional[int] = ...) -> None: ...

class PartState(_message.Message):
    __slots__ = ("outer_step", "digest", "held")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    digest: bytes
    held: PartUpdate
    def __init__(self, outer_step: _Optional[int] = ..., digest: _Optional[bytes] = ..., held: _Optional[_Union[PartUpdate, _Mapping]] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("run_id", "protocol", "incarnation", "nonce", "key", "proof", "started")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    incarnation: int
    nonce: bytes
    key: bytes
    proof: bytes
    started: int
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., incarnation: _Optional[int] = ..., nonce: _Optional[bytes] = ..., key: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., started: _Optional[int] = ...) -> None: ...

class CouncilMessage(_message.Message):
    __slots__ = ("introduction", "hello", "news", "ask", "vote", "append", "accepted", "release", "ended", "leave", "offering", "claim", "state_asked", "state_digest", "stall")
    class Member(_message.Message):
        __slots__ = ("incarnation", "addresses", "maddr", "reachable", "authority", "relayed")
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        ADDRESSES_FIELD_NUMBER: _ClassVar[int]
        MADDR_FIELD_NUMBER: _ClassVar[int]
        REACHABLE_FIELD_NUMBER: _ClassVar[int]
        AUTHORITY_FIELD_NUMBER: _ClassVar[int]
        RELAYED_FIELD_NUMBER: _ClassVar[int]
        incarnation: int
        addresses: _containers.RepeatedScalarFieldContainer[str]
        maddr: str
        reachable: bool
        authority: str
        relayed: bool
        def __init__(self, incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., maddr: _Optional[str] = ..., reachable: bool = ..., authority: _Optional[str] = ..., relayed: bool = ...) -> None: ...
    class Hello(_message.Message):
        __slots__ = ("stamp", "member")
        STAMP_FIELD_NUMBER: _ClassVar[int]
        MEMBER_FIELD_NUMBER: _ClassVar[int]
        stamp: Stamp
        member: CouncilMessage.Member
        def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., member: _Optional[_Union[CouncilMessage.Member, _Mapping]] = ...) -> None: ...
    class News(_message.Message):
        __slots__ = ("record",)
        RECORD_FIELD_NUMBER: _ClassVar[int]
        record: bytes
        def __init__(self, record: _Optional[bytes] = ...) -> None: ...
    class Ask(_message.Message):
        __slots__ = ("term", "stamp", "trial", "sent")
        TERM_FIELD_NUMBER: _ClassVar[int]
        STAMP_FIELD_NUMBER: _ClassVar[int]
        TRIAL_FIELD_NUMBER: _ClassVar[int]
        SENT_FIELD_NUMBER: _ClassVar[int]
        term: int
        stamp: Stamp
        trial: bool
        sent: float
        def __init__(self, term: _Optional[int] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ..., trial: bool = ..., sent: _Optional[float] = ...) -> None: ...
    class Vote(_message.Message):
        __slots__ = ("term", "granted", "trial", "echo")
        TERM_FIELD_NUMBER: _ClassVar[int]
        GRANTED_FIELD_NUMBER: _ClassVar[int]
        TRIAL_FIELD_NUMBER: _ClassVar[int]
        ECHO_FIELD_NUMBER: _ClassVar[int]
        term: int
        granted: bool
        trial: bool
        echo: float
        def __init__(self, term: _Optional[int] = ..., granted: bool = ..., trial: bool = ..., echo: _Optional[float] = ...) -> None: ...
    class Append(_message.Message):
        __slots__ = ("stamp", "committed", "record", "sent")
        STAMP_FIELD_NUMBER: _ClassVar[int]
        COMMITTED_FIELD_NUMBER: _ClassVar[int]
        RECORD_FIELD_NUMBER: _ClassVar[int]
        SENT_FIELD_NUMBER: _ClassVar[int]
        stamp: Stamp
        committed: Stamp
        record: bytes
        sent: float
        def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., committed: _Optional[_Union[Stamp, _Mapping]] = ..., record: _Optional[bytes] = ..., sent: _Optional[float] = ...) -> None: ...
    class Accepted(_message.Message):
        __slots__ = ("term", "stamp", "states", "echo")
        TERM_FIELD_NUMBER: _ClassVar[int]
        STAMP_FIELD_NUMBER: _ClassVar[int]
        STATES_FIELD_NUMBER: _ClassVar[int]
        ECHO_FIELD_NUMBER: _ClassVar[int]
        term: int
        stamp: Stamp
        states: _containers.RepeatedCompositeFieldContainer[PartState]
        echo: float
        def __init__(self, term: _Optional[int] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ..., states: _Optional[_Iterable[_Union[PartState, _Mapping]]] = ..., echo: _Optional[float] = ...) -> None: ...
    class Release(_message.Message):
        __slots__ = ("part", "grant", "reason", "away")
        PART_FIELD_NUMBER: _ClassVar[int]
        GRANT_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        AWAY_FIELD_NUMBER: _ClassVar[int]
        part: int
        grant: int
        reason: str
        away: bool
        def __init__(self, part: _Optional[int] = ..., grant: _Optional[int] = ..., reason: _Optional[str] = ..., away: bool = ...) -> None: ...
    class Ended(_message.Message):
        __slots__ = ("part", "grant")
        PART_FIELD_NUMBER: _ClassVar[int]
        GRANT_FIELD_NUMBER: _ClassVar[int]
        part: int
        grant: int
        def __init__(self, part: _Optional[int] = ..., grant: _Optional[int] = ...) -> None: ...
    class Leave(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Claim(_message.Message):
        __slots__ = ("peer_id", "invitation", "key", "observer")
        PEER_ID_FIELD_NUMBER: _ClassVar[int]
        INVITATION_FIELD_NUMBER: _ClassVar[int]
        KEY_FIELD_NUMBER: _ClassVar[int]
        OBSERVER_FIELD_NUMBER: _ClassVar[int]
        peer_id: str
        invitation: bytes
        key: bytes
        observer: bool
        def __init__(self, peer_id: _Optional[str] = ..., invitation: _Optional[bytes] = ..., key: _Optional[bytes] = ..., observer: bool = ...) -> None: ...
    class Stall(_message.Message):
        __slots__ = ("part", "grant", "outer_step", "waits")
        PART_FIELD_NUMBER: _ClassVar[int]
        GRANT_FIELD_NUMBER: _ClassVar[int]
        OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
        WAITS_FIELD_NUMBER: _ClassVar[int]
        part: int
        grant: int
        outer_step: int
        waits: bool
        def __init__(self, part: _Optional[int] = ..., grant: _Optional[int] = ..., outer_step: _Optional[int] = ..., waits: bool = ...) -> None: ...
    class Offering(_message.Message):
        __slots__ = ("update",)
        UPDATE_FIELD_NUMBER: _ClassVar[int]
        update: PartUpdate
        def __init__(self, update: _Optional[_Union[PartUpdate, _Mapping]] = ...) -> None: ...
    class StateAsked(_message.Message):
        __slots__ = ("part", "outer_steps")
        PART_FIELD_NUMBER: _ClassVar[int]
        OUTER_STEPS_FIELD_NUMBER: _ClassVar[int]
        part: int
        outer_steps: int
        def __init__(self, part: _Optional[int] = ..., outer_steps: _Optional[int] = ...) -> None: ...
    class StateDigest(_message.Message):
        __slots__ = ("part", "outer_step", "name", "digest")
        PART_FIELD_NUMBER: _ClassVar[int]
        OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        part: int
        outer_step: int
        name: bytes
        digest: bytes
        def __init__(self, part: _Optional[int] = ..., outer_step: _Optional[int] = ..., name: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    OFFERING_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    STATE_ASKED_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    introduction: Introduction
    hello: CouncilMessage.Hello
    news: CouncilMessage.News
    ask: CouncilMessage.Ask
    vote: CouncilMessage.Vote
    append: CouncilMessage.Append
    accepted: CouncilMessage.Accepted
    release: CouncilMessage.Release
    ended: CouncilMessage.Ended
    leave: CouncilMessage.Leave
    offering: CouncilMessage.Offering
    claim: CouncilMessage.Claim
    state_asked: CouncilMessage.StateAsked
    state_digest: CouncilMessage.StateDigest
    stall: CouncilMessage.Stall
    def __init__(self, introduction: _Optional[_Union[Introduction, _Mapping]] = ..., hello: _Optional[_Union[CouncilMessage.Hello, _Mapping]] = ..., news: _Optional[_Union[CouncilMessage.News, _Mapping]] = ..., ask: _Optional[_Union[CouncilMessage.Ask, _Mapping]] = ..., vote: _Optional[_Union[CouncilMessage.Vote, _Mapping]] = ..., append: _Optional[_Union[CouncilMessage.Append, _Mapping]] = ..., accepted: _Optional[_Union[CouncilMessage.Accepted, _Mapping]] = ..., release: _Optional[_Union[CouncilMessage.Release, _Mapping]] = ..., ended: _Optional[_Union[CouncilMessage.Ended, _Mapping]] = ..., leave: _Optional[_Union[CouncilMessage.Leave, _Mapping]] = ..., offering: _Optional[_Union[CouncilMessage.Offering, _Mapping]] = ..., claim: _Optional[_Union[CouncilMessage.Claim, _Mapping]] = ..., state_asked: _Optional[_Union[CouncilMessage.StateAsked, _Mapping]] = ..., state_digest: _Optional[_Union[CouncilMessage.StateDigest, _Mapping]] = ..., stall: _Optional[_Union[CouncilMessage.Stall, _Mapping]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("outer_step", "id")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    id: bytes
    def __init__(self, outer_step: _Optional[int] = ..., id: _Optional[bytes] = ...) -> None: ...

class OfferHeader(_message.Message):
    __slots__ = ("update", "manifest_bytes", "body_bytes")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    update: PartUpdate
    manifest_bytes: int
    body_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, update: _Optional[_Union[PartUpdate, _Mapping]] = ..., manifest_bytes: _Optional[int] = ..., body_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferPart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: OfferHeader
    chunk: _data_pb2.FragmentChunk
    def __init__(self, header: _Optional[_Union[OfferHeader, _Mapping]] = ..., chunk: _Optional[_Union[_data_pb2.FragmentChunk, _Mapping]] = ...) -> None: ...

class MergedContribution(_message.Message):
    __slots__ = ("header", "inner_steps", "tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: _data_pb2.ContributionHeader
    inner_steps: int
    tokens: int
    def __init__(self, header: _Optional[_Union[_data_pb2.ContributionHeader, _Mapping]] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ContributionsPart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: MergedContribution
    chunk: _data_pb2.FragmentChunk
    def __init__(self, header: _Optional[_Union[MergedContribution, _Mapping]] = ..., chunk: _Optional[_Union[_data_pb2.FragmentChunk, _Mapping]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("name", "tokens", "description_bytes", "tensor_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    tokens: int
    description_bytes: int
    tensor_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[bytes] = ..., tokens: _Optional[int] = ..., description_bytes: _Optional[int] = ..., tensor_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class StatePart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: StateHeader
    chunk: _data_pb2.FragmentChunk
    def __init__(self, header: _Optional[_Union[StateHeader, _Mapping]] = ..., chunk: _Optional[_Union[_data_pb2.FragmentChunk, _Mapping]] = ...) -> None: ...

class PhiRequest(_message.Message):
    __slots__ = ("settling",)
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    settling: int
    def __init__(self, settling: _Optional[int] = ...) -> None: ...

class SwapBegin(_message.Message):
    __slots__ = ("record", "outer_step", "inner_steps", "tokens")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    record: Stamp
    outer_step: int
    inner_steps: int
    tokens: int
    def __init__(self, record: _Optional[_Union[Stamp, _Mapping]] = ..., outer_step: _Optional[int] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class SwapHave(_message.Message):
    __slots__ = ("good",)
    GOOD_FIELD_NUMBER: _ClassVar[int]
    good: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, good: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapPart(_message.Message):
    __slots__ = ("begin", "chunk", "have")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    begin: SwapBegin
    chunk: _data_pb2.FragmentChunk
    have: SwapHave
    def __init__(self, begin: _Optional[_Union[SwapBegin, _Mapping]] = ..., chunk: _Optional[_Union[_data_pb2.FragmentChunk, _Mapping]] = ..., have: _Optional[_Union[SwapHave, _Mapping]] = ...) -> None: ...

class OwnersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Owners(_message.Message):
    __slots__ = ("parts",)
    class Owner(_message.Message):
        __slots__ = ("peer_id", "first_round_id", "addresses")
        PEER_ID_FIELD_NUMBER: _ClassVar[int]
        FIRST_ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        ADDRESSES_FIELD_NUMBER: _ClassVar[int]
        peer_id: str
        first_round_id: int
        addresses: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, peer_id: _Optional[str] = ..., first_round_id: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Owners.Owner]
    def __init__(self, parts: _Optional[_Iterable[_Union[Owners.Owner, _Mapping]]] = ...) -> None: ...

class WaitingRequest(_message.Message):
    __slots__ = ("parts",)
    class Waiting(_message.Message):
        __slots__ = ("part", "outer_step")
        PART_FIELD_NUMBER: _ClassVar[int]
        OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
        part: int
        outer_step: int
        def __init__(self, part: _Optional[int] = ..., outer_step: _Optional[int] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[WaitingRequest.Waiting]
    def __init__(self, parts: _Optional[_Iterable[_Union[WaitingRequest.Waiting, _Mapping]]] = ...) -> None: ...

class WaitingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoggedRequest(_message.Message):
    __slots__ = ("part", "outer_step", "seen")
    PART_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    part: int
    outer_step: int
    seen: int
    def __init__(self, part: _Optional[int] = ..., outer_step: _Optional[int] = ..., seen: _Optional[int] = ...) -> None: ...

class LoggedReply(_message.Message):
    __slots__ = ("entry", "peaks", "consistency")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    entry: bytes
    peaks: _containers.RepeatedScalarFieldContainer[bytes]
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, entry: _Optional[bytes] = ..., peaks: _Optional[_Iterable[bytes]] = ..., consistency: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GoesOnRequest(_message.Message):
    __slots__ = ("part", "old", "new")
    PART_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    part: int
    old: int
    new: int
    def __init__(self, part: _Optional[int] = ..., old: _Optional[int] = ..., new: _Optional[int] = ...) -> None: ...

class GoesOnReply(_message.Message):
    __slots__ = ("consistency",)
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, consistency: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LogDoubt(_message.Message):
    __slots__ = ("part", "outer_step", "reason")
    PART_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    part: int
    outer_step: int
    reason: str
    def __init__(self, part: _Optional[int] = ..., outer_step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LogDoubtReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandingReply(_message.Message):
    __slots__ = ("standing",)
    STANDING_FIELD_NUMBER: _ClassVar[int]
    standing: bytes
    def __init__(self, standing: _Optional[bytes] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    def __init__(self, outcome: _Optional[str] = ...) -> None: ...

class EntrustRequest(_message.Message):
    __slots__ = ("peer_id",)
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    def __init__(self, peer_id: _Optional[str] = ...) -> None: ...

class EntrustReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublicKeyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublicKeyReply(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class TakeAuthorityRequest(_message.Message):
    __slots__ = ("sealed",)
    SEALED_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    def __init__(self, sealed: _Optional[bytes] = ...) -> None: ...

class TakeAuthorityReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplaceAuthorityRequest(_message.Message):
    __slots__ = ("peer_id", "certificate", "endorsement")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ENDORSEMENT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    certificate: bytes
    endorsement: bytes
    def __init__(self, peer_id: _Optional[str] = ..., certificate: _Optional[bytes] = ..., endorsement: _Optional[bytes] = ...) -> None: ...

class ReplaceAuthorityReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: bool
    def __init__(self, settings: bool = ...) -> None: ...

class HostAddresses(_message.Message):
    __slots__ = ("peer_id", "addresses")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class SwarmDescription(_message.Message):
    __slots__ = ("parts", "hosts", "run_toml", "schema")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOML_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    parts: int
    hosts: _containers.RepeatedCompositeFieldContainer[HostAddresses]
    run_toml: bytes
    schema: bytes
    def __init__(self, parts: _Optional[int] = ..., hosts: _Optional[_Iterable[_Union[HostAddresses, _Mapping]]] = ..., run_toml: _Optional[bytes] = ..., schema: _Optional[bytes] = ...) -> None: ...
