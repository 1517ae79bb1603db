from editpb import tensors_pb2 as _tensors_pb2
from editpb import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContributionHeader(_message.Message):
    __slots__ = ("run_id", "round_id", "outer_step", "peer_id", "fragment_id", "schema_hash", "boxes", "inner_steps", "tokens", "codec", "numel", "total_bytes", "rank", "attempt", "payload_blake3", "public_key", "signature", "norm", "seen")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BLAKE3_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    outer_step: int
    peer_id: str
    fragment_id: int
    schema_hash: str
    boxes: _containers.RepeatedCompositeFieldContainer[_tensors_pb2.Box]
    inner_steps: int
    tokens: int
    codec: str
    numel: int
    total_bytes: int
    rank: int
    attempt: int
    payload_blake3: bytes
    public_key: bytes
    signature: bytes
    norm: float
    seen: SeenHead
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., outer_step: _Optional[int] = ..., peer_id: _Optional[str] = ..., fragment_id: _Optional[int] = ..., schema_hash: _Optional[str] = ..., boxes: _Optional[_Iterable[_Union[_tensors_pb2.Box, _Mapping]]] = ..., inner_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., numel: _Optional[int] = ..., total_bytes: _Optional[int] = ..., rank: _Optional[int] = ..., attempt: _Optional[int] = ..., payload_blake3: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., norm: _Optional[float] = ..., seen: _Optional[_Union[SeenHead, _Mapping]] = ...) -> None: ...

class SeenHead(_message.Message):
    __slots__ = ("size", "root", "signature")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    size: int
    root: bytes
    signature: bytes
    def __init__(self, size: _Optional[int] = ..., root: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ContributePart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ContributionHeader
    chunk: _tensors_pb2.Chunk
    def __init__(self, header: _Optional[_Union[ContributionHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class ContributionReceipt(_message.Message):
    __slots__ = ("complete", "received_bytes")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    received_bytes: int
    def __init__(self, complete: bool = ..., received_bytes: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("received_bytes", "complete")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    complete: bool
    def __init__(self, received_bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class FragmentBoxes(_message.Message):
    __slots__ = ("fragment_id", "boxes")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    boxes: _containers.RepeatedCompositeFieldContainer[_tensors_pb2.Box]
    def __init__(self, fragment_id: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[_tensors_pb2.Box, _Mapping]]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("run_id", "outer_step", "held", "offset", "limit", "digest", "round_id", "seen_size", "seen")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    SEEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    held: _containers.RepeatedCompositeFieldContainer[FragmentBoxes]
    offset: int
    limit: int
    digest: str
    round_id: int
    seen_size: int
    seen: SeenHead
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ..., held: _Optional[_Iterable[_Union[FragmentBoxes, _Mapping]]] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ..., digest: _Optional[str] = ..., round_id: _Optional[int] = ..., seen_size: _Optional[int] = ..., seen: _Optional[_Union[SeenHead, _Mapping]] = ...) -> None: ...

class FragmentUpdate(_message.Message):
    __slots__ = ("fragment_id", "rollback", "codec", "numel", "total_bytes", "verdicts")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    rollback: bool
    codec: str
    numel: int
    total_bytes: int
    verdicts: _control_pb2.FragmentVerdicts
    def __init__(self, fragment_id: _Optional[int] = ..., rollback: bool = ..., codec: _Optional[str] = ..., numel: _Optional[int] = ..., total_bytes: _Optional[int] = ..., verdicts: _Optional[_Union[_control_pb2.FragmentVerdicts, _Mapping]] = ...) -> None: ...

class UpdateManifest(_message.Message):
    __slots__ = ("outer_step", "round_id", "digest", "reason", "fragments", "key", "receipt")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    round_id: int
    digest: str
    reason: str
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentUpdate]
    key: bytes
    receipt: LogReceipt
    def __init__(self, outer_step: _Optional[int] = ..., round_id: _Optional[int] = ..., digest: _Optional[str] = ..., reason: _Optional[str] = ..., fragments: _Optional[_Iterable[_Union[FragmentUpdate, _Mapping]]] = ..., key: _Optional[bytes] = ..., receipt: _Optional[_Union[LogReceipt, _Mapping]] = ...) -> None: ...

class LogReceipt(_message.Message):
    __slots__ = ("entry", "index", "inclusion", "checkpoint", "consistency", "seen")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCLUSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    entry: bytes
    index: int
    inclusion: _containers.RepeatedScalarFieldContainer[bytes]
    checkpoint: str
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    seen: _containers.RepeatedCompositeFieldContainer[SeenProof]
    def __init__(self, entry: _Optional[bytes] = ..., index: _Optional[int] = ..., inclusion: _Optional[_Iterable[bytes]] = ..., checkpoint: _Optional[str] = ..., consistency: _Optional[_Iterable[bytes]] = ..., seen: _Optional[_Iterable[_Union[SeenProof, _Mapping]]] = ...) -> None: ...

class SeenProof(_message.Message):
    __slots__ = ("size", "consistency")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    size: int
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, size: _Optional[int] = ..., consistency: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UpdateAhead(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdatePart(_message.Message):
    __slots__ = ("manifest", "chunk", "ahead")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    manifest: UpdateManifest
    chunk: FragmentChunk
    ahead: UpdateAhead
    def __init__(self, manifest: _Optional[_Union[UpdateManifest, _Mapping]] = ..., chunk: _Optional[_Union[FragmentChunk, _Mapping]] = ..., ahead: _Optional[_Union[UpdateAhead, _Mapping]] = ...) -> None: ...

class FragmentChunk(_message.Message):
    __slots__ = ("fragment_id", "chunk")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    chunk: _tensors_pb2.Chunk
    def __init__(self, fragment_id: _Optional[int] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class SnapshotManifestRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class Donor(_message.Message):
    __slots__ = ("peer_id", "serving")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    serving: _control_pb2.Serving
    def __init__(self, peer_id: _Optional[str] = ..., serving: _Optional[_Union[_control_pb2.Serving, _Mapping]] = ...) -> None: ...

class SnapshotManifest(_message.Message):
    __slots__ = ("outer_step", "digest", "schema", "fragment_hash", "donors", "run_outer_step")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    RUN_OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    digest: str
    schema: _tensors_pb2.Schema
    fragment_hash: _containers.RepeatedScalarFieldContainer[bytes]
    donors: _containers.RepeatedCompositeFieldContainer[Donor]
    run_outer_step: int
    def __init__(self, outer_step: _Optional[int] = ..., digest: _Optional[str] = ..., schema: _Optional[_Union[_tensors_pb2.Schema, _Mapping]] = ..., fragment_hash: _Optional[_Iterable[bytes]] = ..., donors: _Optional[_Iterable[_Union[Donor, _Mapping]]] = ..., run_outer_step: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("run_id", "outer_step", "fragment_id", "offset", "boxes", "ticket", "limit", "following")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    fragment_id: int
    offset: int
    boxes: _containers.RepeatedCompositeFieldContainer[_tensors_pb2.Box]
    ticket: str
    limit: int
    following: _containers.RepeatedCompositeFieldContainer[SnapshotPart]
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ..., fragment_id: _Optional[int] = ..., offset: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[_tensors_pb2.Box, _Mapping]]] = ..., ticket: _Optional[str] = ..., limit: _Optional[int] = ..., following: _Optional[_Iterable[_Union[SnapshotPart, _Mapping]]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("fragment_id", "boxes")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    boxes: _containers.RepeatedCompositeFieldContainer[_tensors_pb2.Box]
    def __init__(self, fragment_id: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[_tensors_pb2.Box, _Mapping]]] = ...) -> None: ...

class FoundPart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: FoundHeader
    chunk: FragmentChunk
    def __init__(self, header: _Optional[_Union[FoundHeader, _Mapping]] = ..., chunk: _Optional[_Union[FragmentChunk, _Mapping]] = ...) -> None: ...

class FoundHeader(_message.Message):
    __slots__ = ("run_id", "schema_hash", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    schema_hash: str
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., schema_hash: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class FoundReply(_message.Message):
    __slots__ = ("received_bytes", "complete")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    complete: bool
    def __init__(self, received_bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class Injected(_message.Message):
    __slots__ = ("run_id", "upper_step", "lower_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    UPPER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOWER_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    upper_step: int
    lower_step: int
    def __init__(self, run_id: _Optional[str] = ..., upper_step: _Optional[int] = ..., lower_step: _Optional[int] = ...) -> None: ...

class InjectHeader(_message.Message):
    __slots__ = ("run_id", "schema_hash", "brings", "base", "replaces", "fragments", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    BRINGS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    schema_hash: str
    brings: Injected
    base: Injected
    replaces: bool
    fragments: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., schema_hash: _Optional[str] = ..., brings: _Optional[_Union[Injected, _Mapping]] = ..., base: _Optional[_Union[Injected, _Mapping]] = ..., replaces: bool = ..., fragments: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ...) -> None: ...

class InjectPart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: InjectHeader
    chunk: FragmentChunk
    def __init__(self, header: _Optional[_Union[InjectHeader, _Mapping]] = ..., chunk: _Optional[_Union[FragmentChunk, _Mapping]] = ...) -> None: ...

class InjectReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InjectionStateRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class InjectionState(_message.Message):
    __slots__ = ("outer_step", "phase", "tokens", "injected", "accepted")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    INJECTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    phase: _control_pb2.RunPhase
    tokens: int
    injected: Injected
    accepted: Injected
    def __init__(self, outer_step: _Optional[int] = ..., phase: _Optional[_Union[_control_pb2.RunPhase, str]] = ..., tokens: _Optional[int] = ..., injected: _Optional[_Union[Injected, _Mapping]] = ..., accepted: _Optional[_Union[Injected, _Mapping]] = ...) -> None: ...

class ContributionsRequest(_message.Message):
    __slots__ = ("run_id", "outer_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ...) -> None: ...

class ContributionRequest(_message.Message):
    __slots__ = ("run_id", "outer_step", "peer_id", "fragment_id", "rank", "offset", "limit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    peer_id: str
    fragment_id: int
    rank: int
    offset: int
    limit: int
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ..., peer_id: _Optional[str] = ..., fragment_id: _Optional[int] = ..., rank: _Optional[int] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class PeerScore(_message.Message):
    __slots__ = ("peer_id", "score")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    score: float
    def __init__(self, peer_id: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("run_id", "outer_step", "scores", "public_key", "signature")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    scores: _containers.RepeatedCompositeFieldContainer[PeerScore]
    public_key: bytes
    signature: bytes
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[PeerScore, _Mapping]]] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ScoresReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
