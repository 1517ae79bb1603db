"""Values that cross a seam: what a peer contributes, what it gets back. Plain frozen dataclasses, no behaviour.

`editpb.data_messages` and `editpb.control_messages` map them to and from the wire and validate all wire input.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from edit.fragments.shards import Box

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Aborted",
    "Arriving",
    "Commit",
    "Committed",
    "Contribution",
    "EncodedTensor",
    "Evicted",
    "Finished",
    "FragmentCommit",
    "Here",
    "NeedsSnapshot",
    "Outcome",
    "PeerVerdict",
    "RolledBack",
    "Snapshot",
    "Update",
    "Verdict",
]


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A flat fp32 vector of `numel` elements, encoded by the codec named `codec`."""

    codec: str
    numel: int
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Here:
    """The update of a fragment: the encoded outer step s, to be applied as theta <- theta - decode(payload)."""

    payload: EncodedTensor


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No update of a fragment: every contribution to it was refused, so theta stays."""


class Arriving(Protocol):
    """The update of a fragment that is still on its way."""

    def wait(self) -> EncodedTensor:
        """Block until all of it is here. Raises TransportError when cut off, RemoteProtocolError when it is bad.

        All ranks of a replica wait for the same fragments in the same order, also where their own part is empty; they get the
        same answer: all parts are here, or the same error at all. After a TransportError it may be called again.
        """
        ...


Update = Here | Arriving | RolledBack  # of one fragment, in a commit


class Verdict(Enum):
    """What was decided about one peer's contribution to one fragment; all but OK have weight 0."""

    OK = "ok"
    NONFINITE = "nonfinite"  # NaN, Inf, or a norm that overflows
    ANOMALOUS = "anomalous"  # norm more than delta standard deviations above its moving mean
    IDLE = "idle"  # norm far below the round's median: a free rider or a copied zero
    REJECTED = (
        "rejected"  # a policy of the run did not admit it (`edit.merging.mergers.Admission`); the others are the penalty's
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerVerdict:
    """One contribution's fate. norm: ||Delta||_2 over the whole replica; weight: share in the mean, 0 to 1; staleness: it was
    computed against the outer parameters so many outer steps before those that were advanced."""

    peer_id: str
    verdict: Verdict
    norm: float
    weight: float
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One fragment of one peer's pseudo-gradient, computed against the outer parameters of `outer_step`: the work began there.

    inner_steps, tokens: the work of THIS round behind it (never cumulative), of the whole replica. boxes: what of the fragment
    the payload holds (see `edit.fragments.shards.Shard`); None: all of it.
    """

    outer_step: int
    fragment_id: int
    inner_steps: int
    tokens: int
    payload: EncodedTensor
    boxes: tuple[Box, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentCommit:
    """One fragment's part of a commit. payload: the encoded outer step s, to be applied as theta <- theta - decode(payload);
    None means rollback: theta stays. A rank that holds a shard of the fragment gets what `edit.codecs.cut` leaves of it.
    merged_norm: ||D|| before the clip; clip: beta."""

    fragment_id: int
    payload: EncodedTensor | None
    verdicts: tuple[PeerVerdict, ...]
    merged_norm: float
    clip: float

    def verdict_of(self, peer_id: str) -> PeerVerdict | None:
        """This peer's verdict, or None when it did not contribute to the fragment."""
        return next((verdict for verdict in self.verdicts if verdict.peer_id == peer_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """An advance from outer_step - 1 to `outer_step`. digest: of theta at `outer_step` (see
    `edit.fragments.digest.digest`).

    fragments: those that this outer step exchanges (`edit.fragments.groups.fragments_due`), in ascending fragment_id; theta
    of the others stays.
    """

    outer_step: int
    round_id: int
    digest: str
    reason: str
    fragments: tuple[FragmentCommit, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """theta at a committed outer step: one flat fp32 tensor per fragment, in fragment order; at a rank, of its shards.

    digest: of all of theta, at every rank.
    """

    outer_step: int
    digest: str
    fragments: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The outer step the peer asked about was committed.

    updates: of commit.fragments, by position, where some are still on their way (then their payloads in the commit are None and
    mean nothing); empty: the commit has them all.
    carried: this peer's contribution is not part of the commit, but still accepted: a later commit brings its verdict.
    inner_steps: how many inner steps to take until the next contribution (DyLU), from now on; 0: as before.
    """

    commit: Commit
    updates: tuple[Update, ...] = ()
    carried: bool = False
    inner_steps: int = 0


@dataclass(frozen=True, slots=True)
class Aborted:
    """The round was lost; the outer step is still open. Residuals roll back, training goes on."""

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
    """The run has reached its last outer step; the peer may stop."""

    outer_step: int


Outcome = Committed | Aborted | NeedsSnapshot | Evicted | Finished
