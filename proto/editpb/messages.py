"""What coordinator and peers say to one another, as plain frozen values. Neither daemon handles raw protobuf beyond its stubs.

Owns: the fields and their meaning (the comments of the .proto files hold too). `control_messages`, `data_messages` and
`injection_messages` map them to and from the wire and validates. Must not know: protobuf, connections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from edit.fragments.schema import Schema
from edit.fragments.shards import Box, Shard
from edit.merging.injection import Injected
from edit.records import FragmentCommit

__all__ = [
    "PROTOCOL",
    "ContributionHeader",
    "Donor",
    "Expel",
    "FoundHeader",
    "FragmentUpdate",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "InjectHeader",
    "InjectionState",
    "PeerState",
    "Received",
    "RunPhase",
    "Serving",
    "SnapshotManifest",
    "SnapshotRequest",
    "UpdateManifest",
    "UpdateRequest",
    "View",
    "Welcome",
]

PROTOCOL = 2  # Hello.protocol; raised when old and new daemons could no longer understand one another


class PeerState(Enum):
    """What a peer is doing."""

    STARTING = "starting"
    TRAINING = "training"
    EXCHANGING = "exchanging"


class RunPhase(Enum):
    """What the coordinator is doing."""

    __hash__ = object.__hash__  # an Enum's own takes longer than what is done with it

    FOUNDING = "founding"
    GATHERING = "gathering"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message. schema None: it only asks for the configuration. rank, ranks: of the peer's replica; rank 0 is
    the member, the others only get views."""

    run_id: str
    schema: Schema | None = None
    software: str = ""
    rank: int = 0
    ranks: int = 1
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a peer serves the snapshot of its outer parameters (HOST:PORT), and what a reader of this outer step must say."""

    address: str
    ticket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A peer's report. digest: of its outer parameters, empty while starting; loss: NaN before the first step, and when the
    training diverged; step_s: seconds per inner step; bytes_sent, bytes_received: data plane, since the process started;
    serving: the snapshot of `outer_step`; None: it serves none."""

    state: PeerState
    outer_step: int = 0
    digest: str = ""
    inner_steps: int = 0
    round_inner_steps: int = 0
    loss: float = math.nan
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    serving: Serving | None = None

    def as_json(self) -> dict[str, str | int | float | None]:
        """The values of a `peer` line of metrics.jsonl; a loss that is not finite is None."""
        return {
            "state": self.state.value,
            "outer_step": self.outer_step,
            "inner_steps": self.inner_steps,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.step_s,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "digest": self.digest,
        }


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A peer leaves on purpose."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The coordinator's first message. config_json: `RunConfig.to_json()`; outer_step: that the run has reached."""

    run_id: str
    peer_id: str
    config_json: str
    outer_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The run as it stands, whole. round_id: the open round or 0; resync: why this peer must take a snapshot, or empty.

    reason: why the run cannot go on as it stands, or empty; inner_steps: until this peer's next contribution, from its next
    phase on; 0: as configured; draining: the run ends with the open round.
    """

    sequence: int
    phase: RunPhase
    outer_step: int = 0
    round_id: int = 0
    digest: str = ""
    oldest_update: int = 0
    last_round_id: int = 0
    last_committed: bool = False
    last_reason: str = ""
    resync: str = ""
    found: bool = False
    reason: str = ""
    inner_steps: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Expel:
    """The coordinator's last message: evicted by the operator, or refused."""

    evicted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionHeader:
    """What a contribution is, or one rank's part of it. numel: of the payload; total_bytes: exactly what `codec` makes of it.

    boxes: what of the fragment the payload holds (see `edit.fragments.shards.Shard`), None: all of it; attempt: grows with
    each contribution of the replica and is equal at its ranks, as inner_steps and tokens are.
    """

    run_id: str
    round_id: int
    outer_step: int
    peer_id: str
    fragment_id: int
    schema_hash: str
    inner_steps: int
    tokens: int
    codec: str
    numel: int
    total_bytes: int
    rank: int = 0
    attempt: int = 0
    boxes: tuple[Box, ...] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """How much of a contribution the aggregator holds."""

    received_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The update to `outer_step`. shards: what this rank holds, one per fragment of the schema; None: everything."""

    run_id: str
    outer_step: int
    shards: tuple[Shard, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentUpdate:
    """One fragment of a published update, without its bytes. codec None: rolled back, no bytes follow.

    numel, total_bytes: of what is sent (`edit.codecs.cut`), 0 when this rank holds nothing of the fragment;
    commit: the verdicts and numbers; its payload is always None here.
    """

    commit: FragmentCommit
    codec: str | None
    numel: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateManifest:
    """What a published update consists of: the fragments that the outer step exchanged; their bytes follow in this order."""

    outer_step: int
    round_id: int
    digest: str
    reason: str
    fragments: tuple[FragmentUpdate, ...]


@dataclass(frozen=True, slots=True)
class Donor:
    """A member that serves a snapshot, too."""

    peer_id: str
    serving: Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """theta at `outer_step`; fragment_hash: of each fragment's fp32 little-endian bytes; donors: members that have it too."""

    outer_step: int
    digest: str
    schema: Schema
    fragment_hash: tuple[bytes, ...]
    donors: tuple[Donor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """One fragment of the snapshot at `outer_step`, from byte `offset` on. boxes: the part of it that is wanted; None: all.

    ticket: of the donor that is asked; empty: the aggregator is."""

    run_id: str
    outer_step: int
    fragment_id: int
    offset: int = 0
    boxes: tuple[Box, ...] | None = None
    ticket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHeader:
    """The founder's initial parameters follow, fp32, fragment after fragment."""

    run_id: str
    schema_hash: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectHeader:
    """An `edit.merging.injection.Injection` without its bytes, which follow, fp32, one of `fragments` after the other.

    digest: over the fragments that follow (`edit.fragments.digest.digest`).
    """

    run_id: str
    schema_hash: str
    brings: Injected
    base: Injected | None
    replaces: bool
    fragments: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionState:
    """The run below as its regional aggregator sees it. tokens: merged so far; injected: what is in the outer parameters at
    `outer_step`; accepted: what is on disk and comes in with the next commit."""

    outer_step: int
    phase: RunPhase
    tokens: int
    injected: Injected | None
    accepted: Injected | None
