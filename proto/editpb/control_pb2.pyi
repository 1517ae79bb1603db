from editpb import governance_pb2 as _governance_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_STATE_UNSPECIFIED: _ClassVar[PeerState]
    PEER_STATE_STARTING: _ClassVar[PeerState]
    PEER_STATE_TRAINING: _ClassVar[PeerState]
    PEER_STATE_EXCHANGING: _ClassVar[PeerState]

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_FOUNDING: _ClassVar[RunPhase]
    RUN_PHASE_GATHERING: _ClassVar[RunPhase]
    RUN_PHASE_COLLECTING: _ClassVar[RunPhase]
    RUN_PHASE_COMMITTING: _ClassVar[RunPhase]
    RUN_PHASE_PAUSED: _ClassVar[RunPhase]
    RUN_PHASE_FINISHED: _ClassVar[RunPhase]
PEER_STATE_UNSPECIFIED: PeerState
PEER_STATE_STARTING: PeerState
PEER_STATE_TRAINING: PeerState
PEER_STATE_EXCHANGING: PeerState
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_FOUNDING: RunPhase
RUN_PHASE_GATHERING: RunPhase
RUN_PHASE_COLLECTING: RunPhase
RUN_PHASE_COMMITTING: RunPhase
RUN_PHASE_PAUSED: RunPhase
RUN_PHASE_FINISHED: RunPhase

class Hello(_message.Message):
    __slots__ = ("protocol", "run_id", "software", "rank", "ranks", "schema_hash", "configuration")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    software: str
    rank: int
    ranks: int
    schema_hash: str
    configuration: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., software: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., schema_hash: _Optional[str] = ..., configuration: _Optional[int] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ("address", "ticket")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    address: str
    ticket: str
    def __init__(self, address: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class Cosignature(_message.Message):
    __slots__ = ("size", "root", "log_signature", "signature")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    LOG_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    size: int
    root: bytes
    log_signature: bytes
    signature: bytes
    def __init__(self, size: _Optional[int] = ..., root: _Optional[bytes] = ..., log_signature: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "outer_step", "digest", "inner_steps", "round_inner_steps", "loss", "tokens_per_s", "step_s", "bytes_sent", "bytes_received", "serving", "device", "metrics", "cosigned")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    COSIGNED_FIELD_NUMBER: _ClassVar[int]
    state: PeerState
    outer_step: int
    digest: str
    inner_steps: int
    round_inner_steps: int
    loss: float
    tokens_per_s: float
    step_s: float
    bytes_sent: int
    bytes_received: int
    serving: Serving
    device: str
    metrics: _containers.ScalarMap[str, float]
    cosigned: Cosignature
    def __init__(self, state: _Optional[_Union[PeerState, str]] = ..., outer_step: _Optional[int] = ..., digest: _Optional[str] = ..., inner_steps: _Optional[int] = ..., round_inner_steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., serving: _Optional[_Union[Serving, _Mapping]] = ..., device: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., cosigned: _Optional[_Union[Cosignature, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "goodbye", "schema", "consent")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    goodbye: Goodbye
    schema: bytes
    consent: Consent
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., schema: _Optional[bytes] = ..., consent: _Optional[_Union[Consent, _Mapping]] = ...) -> None: ...

class Consent(_message.Message):
    __slots__ = ("config_digest", "policy_digest", "public_key", "signature", "data_statement", "data_manifest", "data_licence")
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DATA_STATEMENT_FIELD_NUMBER: _ClassVar[int]
    DATA_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DATA_LICENCE_FIELD_NUMBER: _ClassVar[int]
    config_digest: str
    policy_digest: str
    public_key: bytes
    signature: bytes
    data_statement: str
    data_manifest: str
    data_licence: str
    def __init__(self, config_digest: _Optional[str] = ..., policy_digest: _Optional[str] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., data_statement: _Optional[str] = ..., data_manifest: _Optional[str] = ..., data_licence: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "peer_id", "config_json", "outer_step", "first_round_id", "log_key", "configuration", "changes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_KEY_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    peer_id: str
    config_json: str
    outer_step: int
    first_round_id: int
    log_key: str
    configuration: int
    changes: _containers.RepeatedCompositeFieldContainer[_governance_pb2.ConfigChange]
    def __init__(self, run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., config_json: _Optional[str] = ..., outer_step: _Optional[int] = ..., first_round_id: _Optional[int] = ..., log_key: _Optional[str] = ..., configuration: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[_governance_pb2.ConfigChange, _Mapping]]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("sequence", "phase", "outer_step", "round_id", "digest", "oldest_update", "last_round_id", "last_committed", "last_reason", "resync", "found", "reason", "inner_steps", "draining", "ahead_bytes", "waiting_for")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UPDATE_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    phase: RunPhase
    outer_step: int
    round_id: int
    digest: str
    oldest_update: int
    last_round_id: int
    last_committed: bool
    last_reason: str
    resync: str
    found: bool
    reason: str
    inner_steps: int
    draining: bool
    ahead_bytes: int
    waiting_for: str
    def __init__(self, sequence: _Optional[int] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., outer_step: _Optional[int] = ..., round_id: _Optional[int] = ..., digest: _Optional[str] = ..., oldest_update: _Optional[int] = ..., last_round_id: _Optional[int] = ..., last_committed: bool = ..., last_reason: _Optional[str] = ..., resync: _Optional[str] = ..., found: bool = ..., reason: _Optional[str] = ..., inner_steps: _Optional[int] = ..., draining: bool = ..., ahead_bytes: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class Expel(_message.Message):
    __slots__ = ("evicted", "reason")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    evicted: bool
    reason: str
    def __init__(self, evicted: bool = ..., reason: _Optional[str] = ...) -> None: ...

class SchemaRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "view", "expel", "schema_request")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    EXPEL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REQUEST_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    view: View
    expel: Expel
    schema_request: SchemaRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., expel: _Optional[_Union[Expel, _Mapping]] = ..., schema_request: _Optional[_Union[SchemaRequest, _Mapping]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("peer_id", "role", "state", "reason", "silent_s", "heartbeat", "contributions", "rejections", "absences", "deadline_s", "phase", "upload_bytes", "upload_total_bytes", "download_s", "compute_s", "upload_s", "optional", "quarantined_s", "expires", "device", "computing", "exchanging", "waiting", "verdict", "verdict_reason", "consented")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_S_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    EXCHANGING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_REASON_FIELD_NUMBER: _ClassVar[int]
    CONSENTED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    role: str
    state: str
    reason: str
    silent_s: float
    heartbeat: Heartbeat
    contributions: int
    rejections: int
    absences: int
    deadline_s: float
    phase: str
    upload_bytes: int
    upload_total_bytes: int
    download_s: float
    compute_s: float
    upload_s: float
    optional: bool
    quarantined_s: float
    expires: float
    device: str
    computing: float
    exchanging: float
    waiting: float
    verdict: str
    verdict_reason: str
    consented: bool
    def __init__(self, peer_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., silent_s: _Optional[float] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., contributions: _Optional[int] = ..., rejections: _Optional[int] = ..., absences: _Optional[int] = ..., deadline_s: _Optional[float] = ..., phase: _Optional[str] = ..., upload_bytes: _Optional[int] = ..., upload_total_bytes: _Optional[int] = ..., download_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., upload_s: _Optional[float] = ..., optional: bool = ..., quarantined_s: _Optional[float] = ..., expires: _Optional[float] = ..., device: _Optional[str] = ..., computing: _Optional[float] = ..., exchanging: _Optional[float] = ..., waiting: _Optional[float] = ..., verdict: _Optional[str] = ..., verdict_reason: _Optional[str] = ..., consented: bool = ...) -> None: ...

class PeerVerdict(_message.Message):
    __slots__ = ("peer_id", "verdict", "norm", "weight", "staleness")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    verdict: str
    norm: float
    weight: float
    staleness: int
    def __init__(self, peer_id: _Optional[str] = ..., verdict: _Optional[str] = ..., norm: _Optional[float] = ..., weight: _Optional[float] = ..., staleness: _Optional[int] = ...) -> None: ...

class FragmentVerdicts(_message.Message):
    __slots__ = ("fragment_id", "verdicts", "merged_norm", "clip")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    MERGED_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    verdicts: _containers.RepeatedCompositeFieldContainer[PeerVerdict]
    merged_norm: float
    clip: float
    def __init__(self, fragment_id: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[PeerVerdict, _Mapping]]] = ..., merged_norm: _Optional[float] = ..., clip: _Optional[float] = ...) -> None: ...

class RoundStatus(_message.Message):
    __slots__ = ("round_id", "outer_step", "committed", "reason", "seconds", "bytes_in", "bytes_out", "fragments", "missing", "digest", "carried", "t", "every", "batch", "outer_lr", "outer_momentum")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OUTER_LR_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    outer_step: int
    committed: bool
    reason: str
    seconds: float
    bytes_in: int
    bytes_out: int
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentVerdicts]
    missing: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    carried: _containers.RepeatedScalarFieldContainer[str]
    t: float
    every: int
    batch: int
    outer_lr: float
    outer_momentum: float
    def __init__(self, round_id: _Optional[int] = ..., outer_step: _Optional[int] = ..., committed: bool = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[FragmentVerdicts, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ..., carried: _Optional[_Iterable[str]] = ..., t: _Optional[float] = ..., every: _Optional[int] = ..., batch: _Optional[int] = ..., outer_lr: _Optional[float] = ..., outer_momentum: _Optional[float] = ...) -> None: ...

class Curve(_message.Message):
    __slots__ = ("kind", "peer_id", "x", "t", "y", "kept")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    peer_id: str
    x: _containers.RepeatedScalarFieldContainer[float]
    t: _containers.RepeatedScalarFieldContainer[float]
    y: _containers.RepeatedScalarFieldContainer[float]
    kept: int
    def __init__(self, kind: _Optional[str] = ..., peer_id: _Optional[str] = ..., x: _Optional[_Iterable[float]] = ..., t: _Optional[_Iterable[float]] = ..., y: _Optional[_Iterable[float]] = ..., kept: _Optional[int] = ...) -> None: ...

class StatusEvent(_message.Message):
    __slots__ = ("number", "t", "kind", "peer_id", "text", "tone")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TONE_FIELD_NUMBER: _ClassVar[int]
    number: int
    t: float
    kind: str
    peer_id: str
    text: str
    tone: str
    def __init__(self, number: _Optional[int] = ..., t: _Optional[float] = ..., kind: _Optional[str] = ..., peer_id: _Optional[str] = ..., text: _Optional[str] = ..., tone: _Optional[str] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value", "default")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    default: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., default: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("rounds_after", "brief")
    ROUNDS_AFTER_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    rounds_after: int
    brief: bool
    def __init__(self, rounds_after: _Optional[int] = ..., brief: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_s", "curves_kept")
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    CURVES_KEPT_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    curves_kept: bool
    def __init__(self, every_s: _Optional[float] = ..., curves_kept: bool = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "view", "members", "rounds", "outer_steps", "parameters", "peak_memory_bytes", "expected", "arrived", "deadline_in_s", "tokens", "stop_tokens", "waiting_for", "warnings", "t", "eta_s", "curves", "events", "settings", "masks", "privacy", "epsilon", "governance", "audit", "last_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    GOVERNANCE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    view: View
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    outer_steps: int
    parameters: int
    peak_memory_bytes: int
    expected: _containers.RepeatedScalarFieldContainer[str]
    arrived: _containers.RepeatedScalarFieldContainer[str]
    deadline_in_s: float
    tokens: int
    stop_tokens: int
    waiting_for: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    t: float
    eta_s: float
    curves: _containers.RepeatedCompositeFieldContainer[Curve]
    events: _containers.RepeatedCompositeFieldContainer[StatusEvent]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    masks: str
    privacy: str
    epsilon: float
    governance: str
    audit: str
    last_step: int
    def __init__(self, run_id: _Optional[str] = ..., view: _Optional[_Union[View, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., outer_steps: _Optional[int] = ..., parameters: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., expected: _Optional[_Iterable[str]] = ..., arrived: _Optional[_Iterable[str]] = ..., deadline_in_s: _Optional[float] = ..., tokens: _Optional[int] = ..., stop_tokens: _Optional[int] = ..., waiting_for: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., t: _Optional[float] = ..., eta_s: _Optional[float] = ..., curves: _Optional[_Iterable[_Union[Curve, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[StatusEvent, _Mapping]]] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., masks: _Optional[str] = ..., privacy: _Optional[str] = ..., epsilon: _Optional[float] = ..., governance: _Optional[str] = ..., audit: _Optional[str] = ..., last_step: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("peer_id", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("outer_step",)
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    def __init__(self, outer_step: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("outer_step",)
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    def __init__(self, outer_step: _Optional[int] = ...) -> None: ...
