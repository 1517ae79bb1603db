"""A Collective that answers from a script, and the commits it answers with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edit.codecs import decode
from edit.errors import TransportError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import (
    Commit,
    Committed,
    Contribution,
    FragmentCommit,
    Lacks,
    Outcome,
    PeerVerdict,
    Progress,
    Snapshot,
    Verdict,
)
from tests.support.encoded import encode

ME = "me"


def snapshot_of(outer_step: int, fragments: Sequence[Tensor]) -> Snapshot:
    """A snapshot with its true digest."""
    return Snapshot(outer_step, digest(fragments), tuple(fragments))


def committed(
    theta: Snapshot,
    steps: Sequence[Tensor | None],
    verdicts: Sequence[Verdict | None],
    digest_of: str | None = None,
    clip: float = 1.0,
) -> tuple[Committed, Snapshot]:
    """The commit that follows on theta by these steps (None: rollback), this peer's verdicts, and theta after it.

    clip: the factor of the merge's clip, as the commit says it.
    """
    parts, after = [], []
    for i, (outer, step, verdict) in enumerate(zip(theta.fragments, steps, verdicts, strict=True)):
        payload = encode("fp32", step) if step is not None else None
        after.append(outer - decode(payload) if payload is not None else outer.clone())
        mine = (PeerVerdict(peer_id=ME, verdict=verdict, norm=1.0, weight=1.0),) if verdict else ()
        other = PeerVerdict(peer_id="other", verdict=Verdict.OK, norm=1.0, weight=0.5)
        parts.append(FragmentCommit(fragment_id=i, payload=payload, verdicts=(*mine, other), merged_norm=1.0, clip=clip))
    target = snapshot_of(theta.outer_step + 1, after)
    commit = Commit(
        outer_step=target.outer_step,
        round_id=target.outer_step,
        digest=target.digest if digest_of is None else digest_of,
        reason="scripted",
        fragments=tuple(parts),
    )
    return Committed(commit), target


def random_steps(theta: Snapshot, seed: int = 0) -> list[Tensor]:
    """One random outer step per fragment."""
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(part.shape, generator=generator) for part in theta.fragments]


class ScriptedCollective:
    """Says of each outer step what the test told it to, in order; None once nothing is left, and notes every question.

    A blocking question about a step for which nothing is left fails the test: a real peer would hang there.
    """

    def __init__(self, theta: Snapshot | None = None) -> None:
        self.theta = theta
        self.answers: dict[int, list[Outcome | None]] = defaultdict(list)
        self.asked: list[tuple[int, bool]] = []
        self.contributed: list[Contribution] = []
        self.snapshots: list[Snapshot | TransportError] = []
        self.schema: Schema | None = None
        self.told: list[Progress] = []

    @property
    def peer_id(self) -> str:
        return ME

    @property
    def waited(self) -> int:
        """Blocking questions so far."""
        return sum(block for _, block in self.asked)

    def rounds(self) -> list[list[Contribution]]:
        """Contributions, grouped by attempt: a new one begins with fragment 0."""
        attempts: list[list[Contribution]] = []
        for contribution in self.contributed:
            if contribution.fragment_id == 0:
                attempts.append([])
            attempts[-1].append(contribution)
        return attempts

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        self.schema = schema
        if self.theta is None:
            self.theta = snapshot_of(0, found())
        return self.theta

    def contribute(self, contribution: Contribution) -> None:
        self.contributed.append(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        self.asked.append((outer_step, block))
        if self.answers[outer_step]:
            return self.answers[outer_step].pop(0)
        assert not block, f"a blocking question about outer step {outer_step} without an answer"
        return None

    def report(self, progress: Progress) -> None:
        self.told.append(progress)

    def snapshot(self) -> Snapshot:
        answer = self.snapshots.pop(0)
        if isinstance(answer, TransportError):
            raise answer
        return answer
