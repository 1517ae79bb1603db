"""What coordinator and peers say to one another, as plain frozen records. The comments of the .proto files hold here, too.

`control_messages`, `governance_messages`, `data_messages` and `injection_messages` map them to and from the wire and validate
what arrives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from edit.fragments.schema import Schema
from edit.fragments.shards import Box, Shard
from edit.records import FragmentCommit

if TYPE_CHECKING:  # torch, which commands that only read records need not load
    from edit.merging.injection import Injected

__all__ = [
    "PROTOCOL",
    "Approval",
    "ConfigChange",
    "Configuration",
    "ContributionHeader",
    "ContributionRequest",
    "Cosignature",
    "Donor",
    "Expel",
    "FoundHeader",
    "FragmentUpdate",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "InjectHeader",
    "InjectionState",
    "LogReceipt",
    "LoggedEntry",
    "PeerState",
    "Proposal",
    "Received",
    "RunPhase",
    "SchemaRequest",
    "ScoreReport",
    "SeenHead",
    "Serving",
    "SnapshotManifest",
    "SnapshotRequest",
    "UpdateManifest",
    "UpdateRequest",
    "View",
    "Welcome",
]

# The version of the protocol, sent in Hello. Raise it when old and new daemons can no longer understand one another. The
# coordinator refuses another version in `control_messages.hello_from_pb`, in one line that names both.
PROTOCOL = 9


class PeerState(Enum):
    """What a peer is doing."""

    STARTING = "starting"  # loading, not yet at the run's outer parameters
    TRAINING = "training"  # taking inner steps
    EXCHANGING = "exchanging"  # has contributed and waits for the outcome


class RunPhase(Enum):
    """What the coordinator is doing."""

    __hash__ = object.__hash__  # Enum's own is a Python function, slower than the look-ups that use it

    FOUNDING = "founding"  # there are no parameters yet
    GATHERING = "gathering"  # too few live peers to open a round
    COLLECTING = "collecting"  # a round is open
    COMMITTING = "committing"  # the round is closed and is being merged and journalled
    PAUSED = "paused"  # by the operator
    FINISHED = "finished"  # the last outer step or token is merged, or the operator drained the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message on Attend."""

    run_id: str
    schema_hash: str = ""  # of its model; empty: it only asks for the configuration
    software: str = ""  # free text for the operator
    rank: int = 0  # of the peer's replica; rank 0 is the member, the others only get views
    ranks: int = 1  # how many ranks the replica has
    protocol: int = PROTOCOL
    configuration: int = 0  # the number of the configuration that it took part under last; 0: it knows none


@dataclass(frozen=True, slots=True)
class DataStatement:
    """What a site says of the data that its peer trains on. Nobody else can check it."""

    statement: str = ""  # in words, one line
    manifest: str = ""  # SHA-256 of a list of its files, which the site keeps; hex
    licence: str = ""  # or the agreement under which it is used

    def __bool__(self) -> bool:
        return bool(self.statement or self.manifest or self.licence)


@dataclass(frozen=True, slots=True)
class Consent:
    """A site's consent to a run's configuration, signed by its peer; see `editpb.consents`."""

    config_digest: str  # SHA-256 of the configuration as it is sent, hex
    policy_digest: str  # of the site's policy.toml, likewise; empty: it has none
    public_key: bytes  # of the peer's certificate, DER
    signature: bytes
    data: DataStatement = DataStatement()


@dataclass(frozen=True, slots=True)
class Approval:
    """An approver's signature under a change of the configuration; see `editpb.approvals`."""

    config_digest: str  # SHA-256 of the changed configuration as it is sent, hex
    before_digest: str  # likewise of the one in force
    number: int  # of the changed one
    certificate: bytes  # the approver's, DER
    signature: bytes


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of a run, as it is sent."""

    number: int  # 1: the first one that the audit log has; each change adds one
    text: str  # `RunConfig.to_json()`

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change that counts."""

    to: Configuration
    approvals: tuple[Approval, ...] = ()  # as many as the configuration before asks for


@dataclass(frozen=True, slots=True)
class Proposal:
    """The configuration that waits for approvals, and what it would replace."""

    in_force: Configuration
    changes: tuple[ConfigChange, ...] = ()  # that led to it, since the configuration that the asker knows
    text: str = ""  # of the one that waits; empty: none does
    approvals: tuple[Approval, ...] = ()  # that it has


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a peer serves the snapshot of its outer parameters."""

    address: str  # HOST:PORT
    ticket: str  # what a reader must show; another one for each outer step


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A peer's report."""

    state: PeerState  # starting, training, exchanging
    outer_step: int = 0  # of its outer parameters
    digest: str = ""  # of its outer parameters; empty while starting
    inner_steps: int = 0  # since its process started
    round_inner_steps: int = 0  # since its last contribution
    loss: float = math.nan  # training loss, moving mean; NaN before the first step, not finite when training diverged
    tokens_per_s: float = 0.0  # moving mean
    step_s: float = 0.0  # seconds per inner step, moving mean
    bytes_sent: int = 0  # data plane, since its process started
    bytes_received: int = 0  # likewise
    serving: Serving | None = None  # the snapshot of `outer_step`; None: it serves none
    device: str = ""  # what it computes on, in words; empty: it does not say
    metrics: Mapping[str, float] = field(default_factory=dict)  # what else its user reports, by name; all finite
    cosigned: Cosignature | None = None  # the newest head of the audit log that it has; None: none, or it does not cosign

    def as_json(self) -> dict[str, object]:
        """Return the values of a `peer` line of metrics.jsonl. `json_text` writes them: a loss that is not finite as null."""
        return {
            "state": self.state.value,
            "outer_step": self.outer_step,
            "inner_steps": self.inner_steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.step_s,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "digest": self.digest,
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A peer leaves on purpose."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The coordinator's first message on Attend."""

    run_id: str
    peer_id: str  # the one in the caller's certificate
    config_json: str  # `RunConfig.to_json()`
    outer_step: int = 0  # that the run has reached
    first_round_id: int = 0  # of whoever serves the run now: earlier rounds were an earlier process's, or another host's
    log_key: str = ""  # with audit.enabled: the public key of the run's audit log, as text
    configuration: int = 0  # the number of this configuration; 0: an older coordinator's, which counts none
    changes: tuple[ConfigChange, ...] = ()  # since the configuration that Hello named, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The run as it stands. Always whole, so a lost one does not matter."""

    sequence: int  # grows with every view of a connection
    phase: RunPhase
    outer_step: int = 0  # the last committed one
    round_id: int = 0  # the open round; 0: none
    digest: str = ""  # of the outer parameters at `outer_step`
    oldest_update: int = 0  # updates to outer steps oldest_update .. outer_step can be fetched
    last_round_id: int = 0  # the last closed round
    last_committed: bool = False  # whether it was committed
    last_reason: str = ""  # why it closed
    resync: str = ""  # why this peer must take a snapshot, or empty
    found: bool = False  # "you are the founder: send your initial parameters"
    reason: str = ""  # why the run cannot go on as it stands, or empty
    inner_steps: int = 0  # until this peer's next contribution, from its next phase on; 0: as configured
    draining: bool = False  # the run ends with the open round, or soon after
    ahead_bytes: int = 0  # of this rank's contribution, that may be on their way without a receipt; 0: any number
    waiting_for: str = ""  # for how many peers the first round waits, in words, or empty


@dataclass(frozen=True, slots=True)
class Expel:
    """The coordinator's last message on Attend."""

    evicted: bool  # by the operator; else refused
    reason: str


@dataclass(frozen=True, slots=True)
class SchemaRequest:
    """The coordinator does not know the model behind a Hello's schema_hash: the peer sends its schema."""


@dataclass(frozen=True, slots=True)
class SeenHead:
    """A head of the run's audit log, as the log has signed it: of a checkpoint `edit/RUN_ID`, size, root."""

    size: int  # entries, at least 1
    root: bytes  # 32 bytes
    signature: bytes  # Ed25519, 64 bytes


@dataclass(frozen=True, slots=True)
class Cosignature:
    """A head of the run's audit log that a peer vouches for with the key of its certificate."""

    head: SeenHead
    signature: bytes  # of the text of the head's checkpoint, ECDSA P-256 in DER


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionHeader:
    """What a contribution to one fragment is, or one rank's shard of it. Its payload follows in chunks."""

    run_id: str
    round_id: int  # the round it was sent for; with max_staleness above 0 a later one may merge it
    outer_step: int  # computed against the outer parameters of this step
    peer_id: str  # must be the certificate's
    fragment_id: int
    schema_hash: str
    inner_steps: int  # the work behind it, of the whole replica, equal at all ranks
    tokens: int  # likewise
    codec: str  # the text of a CodecSpec
    numel: int  # elements of the payload
    total_bytes: int  # of the payload: exactly what `codec` makes of numel elements
    rank: int = 0
    attempt: int = 0  # grows with each contribution of the replica, equal at all ranks; a newer one replaces an older one
    boxes: tuple[Box, ...] | None = None  # what of the fragment the payload holds; None: all of it
    norm: float | None = None  # with masks: of the whole replica's vector, as the peer says, equal at all ranks; else None
    payload_blake3: bytes = b""  # with the two that follow, or none of them: `editpb.signed_contributions`
    public_key: bytes = b""
    signature: bytes = b""
    seen: SeenHead | None = None  # with audit.enabled: the newest head of the log that the signer has seen


@dataclass(frozen=True, slots=True)
class Received:
    """How much of a contribution, or of the founder's parameters, the aggregator holds."""

    received_bytes: int
    complete: bool  # all bytes are in and intact


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Asks for the published update to `outer_step`."""

    run_id: str
    outer_step: int
    shards: tuple[Shard, ...] | None = None  # what this rank holds, one per fragment of the schema; None: everything
    offset: int = 0  # the first byte, counted over all fragments
    limit: int = 0  # the most bytes; 0: all that are left
    digest: str = ""  # of the update that was begun, where offset > 0
    round_id: int = 0  # the open round that may come to it, for its bytes ahead of the commit; 0: only what is committed
    seen_size: int | None = None  # with audit.enabled: entries of the log that the peer has seen; None: no receipt is wanted
    seen: SeenHead | None = None  # the head of these entries


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentUpdate:
    """One fragment of a published update, without its bytes."""

    commit: FragmentCommit  # the verdicts and numbers; its payload is always None here
    codec: str | None  # None: rolled back, no bytes follow
    numel: int  # elements of what is sent (`Codec.cut`); 0 when this rank holds nothing of the fragment
    total_bytes: int  # of what is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateManifest:
    """What a published update consists of; the bytes of its fragments follow in the same order."""

    outer_step: int
    round_id: int
    digest: str  # of the outer parameters after it
    reason: str  # why its round closed
    fragments: tuple[FragmentUpdate, ...]  # those that the outer step exchanged, ascending
    key: bytes = b""  # opens what its round has sent ahead; empty: all bytes follow


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReceipt:
    """That a commit stands in the run's audit log. Hashes have 32 bytes. `editpb.receipts` checks it."""

    entry: bytes  # the commit's line, without its end
    index: int
    inclusion: tuple[bytes, ...]  # proof that the entry is in the checkpoint's tree
    checkpoint: str  # a signed note of C2SP
    consistency: tuple[bytes, ...]  # proof that this tree begins with the one of the request's seen_size
    seen: Mapping[int, tuple[bytes, ...]]  # likewise for each size of a SeenHead in the entry


@dataclass(frozen=True, slots=True)
class LoggedEntry:
    """An entry of the audit log of a swarm's part, from who keeps that log. `editpb.part_receipts` checks it."""

    entry: bytes  # the line, without its end
    peaks: tuple[bytes, ...]  # `MerkleTree.peaks` of the entries before it
    # That these begin with the entries that who asked has seen; empty: they are the same, or it cannot be shown here.
    consistency: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Donor:
    """A member that serves a snapshot, too."""

    peer_id: str
    serving: Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """What a snapshot of the outer parameters at `outer_step` consists of."""

    outer_step: int
    digest: str
    schema: Schema
    fragment_hash: tuple[bytes, ...]  # BLAKE3 of each fragment's fp32 little-endian bytes
    donors: tuple[Donor, ...] = ()  # members from which it can be read as well
    run_outer_step: int = 0  # what the run had reached when this was described, where that is further


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """Asks for one fragment of the snapshot at `outer_step`, and for others after it."""

    run_id: str
    outer_step: int
    fragment_id: int
    offset: int = 0  # the first byte, within the fp32 bytes of the boxes
    boxes: tuple[Box, ...] | None = None  # what of the fragment is wanted; None: all of it
    ticket: str = ""  # of the donor that is asked; empty: the aggregator is asked
    limit: int = 0  # the most bytes, of all fragments together; 0: no bound
    following: tuple[Shard, ...] = ()  # what is sent after it, by ascending fragment_id

    def one_by_one(self) -> Iterator[SnapshotRequest]:
        """Yield a request without limit for each of the fragments."""
        yield replace(self, limit=0, following=())
        for shard in self.following:
            boxes = None if shard.is_whole else shard.boxes
            yield replace(self, fragment_id=shard.fragment.fragment_id, offset=0, boxes=boxes, limit=0, following=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRequest:
    """Asks for a shard of what was merged in the commit to `outer_step`."""

    run_id: str
    outer_step: int
    peer_id: str
    fragment_id: int
    rank: int
    offset: int = 0  # the first byte of the payload
    limit: int = 0  # the most bytes; 0: no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReport:
    """What a scorer says of the contributions to the commit to `outer_step`."""

    run_id: str
    outer_step: int
    scores: Mapping[str, float]  # by peer_id: `edit.merging.trust.score`
    public_key: bytes = b""  # with the signature, or neither: `editpb.signed_scores`
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHeader:
    """The founder's initial parameters follow: fp32, fragment after fragment."""

    run_id: str
    schema_hash: str
    digest: str  # of the parameters that follow


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectHeader:
    """An `edit.merging.injection.Injection` without its bytes, which follow: fp32, one of `fragments` after the other."""

    run_id: str  # of the run below
    schema_hash: str
    brings: Injected
    base: Injected | None
    replaces: bool
    fragments: tuple[int, ...]  # whose bytes follow, ascending
    digest: str  # `edit.fragments.digest.digest` of the fragments that follow


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionState:
    """The run below as its regional aggregator sees it."""

    outer_step: int
    phase: RunPhase
    tokens: int  # merged so far
    injected: Injected | None  # what of the run above is in the outer parameters at `outer_step`
    accepted: Injected | None  # what is on disk and comes in with the next commit
