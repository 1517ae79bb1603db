"""How much each peer is trusted, by how much its contributions lower the loss on data that a scorer holds. Pure.

A scorer says of each contribution to an outer step, against theta before it (Gauntlet of templar, without its ratings by pairs
and its check on the peer's own data):

    s_m = (L(theta) - L(theta - 0.5 Delta_m)) / L(theta), at least -1

- `after_scores`: the moving mean of a peer's scores with rate 0.4, corrected for its start, so the first score is the mean.
- `factors`: what multiplies a peer's prior: its mean relative to the median of the organisations in the round, where that is
  positive; else 1 for all. 0 below a quarter of the median: the verdict HARMFUL. At most 4. A peer that nobody has scored yet
  has 1.

So at least half of the organisations keep a weight, whatever a scorer says, and none of these counts for more than 16 times
another. Floats in a fixed order: whoever merges the same contributions with the same scores finds the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from torch import Tensor

from edit.merging.portable_math import moving_rate
from edit.merging.robust import organisation
from edit.records import MOST_SCORE

__all__ = ["Trust", "after_scores", "agreed", "factors", "score", "score_of", "scores"]

STEP = 0.5  # of a contribution, that a scorer takes
_RATE = 0.4
_HARMFUL = 0.25  # of the median
_MOST = 4.0  # times the median


@dataclass(frozen=True, slots=True)
class Trust:
    """What scorers have said of one peer so far."""

    # The moving mean of its scores, and of how many.
    mean: float
    count: int

    def to_json(self) -> list[float | int]:
        """Return it as JSON values; the float survives to the bit."""
        return [self.mean, self.count]

    @classmethod
    def from_json(cls, written: Any) -> Self:
        """Read what `to_json` returned. Raises TypeError or ValueError for anything else."""
        mean, count = written
        if type(count) is not int or count < 1 or not isinstance(mean, float | int) or not abs(mean) <= MOST_SCORE:
            raise ValueError(f"{written!r:.80} is no trust")
        return cls(float(mean), count)


def score(before: float, after: float) -> float:
    """Return what half of a contribution lowers the loss by, as a share of it, from -1 to 1. before: finite and above 0."""
    return max(-MOST_SCORE, (before - after) / before) if math.isfinite(after) else -MOST_SCORE


def scores(
    theta: Sequence[Tensor],
    contributions: Iterable[tuple[str, Mapping[int, Tensor]]],
    loss: Callable[[Sequence[Tensor]], float],
) -> dict[str, float]:
    """Return the score of each contribution to one outer step, by peer_id; nothing where the loss of theta is none.

    Args:
        theta: the outer parameters that the outer step was taken from, one flat fp32 tensor per fragment.
        contributions: of each peer, what it sent of each fragment, decoded, by fragment_id; one at a time. What is not finite
            is passed over: it has a verdict of its own.
        loss: of outer parameters, on the same data each time.
    """
    before = loss(theta)
    if not math.isfinite(before) or before <= 0:
        return {}
    each = ((peer_id, score_of(theta, before, fragments, loss)) for peer_id, fragments in contributions)
    return {peer_id: found for peer_id, found in each if found is not None}


def score_of(
    theta: Sequence[Tensor], before: float, fragments: Mapping[int, Tensor], loss: Callable[[Sequence[Tensor]], float]
) -> float | None:
    """Return the score of one contribution, see `scores`; None where it is not finite. before: the loss of theta."""
    if not all(bool(delta.isfinite().all()) for delta in fragments.values()):
        return None
    moved = [part if i not in fragments else part.sub(fragments[i], alpha=STEP) for i, part in enumerate(theta)]
    return score(before, loss(moved))


def agreed(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what several scorers say of one outer step together: of each peer the median of its scores."""
    peers = sorted({peer_id for report in reports for peer_id in report})
    return {peer_id: median(report[peer_id] for report in reports if peer_id in report) for peer_id in peers}


def after_scores(before: Mapping[str, Trust], scored: Mapping[str, float]) -> dict[str, Trust]:
    """Return the trust in each peer after the scores of one outer step.

    Who was not scored keeps what it had, but no more than the median of those who were: scores shrink while a model learns, so
    an old one would count for too much.
    """
    now = {}
    for peer_id, value in sorted(scored.items()):
        known = before.get(peer_id, Trust(0.0, 0))
        rate = moving_rate(_RATE, known.count + 1)
        mean = known.mean + rate * (value - known.mean)
        now[peer_id] = Trust(min(max(mean, -MOST_SCORE), MOST_SCORE), known.count + 1)
    middle = _middle(now)
    others = {peer_id: trust for peer_id, trust in before.items() if peer_id not in now}
    if middle > 0:
        others = {peer_id: Trust(min(trust.mean, middle), trust.count) for peer_id, trust in others.items()}
    return dict(sorted({**others, **now}.items()))


def factors(peers: Sequence[str], trust: Mapping[str, Trust]) -> list[float]:
    """Return what multiplies the prior of each of the peers of a round: 0, or from 1/4 to 4."""
    middle = _middle({peer_id: trust[peer_id] for peer_id in peers if peer_id in trust})
    if middle <= 0:
        return [1.0] * len(peers)
    relative = [trust[peer_id].mean / middle if peer_id in trust else 1.0 for peer_id in peers]
    return [0.0 if each < _HARMFUL else min(each, _MOST) for each in relative]


def _middle(trust: Mapping[str, Trust]) -> float:
    """Return the median of the organisations, each the mean of its peers; 0 of none."""
    of: dict[str, list[float]] = {}
    for peer_id in sorted(trust):
        of.setdefault(organisation(peer_id), []).append(trust[peer_id].mean)
    return median(math.fsum(means) / len(means) for means in of.values()) if of else 0.0
