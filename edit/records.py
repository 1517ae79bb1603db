"""Values that cross the seam between the algorithm and a carrier: what a peer contributes, and what it gets back.

Plain frozen dataclasses. `editpb.data_messages` and `editpb.status_messages` map them to and from the wire and validate what
arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from edit.fragments.shards import Box

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MAX_METRICS",
    "MAX_METRIC_CHARS",
    "MOST_SCORE",
    "MOST_TOKENS",
    "Aborted",
    "Arriving",
    "Commit",
    "Committed",
    "Contribution",
    "DescribedSnapshot",
    "EncodedTensor",
    "Evicted",
    "Finished",
    "FragmentCommit",
    "Here",
    "Lacking",
    "Lacks",
    "NeedsSnapshot",
    "Outcome",
    "PeerVerdict",
    "Progress",
    "RolledBack",
    "Snapshot",
    "Update",
    "Verdict",
    "round_name",
    "round_number",
]

MAX_METRICS, MAX_METRIC_CHARS = 32, 64  # that one peer reports, and of the name of each
ROUNDS_PER_START = 1_000_000  # what `round_number` cuts off: ids of a start, and of a swarm's owner, begin at a multiple of it
MOST_TOKENS = (1 << 63) - 1  # a run counts no further: what a signed 64-bit number holds
MOST_SCORE = 1.0  # the largest magnitude of what a scorer says of a contribution


def round_number(round_id: int) -> int:
    """Return a round's number as people count: 1, 2, 3, ... since the aggregator started; 0 where none is open.

    Ids ascend over restarts and over the owners of a part, so they are long: messages and tables show the number, JSON the id.
    """
    return round_id % ROUNDS_PER_START


def round_name(round_id: int, newest: int) -> str:
    """Return `round 7`, or `round 7 of an earlier start` where the round with the id `newest` is of a later one."""
    earlier = round_id // ROUNDS_PER_START < newest // ROUNDS_PER_START
    return f"round {round_number(round_id)}{' of an earlier start' if earlier else ''}"


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """An encoded flat fp32 vector."""

    codec: str  # the text of a CodecSpec, as `edit.codecs.codec` takes it
    numel: int  # elements
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Here:
    """The update of a fragment: the encoded outer step s, to be applied as theta <- theta - decode(payload)."""

    payload: EncodedTensor


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No update of a fragment: no contribution to it had a weight, or the step was not finite. theta stays."""


class Arriving(Protocol):
    """The update of a fragment that is still on its way."""

    def wait(self) -> EncodedTensor:
        """Block until all bytes are here, and return them.

        All ranks of a replica wait for the same fragments in the same order, also where their own shard is empty, and get the
        same answer: every rank has its bytes, or every rank raises the same error. Raises TransportError when cut off (call it
        again later), RemoteProtocolError when the bytes are bad.
        """
        ...


Update = Here | Arriving | RolledBack  # of one fragment, in a commit


class Verdict(Enum):
    """What was decided about one peer's contribution to one fragment; all but OK and COPIED have weight 0."""

    OK = "ok"
    NONFINITE = "nonfinite"  # NaN, Inf, or too long for fp32
    ANOMALOUS = "anomalous"  # norm more than delta standard deviations above what its peer usually sends
    IDLE = "idle"  # norm far below the round's median: a free rider or a copied zero
    UNPAIRED = "unpaired"  # gossip: no swap with this partner; it did not answer, or found fault itself
    OUTLIER = "outlier"  # a robust rule gives it no weight
    COPIED = "copied"  # so much like another contribution that they share one weight, or like the last merged one: then 0
    HARMFUL = "harmful"  # its peer's contributions do not lower the loss that scorers measure, or much less than the others'
    # Not admitted by a policy of the run (`edit.merging.mergers.Admission`), or left out because of another fragment, where one
    # set of contributions is merged in all of them.
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerVerdict:
    """What became of one peer's contribution to one fragment."""

    peer_id: str
    verdict: Verdict
    norm: float  # ||Delta||_2 over the whole replica
    weight: float  # in the mean, 0 to 1
    staleness: int = 0  # outer steps committed since the one it was computed against


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One fragment of one peer's pseudo-gradient, or one rank's shard of it."""

    outer_step: int  # computed against the outer parameters of this step
    fragment_id: int
    inner_steps: int  # the work behind it, of this round only, of the whole replica
    tokens: int  # likewise
    payload: EncodedTensor
    boxes: tuple[Box, ...] | None = None  # what of the fragment the payload holds; None: all of it
    norm: float | None = None  # with masks: ||u||_2 over the whole replica, as the peer says; None: it is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentCommit:
    """What a commit did to one fragment.

    payload: the encoded outer step s, to be applied as theta <- theta - decode(payload); None: rolled back, theta stays. A rank
    that holds a shard of the fragment gets what `Codec.cut` leaves of it.
    """

    fragment_id: int
    payload: EncodedTensor | None
    verdicts: tuple[PeerVerdict, ...]  # one per contributor, in peer_id order
    merged_norm: float  # ||D|| before the clip
    clip: float  # beta, the factor of the clip

    def verdict_of(self, peer_id: str) -> PeerVerdict | None:
        """Return this peer's verdict, or None when it did not contribute to the fragment."""
        return next((verdict for verdict in self.verdicts if verdict.peer_id == peer_id), None)

    def counts(self, peer_id: str) -> bool:
        """Return whether the merge had a share of this peer's contribution. The outer step may have been rolled back since."""
        mine = self.verdict_of(peer_id)
        came_to_something = self.merged_norm != 0 or (mine is not None and mine.norm == 0)
        return mine is not None and mine.verdict is Verdict.OK and mine.weight > 0 and came_to_something


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """An advance of the run from outer_step - 1 to `outer_step`."""

    outer_step: int
    round_id: int  # the round that was committed
    digest: str  # of theta at `outer_step`, see `edit.fragments.digest`
    reason: str  # why the round closed
    # Those that this outer step exchanges (`edit.fragments.groups.fragments_due`), ascending; theta of the others stays.
    fragments: tuple[FragmentCommit, ...]

    def has(self, peer_id: str) -> bool:
        """Return whether this peer contributed to it, whatever the verdict."""
        return any(part.verdict_of(peer_id) is not None for part in self.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one peer is in its training, at one rank: what a carrier tells the others of it."""

    outer_step: int  # of its outer parameters
    digest: str  # of its outer parameters
    exchanging: bool  # whether a contribution waits for its outcome
    inner_steps: int  # since its process started
    round_inner_steps: int  # since its last contribution
    loss: float = math.nan  # training loss, moving mean; NaN where the peer does not tell it
    tokens_per_s: float = 0.0
    step_s: float = 0.0  # seconds per inner step without waits for exchanges, moving median
    device: str = ""  # what it computes on, in words; empty: it does not say
    metrics: Mapping[str, float] = field(default_factory=dict)  # what else its user reports, by name; all finite


@dataclass(frozen=True, slots=True)
class Snapshot:
    """theta at a committed outer step."""

    outer_step: int
    digest: str  # of all of theta, at every rank
    fragments: tuple[Tensor, ...]  # flat fp32, in fragment order; at a rank of a sharded replica its shards of them
    # The outer step that the run had reached when it was asked: further, where a snapshot is shared that others still read;
    # updates lead from here to there. 0: this one.
    run_outer_step: int = 0


@dataclass(frozen=True, slots=True)
class DescribedSnapshot:
    """What a snapshot consists of, before any of it is fetched."""

    outer_step: int
    digest: str  # of all of theta
    hashes: tuple[bytes, ...]  # of each whole fragment (`edit.fragments.digest.fragment_hash`)
    run_outer_step: int = 0  # as of a `Snapshot`


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a peer has to be sent before it begins."""

    fragments: Collection[int]  # of the snapshot
    # The older outer step that the peer begins at, with parameters of its own: it then takes the updates that lead from there,
    # and rounds need not wait for it before it has them. None: it begins at the snapshot's, or is waited for all the same.
    begins_at: int | None = None


Lacks = Callable[[DescribedSnapshot], Lacking]
"""Returns what of a snapshot a peer does not have. All ranks of a replica call it together and get the same."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The outer step that the peer asked about was committed."""

    commit: Commit
    # The updates of commit.fragments, by position, when some are still on their way: the commit's own payloads are then None
    # and mean nothing. Empty: the commit has them all.
    updates: tuple[Update, ...] = ()
    # This peer's contribution is not part of the commit, but still accepted: a later commit brings its verdict.
    carried: bool = False
    # Inner steps until the next contribution (DyLU), from now on; 0: as before.
    inner_steps: int = 0


@dataclass(frozen=True, slots=True)
class Aborted:
    """The round was lost, and the outer step is still open: roll the residuals back and train on."""

    reason: str


@dataclass(frozen=True, slots=True)
class NeedsSnapshot:
    """The run is further ahead than the kept updates reach, or the peer's digest is wrong: take a snapshot."""

    reason: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """The operator evicted this peer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has reached its end; the peer may stop."""

    outer_step: int


Outcome = Committed | Aborted | NeedsSnapshot | Evicted | Finished
