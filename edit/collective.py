"""The seam between the algorithm and whatever carries it.

`EditWorker` talks to a `Collective`; in-process (`edit.local.LocalCollective`), over gRPC
(`peers.carriers.hub.collective`), or over a swarm, the answers are the same values and the outer parameters the same bits.
A carrier never raises for a lost round: it returns `Aborted(reason)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from edit.config.run import RunConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Contribution, Lacks, Outcome, Progress, Snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Collective", "CompositeCollective", "config_of", "ranks_of", "shares_of"]


class Collective(Protocol):
    """One peer's connection to the run.

    A connection that was made for a number of ranks of one replica has it as `ranks`; an `EditWorker` of another number
    refuses it. One that knows the run's configuration has it as `config`; an `EditWorker` refuses settings of another run.
    """

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        ...

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        """Enter the run; blocks until there are outer parameters to start from, and returns them.

        found: gives this peer's own initial fragments (flat fp32, whole; at a rank other than 0 whatever); called only when
        the run has no parameters yet and this peer was chosen to found it, then at all of its ranks. shards: what this rank
        holds of each fragment, and so what snapshots and commits bring it; None: everything. lacks: asked before anything is
        fetched; fragments that are not in its answer may be empty tensors in the snapshot that is returned.
        Raises RefusedError when the schema differs from the run's (names the first tensor).
        """
        ...

    def contribute(self, contribution: Contribution) -> None:
        """Hand over one fragment, or this rank's part of it; returns at once, the carrier sends in the background.

        All fragments that the outer step exchanges, of all ranks, together are one contribution of this peer to one round.
        """
        ...

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """What became of the attempt to advance FROM `outer_step`.

        Committed: the run advanced to outer_step + 1 (whether or not this peer was part of it: see FragmentCommit.verdict_of).
        A contribution that was not part of it and is CARRIED stays on its way; the caller asks on, about the next outer step.
        Aborted: the round this peer contributed to was lost, or its contribution refused (too stale): it will not be merged,
        the outer step is still open. None: not known. With block=True
        None is returned only when the carrier is cut off: the contribution is then IN DOUBT, it may yet turn out committed, so
        the caller keeps it, trains on and asks again; it must not contribute to the same outer step before it has an answer.
        All ranks of a replica ask together and get the same answer.
        """
        ...

    def snapshot(self) -> Snapshot:
        """The outer parameters of the latest committed step; blocks. Raises TransportError when cut off."""
        ...

    def report(self, progress: Progress) -> None:
        """Tell the run how far this peer is, in place of what was told before; returns at once."""
        ...


class CompositeCollective:
    """One peer's connections to a run with several aggregators; what `EditWorker` takes in place of a `Collective`.

    shares: a collective for each aggregator, in the aggregators' order. Each carries the fragments that its aggregator has
    (`edit.fragments.assignment`); they advance on their own. clip: the largest norm of a contribution, over all fragments and
    ranks, that this peer's site allows: a longer one is made as short before it is encoded; 0: any. It needs one aggregator.
    reached: the largest outer step that any of several aggregators has said: above 0 none of them is founded anew.
    """

    def __init__(self, shares: Sequence[Collective], clip: float = 0.0, reached: int = 0) -> None:
        if not shares:
            raise LocalProtocolError("a CompositeCollective needs at least one collective")
        if clip and len(shares) > 1:
            raise ConfigError(f"protect.clip = {clip:g}: the model is in {len(shares)} parts, with a contribution to each")
        self._shares, self.clip = tuple(shares), clip
        self.reached = reached if len(shares) > 1 else 0

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts, the same at every aggregator."""
        return self._shares[0].peer_id

    @property
    def shares(self) -> tuple[Collective, ...]:
        """A collective for each aggregator, in their order."""
        return self._shares


def config_of(collective: Collective | CompositeCollective) -> RunConfig | None:
    """Return the configuration of the run that this is a connection to; None: it does not say."""
    config: RunConfig | None = getattr(collective, "config", None)
    return config


def ranks_of(collective: Collective) -> int | None:
    """Return for how many ranks of one replica this connection was made; None: it does not say."""
    ranks: int | None = getattr(collective, "ranks", None)
    return ranks


def shares_of(collective: Collective | CompositeCollective) -> tuple[Collective, ...]:
    """Return the collective of each aggregator: a plain `Collective` is the only one."""
    return collective.shares if isinstance(collective, CompositeCollective) else (collective,)
