"""Robust rules: how much of each contribution is merged where up to f of them are hostile. Pure.

`coefficients` computes what follows from inner products alone: from the Gram matrix K of the contributions, in fp64, on
Python's floats in a fixed order, so that whoever merges the same contributions finds the same bits.

Distances: d_ij^2 = K_ii + K_jj - 2 K_ij, and to a point sum a_j x_j: d_i(a)^2 = K_ii - 2 (K a)_i + a^T K a. What is nearer than
1e-3 sqrt(median K_ii) is rounding.

- geometric_median (RFA, arXiv 1912.13445, algorithm 1): a_i = p_i min(1, 4 median |x| / |x_i|), then 32 times
  w_i = p_i / d_i(a), a <- w / sum w. From the mean of rows of any length the steps would not get far: with n rows each takes
  a factor of n - 1 off the distance.
- centered_clip (arXiv 2012.10333, algorithm 2): from the fragment's last merged pseudo-gradient, 5 times
  c_i = p_i min(1, tau / d_i(a)), a <- a (1 - sum c) + c.
- multi_krum (arXiv 1703.02757): the score of i is the sum of its n - f - 2 smallest d_ij^2; the n - f best share equally.
- clip: a_i = p_i min(1, median |x| / |x_i|).
- nearest-neighbour mixing (arXiv 2302.01772): each row is replaced by the mean of those nearest to it, 1 - f/n of the prior.
- anchors (FLTrust, arXiv 2012.13995, section 4): `by_anchors`, in place of a rule. x_0 is the mean of the anchors'
  contributions, t_i = p_i max(0, cos(x_i, x_0)), a = t / sum t, each made as long as x_0.

median and trimmed_mean (arXiv 1803.01498) go element by element: `by_rank`, on a sorting network of minima and maxima.
Which rule stands what: docs/robust-merging.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
from torch import Tensor

from edit.config.robust import RobustConfig

__all__ = [
    "Combination",
    "by_anchors",
    "by_rank",
    "coefficients",
    "copies",
    "mixed",
    "of_rows",
    "organisation",
    "organisations",
    "shared_prior",
]

_LONGEST = 4.0  # a contribution is made at most so many times as long; Weiszfeld starts from none longer than that median
_NEAR = 1e-3  # of the median length
_WEISZFELD_STEPS = 32
_CONVERGED = 1e-7
_CLIP_STEPS = 5
# Contributions this much alike count as one, if most honest ones are not. Where those are far apart: at most 0.976 at the first
# outer step, then 0.63.
_COPY_AT_FIRST, _COPY = 0.99, 0.9
_REPLAY = 0.85  # of the last merged pseudo-gradient; honest ones: at most 0.67 once training is under way
_UNDER_WAY = 4  # the outer steps after which the latter two hold
_ALIKE = 0.3  # of what 1 - cosine is among the honest: of norms and biases all honest contributions are much alike

# An inner product of fp32 below this may have lost most of its terms, which are too small for fp32: such a row would seem
# shorter than it is, and be made longer than it may.
_LEAST_SQUARE = 1e-30
_LEAST_LEFT = 1e-3  # of the squares of what a mean is of: less is rounding, as peers of one organisation cancel each other

Gram = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Combination:
    """D = sum_i weights[i] scales[i] x_i + last * (the last merged pseudo-gradient)."""

    # a: of the contributions as the rule saw them, at least 0.
    weights: list[float]
    # s: what made them equally long; 1: nothing.
    scales: list[float]
    last: float = 0.0


def coefficients(gram: Gram, prior: Sequence[float], config: RobustConfig) -> Combination:
    """Return how much of each of n contributions is merged by a rule that is not `by_element`; without a rule, the prior.

    gram: their inner products [n, n]; with a further row and column for the last merged pseudo-gradient, zeros where there is
    none. prior: p of each, at least 0 and in all 1; the order of equals is that of the rows.
    """
    n = len(prior)
    if config.rule == "none":
        return Combination(list(prior), [1.0] * n)
    lengths = [math.sqrt(max(gram[i][i], 0.0)) for i in range(n)]
    middle = median(lengths)
    if config.rule == "clip":
        shortened = [min(1.0, middle / length) if length > 0 else 1.0 for length in lengths]
        return Combination([p * factor for p, factor in zip(prior, shortened, strict=True)], [1.0] * n)
    scales = [1.0] * n
    if config.equalise and middle > 0:
        scales = [min(_LONGEST, middle / length) if length > 0 else _LONGEST for length in lengths]
    factors = [*scales, 1.0]
    scaled = [[factors[i] * factors[j] * gram[i][j] for j in range(len(gram))] for i in range(len(gram))]
    mixing = mixed(scaled, prior, config.hostile) if config.mixing == "nnm" else None
    seen = of_rows(scaled, mixing) if mixing is not None else scaled
    last = 0.0
    if config.rule == "geometric_median":
        chosen = _geometric_median(seen, prior)
    elif config.rule == "centered_clip":
        chosen, last = _centered_clip(seen, prior, config.radius)
    else:
        chosen = _multi_krum(seen, prior, config.hostile)
    if mixing is not None:
        chosen = [math.fsum(mixing[i][j] * chosen[i] for i in range(n)) for j in range(n)]
    return Combination(chosen, scales, last)


def by_anchors(gram: Gram, prior: Sequence[float], anchors: Sequence[float], squares: Sequence[float]) -> Combination:
    """Return how much of each of n contributions is merged by its cosine to x_0 = sum_i anchors[i] x_i, as long as x_0 is.

    Nothing of those that point away from x_0, and of those whose length cannot be told in fp32; nothing of all where that of
    x_0 cannot. So the sum is at most as long as x_0, which nobody but the anchors moves.

    gram: their inner products [n, n]; further rows and columns are not read. prior: p of each, at least 0. anchors: the share
    of each in x_0, at least 0 and in all 1; 0 of those that are no anchors. squares: the squared length of each, or of what it
    is the mean of, on average.
    """
    n = len(prior)
    least = [max(_LEAST_SQUARE, _LEAST_LEFT * square) for square in squares]
    measured = [math.isfinite(gram[i][i]) and gram[i][i] >= least[i] for i in range(n)]
    none = Combination([0.0] * n, [1.0] * n)
    if not all(measured[i] for i in range(n) if anchors[i] > 0):
        known = [share if ok else 0.0 for share, ok in zip(anchors, measured, strict=True)]
        whole = math.fsum(known)
        if whole <= 0:
            return none
        anchors = [share / whole for share in known]
    named = [j for j in range(n) if anchors[j] > 0]
    towards = [math.fsum(anchors[j] * gram[i][j] for j in named) if measured[i] else 0.0 for i in range(n)]  # <x_i, x_0>
    own = math.fsum(anchors[j] * towards[j] for j in named)
    if own < _LEAST_SQUARE:
        return none
    length = math.sqrt(own)
    scales = [length / math.sqrt(gram[i][i]) if measured[i] else 1.0 for i in range(n)]
    trust = [p * min(max(0.0, scale * each / own), 1.0) for p, scale, each in zip(prior, scales, towards, strict=True)]
    total = math.fsum(trust)
    return Combination([each / total for each in trust], scales) if total > 0 else none


def organisations(peer_ids: Sequence[str]) -> list[list[int]]:
    """Return which of these peers are of one organisation, by the first of each: their names are alike up to the first dot.

    Whoever invites a peer names it, so nobody becomes several organisations by himself.
    """
    found: dict[str, list[int]] = {}
    for i, peer_id in enumerate(peer_ids):
        found.setdefault(organisation(peer_id), []).append(i)
    return list(found.values())


def organisation(peer_id: str) -> str:
    """Return the organisation of a peer: its name up to the first dot."""
    return peer_id.partition(".")[0]


def copies(gram: Gram, n: int, outer_step: int, hostile: int) -> tuple[list[list[int]], list[int]]:
    """Return the groups of more than one contribution that are copies of each other, and who repeats the last merged one.

    gram: of n contributions, and of the last merged pseudo-gradient where there is one. outer_step: before this merge.
    A cosine is compared with a fixed one and with the others: 1 - cosine must be below 0.3 times the usual one, a rank
    which `hostile` rows cannot push above the median of honest pairs. They can push it down: then nobody is called a copy.
    """
    under_way = outer_step >= _UNDER_WAY
    honest = n - hostile
    pairs = {(i, j): 1 - _cosine(gram, i, j) for i in range(n) for j in range(i)}
    usual = _ranked(list(pairs.values()), honest * (honest - 1) // 4)
    alike = min(1 - (_COPY if under_way else _COPY_AT_FIRST), _ALIKE * usual)
    groups: list[list[int]] = []
    for i in range(n):
        joined = [group for group in groups if any(pairs[i, j] < alike for j in group)]
        groups = [group for group in groups if group not in joined] + [sorted([i, *(j for group in joined for j in group)])]
    replayed: list[int] = []
    if len(gram) > n and under_way:
        away = [1 - _cosine(gram, i, n) for i in range(n)]
        near = min(1 - _REPLAY, _ALIKE * _ranked(away, honest // 2))
        replayed = [i for i in range(n) if away[i] < near]
    return sorted(group for group in groups if len(group) > 1), replayed


def _ranked(values: Sequence[float], rank: int) -> float:
    """Return the value of this rank, 0 for the smallest; the largest where there are fewer, 0 of none."""
    return sorted(values)[min(rank, len(values) - 1)] if values else 0.0


def shared_prior(prior: Sequence[float], groups: Sequence[Sequence[int]], without: Sequence[int]) -> list[float]:
    """Return the prior, in all 1, where each group has what its largest member had, and those `without` have nothing."""
    left = [0.0 if i in without else p for i, p in enumerate(prior)]
    for group in groups:
        most, together = max(left[i] for i in group), math.fsum(left[i] for i in group)
        for i in group:
            left[i] = left[i] * most / together if together > 0 else 0.0
    whole = math.fsum(left)
    return [p / whole for p in left] if whole > 0 else left


def mixed(gram: Gram, prior: Sequence[float], hostile: int) -> list[list[float]]:
    """Return M of nearest-neighbour mixing, [n, n], each row in all 1: row i takes prior of its nearest rows, itself first.

    It takes until it has 1 - f/n; the last one it takes in part.
    """
    n, enough = len(prior), 1 - hostile / len(prior)
    found = []
    for i in range(n):
        nearest = sorted((j for j in range(n) if j != i), key=lambda j, i=i: (_square(gram, i, j), j))  # type: ignore[misc]
        row, left = [0.0] * n, enough
        for j in (i, *nearest):
            row[j] = min(prior[j], left)
            left -= row[j]
            if left <= 0:
                break
        total = math.fsum(row)
        found.append([share / total for share in row] if total > 0 else list(prior))
    return found


def of_rows(gram: Gram, mixing: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return M K M^T: the Gram matrix of sums of rows. mixing: M [k, n]; further rows of the Gram matrix are not mixed."""
    n, whole = len(mixing[0]), len(gram)
    rows = [[*row, *[0.0] * (whole - n)] for row in mixing] + [[float(i == j) for j in range(whole)] for i in range(n, whole)]
    half = [[math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in gram] for row in rows]  # K = K^T
    return [[math.fsum(a * b for a, b in zip(left, row, strict=True)) for row in rows] for left in half]


def by_rank(rows: Tensor, drop: int) -> Tensor:
    """Return the mean of what is left of each column of fp32 `rows` [n, m] without its `drop` smallest and largest, shape [m].

    With (n - 1) // 2 it is the median; of an even number the mean of the middle two. The bits are the same for any order of
    the rows. Overwrites `rows`.
    """
    n = rows.shape[0]
    lower = torch.empty_like(rows[0])
    for i, j in _network(n):
        torch.minimum(rows[i], rows[j], out=lower)
        torch.maximum(rows[i], rows[j], out=rows[j])
        rows[i].copy_(lower)
    kept = n - 2 * drop
    total = rows[drop].clone()
    for row in rows[drop + 1 : n - drop]:
        total.add_(row)
    return total.div_(kept) if kept > 1 else total


@cache
def _network(n: int) -> tuple[tuple[int, int], ...]:
    """Return the comparisons of Batcher's odd-even merge sort of n elements, in order (Knuth, TAOCP 3, 5.2.2, algorithm M)."""
    found = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (p * 2) == (i + j + k) // (p * 2):
                        found.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(found)


def _square(gram: Gram, i: int, j: int) -> float:
    return gram[i][i] + gram[j][j] - 2 * gram[i][j]


def _cosine(gram: Gram, i: int, j: int) -> float:
    """Return the cosine of two rows; 0 where the length of one cannot be told in fp32, so that it is like no other."""
    if min(gram[i][i], gram[j][j]) < _LEAST_SQUARE:
        return 0.0
    lengths = math.sqrt(max(gram[i][i], 0.0)) * math.sqrt(max(gram[j][j], 0.0))
    return gram[i][j] / lengths if lengths > 0 else 0.0


def _distances(gram: Gram, a: Sequence[float], n: int) -> list[float]:
    """Return the distance of each of the first n rows from sum a_j x_j."""
    towards = [math.fsum(k * share for k, share in zip(row, a, strict=True)) for row in gram]
    own = math.fsum(share * value for share, value in zip(a, towards, strict=True))
    near = _NEAR * math.sqrt(max(median([gram[i][i] for i in range(n)]), 0.0))
    return [max(math.sqrt(max(gram[i][i] - 2 * towards[i] + own, 0.0)), near) for i in range(n)]


def _geometric_median(gram: Gram, prior: Sequence[float]) -> list[float]:
    n = len(prior)
    inner = [row[:n] for row in gram[:n]]
    lengths = [math.sqrt(max(inner[i][i], 0.0)) for i in range(n)]
    most = _LONGEST * median(lengths)
    a = [p * min(1.0, most / length) if length > 0 else p for p, length in zip(prior, lengths, strict=True)]
    for _ in range(_WEISZFELD_STEPS):
        away = _distances(inner, a, n)
        if min(away) <= 0:  # most are zeros
            return a
        w = [p / d for p, d in zip(prior, away, strict=True)]
        total = math.fsum(w)
        now = [share / total for share in w]
        change = max(abs(x - y) for x, y in zip(now, a, strict=True))
        a = now
        if change < _CONVERGED:
            break
    return a


def _centered_clip(gram: Gram, prior: Sequence[float], radius: float) -> tuple[list[float], float]:
    """Return the coefficients, and that of the last merged pseudo-gradient."""
    n = len(prior)
    a = [0.0] * n + [1.0]
    limit = radius
    for _ in range(_CLIP_STEPS):
        away = _distances(gram, a, n)
        limit = limit or median(away)
        c = [p * min(1.0, limit / d) if d > 0 else p for p, d in zip(prior, away, strict=True)]
        rest = 1 - math.fsum(c)
        a = [share * rest + part for share, part in zip(a, [*c, 0.0], strict=True)]
    return a[:n], a[n]


def _multi_krum(gram: Gram, prior: Sequence[float], hostile: int) -> list[float]:
    n = len(prior)
    nearest = n - hostile - 2
    scores = [math.fsum(sorted(max(_square(gram, i, j), 0.0) for j in range(n) if j != i)[:nearest]) for i in range(n)]
    best = set(sorted((i for i in range(n) if prior[i] > 0), key=lambda i: (scores[i], i))[: n - hostile])
    kept = [prior[i] if i in best else 0.0 for i in range(n)]
    total = math.fsum(kept)
    return [share / total for share in kept] if total > 0 else kept
