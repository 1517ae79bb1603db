"""The merge of one fragment by a robust rule, by anchors or by trust: verdicts, then coefficients in place of weights.

With robust.scope = "model" there is one set of coefficients for all fragments of an outer step: `RobustMerger.choose` looks at
all of them, before any is merged by `RobustMerger.merge_chosen`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edit.codecs.base import new_vector, parts
from edit.config.algorithm import PenaltyConfig
from edit.config.robust import RobustConfig
from edit.errors import LocalProtocolError
from edit.fragments.schema import FragmentSpec
from edit.merging.gram import gram, windows
from edit.merging.merge import Measured, Merged, MergeRule, clip_factor, pieces, weighted_mean
from edit.merging.norms import norm
from edit.merging.penalty import NormStatistics, freshness, judge_round
from edit.merging.robust import (
    Gram,
    by_anchors,
    by_rank,
    coefficients,
    copies,
    of_rows,
    organisation,
    organisations,
    shared_prior,
)
from edit.merging.trust import factors
from edit.records import PeerVerdict, Verdict

__all__ = ["Chosen", "Gathered", "RobustMerger"]

_LONGEST = 2.0**62  # inner products of contributions up to here are finite in fp32, whatever the order of their sums

_Row = list[tuple[Measured, float]]  # the contributions of one organisation, and the share of each in their mean


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that is there of one fragment, before it is merged."""

    fragment: FragmentSpec
    contributions: Sequence[Measured]
    # The norm statistics before this round by peer_id.
    before: Mapping[str, NormStatistics]
    rule: MergeRule


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """D = sum over the peers of shares x scales x Delta + last x (the last merged pseudo-gradient)."""

    # By peer_id, of all that were weighed: what is published, and what made them equally long.
    shares: Mapping[str, float]
    scales: Mapping[str, float]
    last: float
    copied: frozenset[str]
    harmful: frozenset[str]  # who is not trusted

    def verdict(self, peer_id: str) -> Verdict:
        """Return the verdict of a peer that was OK until now."""
        if peer_id in self.copied:
            return Verdict.COPIED
        if peer_id in self.harmful:
            return Verdict.HARMFUL
        if self.shares.get(peer_id) == 0 and any(self.shares.values()):
            return Verdict.OUTLIER
        return Verdict.OK


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the contributions to an outer step count for, in all of its fragments (robust.scope = "model")."""

    # By fragment that is not of buffers, then by peer_id.
    verdicts: Mapping[int, Mapping[str, Verdict]]
    # Likewise, after the round.
    statistics: Mapping[int, Mapping[str, NormStatistics]]
    # Whose contributions are weighed.
    counted: frozenset[str]
    # None: too few are, and nothing is merged.
    coefficients: _Coefficients | None


@dataclass(frozen=True, slots=True)
class RobustMerger:
    """Verdicts of the penalty, then D by a rule of `edit.merging.robust`, then the penalty's clip; too few: a rollback.

    One longer than 2^62 is NONFINITE: its inner products with others may overflow. Coefficients that are not finite are a
    rollback. Contributions of one organisation are averaged first, and count as one. With anchors D is by
    `edit.merging.robust.by_anchors`; no anchor among the good ones: a rollback. With `trust = "loss"` the prior of each is
    multiplied by `edit.merging.trust.factors`, and without a rule it is the weight.

    `PeerVerdict.weight` is the share among contributions made equally long; of a rule that goes element by element 1/n. A
    fragment of buffers is the element-wise median of those that are present, finite and not stale; with anchors, of theirs;
    with `trust = "loss"`, of those whose prior is not 0.
    """

    penalty: PenaltyConfig
    robust: RobustConfig

    def merge(
        self,
        fragment: FragmentSpec,
        contributions: Sequence[Measured],
        before: Mapping[str, NormStatistics],
        rule: MergeRule,
    ) -> Merged:
        """See `edit.merging.mergers.Merger.merge`."""
        ordered = _ordered(fragment, contributions)
        if fragment.buffers:
            return self._of_buffers(fragment, ordered, rule)
        norms = _measurable_norms(ordered)
        judged, after = judge_round(norms, {one.peer_id: one.inner_steps for one in ordered}, before, self.penalty)
        good = [one for one in ordered if judged[one.peer_id] is Verdict.OK]
        rows = _rows(good, self._fresh(good))
        if self._are_too_few(rows):
            return self._rolled_back(fragment, ordered, judged, after)
        inner: Gram = gram([_pieces(fragment, one) for one in _with_last(good, rule)], fragment.numel)
        if not self.robust.by_element:
            found = self._coefficients(good, inner, rule, has_last=rule.last is not None)
            judged |= {one.peer_id: found.verdict(one.peer_id) for one in good}
            return self._combined(fragment, ordered, good, judged, after, found, rule)
        inner = _pooled(inner, rows, good)
        groups, replayed = copies(inner, len(rows), rule.outer_step, self.robust.hostile)
        for i in {*replayed, *(i for group in groups for i in group)}:
            judged |= {one.peer_id: Verdict.COPIED for one, _ in rows[i]}
        left_out = {*replayed, *(i for group in groups for i in group[1:])}
        counted = [row for i, row in enumerate(rows) if i not in left_out]
        drop = self.robust.hostile if self.robust.rule == "trimmed_mean" else (len(counted) - 1) // 2
        return self._by_element(fragment, ordered, counted, judged, after, drop, clips=True)

    def choose(self, gathered: Mapping[int, Gathered], rejected: Collection[str] = ()) -> Chosen:
        """Weigh the contributions to all fragments of an outer step, each as one vector: the inner products are added up. Pure.

        gathered: by fragment, of the same peers in each. rejected: the peers that do not count.

        One that is not finite, or anomalous, in any fragment counts in none; one that is idle in all of them likewise.
        Fragments of buffers say nothing about the others. One piece of each contribution is in memory at a time. Raises as
        `edit.merging.mergers.Merger.merge`; LocalProtocolError unless each peer has each fragment once.
        """
        of_weights = [gathered[i] for i in sorted(gathered) if not gathered[i].fragment.buffers]
        verdicts, statistics = dict[int, Mapping[str, Verdict]](), dict[int, Mapping[str, NormStatistics]]()
        sent = [_ordered(each.fragment, each.contributions) for each in of_weights]
        sent = [[one for one in ordered if one.peer_id not in rejected] for ordered in sent]
        if any([one.peer_id for one in each] != [one.peer_id for one in sent[0]] for each in sent):
            raise LocalProtocolError("a merge by the whole model needs each fragment of each contribution, once")
        for each, ordered in zip(of_weights, sent, strict=True):
            norms = _measurable_norms(ordered)
            steps = {one.peer_id: one.inner_steps for one in ordered}
            i = each.fragment.fragment_id
            verdicts[i], statistics[i] = judge_round(norms, steps, each.before, self.penalty)
        everybody = sent[0] if sent else []
        good = [one for one in everybody if _is_row([judged[one.peer_id] for judged in verdicts.values()])]
        counted = frozenset(one.peer_id for one in good)
        if self._are_too_few(_rows(good, self._fresh(good))):
            return Chosen(verdicts, statistics, counted, None)
        has_last, grams = any(each.rule.last is not None for each in of_weights), list[Gram]()
        for each, ordered in zip(of_weights, sent, strict=True):
            known = _with_last([one for one in ordered if one.peer_id in counted], each.rule)
            inner: Gram = gram([_pieces(each.fragment, one) for one in known], each.fragment.numel)
            grams.append(inner if not has_last or each.rule.last is not None else _with_zeros(inner))
        size = range(len(grams[0]))
        whole = [[math.fsum(inner[i][j] for inner in grams) for j in size] for i in size]
        found = self._coefficients(good, whole, of_weights[0].rule, has_last=has_last)
        return Chosen(verdicts, statistics, counted, found)

    def merge_chosen(
        self, fragment: FragmentSpec, contributions: Sequence[Measured], chosen: Chosen, rule: MergeRule
    ) -> Merged:
        """Merge one fragment by what `choose` found. Pure. Raises as `edit.merging.merge.weighted_mean`.

        contributions: as they were given to it. Who counts in no fragment because of another one is REJECTED here.
        """
        ordered = _ordered(fragment, contributions)
        if fragment.buffers:
            return self._of_buffers(fragment, ordered, rule)
        found, after = chosen.coefficients, chosen.statistics[fragment.fragment_id]
        judged = {one.peer_id: Verdict.REJECTED for one in ordered} | dict(chosen.verdicts[fragment.fragment_id])
        good = [one for one in ordered if one.peer_id in chosen.counted and judged[one.peer_id] is Verdict.OK]
        for peer_id, verdict in judged.items():
            if verdict is Verdict.OK and peer_id not in chosen.counted:
                judged[peer_id] = Verdict.REJECTED
        if found is None:
            return self._rolled_back(fragment, ordered, judged, after)
        judged |= {one.peer_id: found.verdict(one.peer_id) for one in good}
        return self._combined(fragment, ordered, good, judged, after, found, rule)

    def _fresh(self, good: Sequence[Measured]) -> list[float]:
        return [freshness(one.staleness, self.penalty.staleness) for one in good]

    def _are_too_few(self, rows: Sequence[_Row]) -> bool:
        return len(rows) < self.robust.least or (self.robust.anchored and not any(map(self._is_anchor, rows)))

    def _trusted(self, good: Sequence[Measured], rule: MergeRule) -> list[float]:
        """Return what multiplies the prior of each: 0 for the verdict HARMFUL."""
        return factors([one.peer_id for one in good], rule.trust) if self.robust.scored else [1.0] * len(good)

    def _coefficients(self, good: Sequence[Measured], inner: Gram, rule: MergeRule, *, has_last: bool) -> _Coefficients:
        """Weigh contributions as their inner products and the trust in their peers say.

        has_last: the last row is the last merged pseudo-gradient's.
        """
        fresh, trusted = self._fresh(good), self._trusted(good, rule)
        weighed = [share * factor for share, factor in zip(fresh, trusted, strict=True)]
        harmful = frozenset(one.peer_id for one, factor in zip(good, trusted, strict=True) if factor == 0)
        rows = _rows(good, weighed, fresh)
        squares = [math.fsum(share * inner[i][i] for i, share in enumerate(_over(row, good)) if share) for row in rows]
        inner = _pooled(inner, rows, good)
        groups, replayed = copies(inner, len(rows), rule.outer_step, self.robust.hostile)
        copied = {one.peer_id for i in {*replayed, *(i for group in groups for i in group)} for one, _ in rows[i]}
        weight = {one.peer_id: share for one, share in zip(good, weighed, strict=True)}
        mean_fresh = [math.fsum(weight[one.peer_id] for one, _ in row) / len(row) for row in rows]
        prior = shared_prior(_normalised(mean_fresh), groups, replayed)
        nothing = _Coefficients(dict.fromkeys(weight, 0.0), dict.fromkeys(weight, 1.0), 0.0, frozenset(copied), harmful)
        if not any(prior):  # all that is trusted repeats the last merged one
            return nothing
        if not has_last:
            inner = _with_zeros(inner)
        if self.robust.anchored:
            of_anchors = [share if self._is_anchor(row) else 0.0 for share, row in zip(mean_fresh, rows, strict=True)]
            found = by_anchors(inner, prior, _normalised(of_anchors), squares)
        else:
            found = coefficients(inner, prior, self.robust)
        if not all(map(math.isfinite, (*found.weights, *found.scales, found.last))):
            return nothing
        shares = {one.peer_id: a * part for row, a in zip(rows, found.weights, strict=True) for one, part in row}
        scales = {one.peer_id: s for row, s in zip(rows, found.scales, strict=True) for one, _ in row}
        return _Coefficients(shares, scales, found.last, frozenset(copied), harmful)

    def _combined(
        self,
        fragment: FragmentSpec,
        ordered: Sequence[Measured],
        good: Sequence[Measured],
        judged: Mapping[str, Verdict],
        after: Mapping[str, NormStatistics],
        found: _Coefficients,
        rule: MergeRule,
    ) -> Merged:
        """Merge the good contributions to a fragment by their coefficients."""
        shares = {one.peer_id: found.shares[one.peer_id] for one in good}
        kept = [(one, shares[one.peer_id] * found.scales[one.peer_id]) for one in good if shares[one.peer_id] > 0]
        mean = weighted_mean(fragment, kept, replace(rule, momentum=None)) if kept else None
        if mean is not None and rule.last is not None and found.last:
            for part in parts(fragment.numel):
                mean[part].add_(rule.last[part].float().mul_(found.last))
        peers = tuple(one.judged(judged[one.peer_id], shares.get(one.peer_id, 0.0)) for one in ordered)
        return self._merged(fragment, mean, peers, after, clips=True)

    def _of_buffers(self, fragment: FragmentSpec, ordered: Sequence[Measured], rule: MergeRule) -> Merged:
        present = {one.peer_id: Verdict.OK if math.isfinite(one.norm) else Verdict.NONFINITE for one in ordered}
        here = [one for one in ordered if present[one.peer_id] is Verdict.OK and one.staleness == 0]
        trusted = self._trusted(here, rule)
        present |= {one.peer_id: Verdict.HARMFUL for one, factor in zip(here, trusted, strict=True) if factor == 0}
        rows = _rows([one for one in here if present[one.peer_id] is Verdict.OK])
        if self.robust.anchored:
            rows = [row for row in rows if self._is_anchor(row)]
        return self._by_element(fragment, ordered, rows, present, {}, (len(rows) - 1) // 2, clips=False)

    @staticmethod
    def _rolled_back(
        fragment: FragmentSpec,
        ordered: Sequence[Measured],
        judged: Mapping[str, Verdict],
        after: Mapping[str, NormStatistics],
    ) -> Merged:
        peers = tuple(one.judged(judged[one.peer_id]) for one in ordered)
        return Merged(fragment.fragment_id, None, peers, after, 0.0, 1.0)

    def _is_anchor(self, row: _Row) -> bool:
        return organisation(row[0][0].peer_id) in self.robust.anchors

    def _by_element(
        self,
        fragment: FragmentSpec,
        ordered: Sequence[Measured],
        rows: Sequence[_Row],
        judged: Mapping[str, Verdict],
        after: Mapping[str, NormStatistics],
        drop: int,
        *,
        clips: bool,
    ) -> Merged:
        """Merge rows element by element, without the `drop` smallest and largest."""
        mean = None
        if rows and len(rows) > 2 * drop:
            mean = new_vector(fragment.numel, zeros=False)
            of = [one for row in rows for one, _ in row]
            over = [_over(row, of) for row in rows]
            for part, window in windows([pieces(fragment, one) for one in of], fragment.numel):
                mean[part] = by_rank(window if len(rows) == len(of) else _combined(window, over), drop)
        shares = {one.peer_id: share / len(rows) for row in rows for one, share in row} if mean is not None else {}
        peers = tuple(one.judged(judged[one.peer_id], shares.get(one.peer_id, 0.0)) for one in ordered)
        return self._merged(fragment, mean, peers, after, clips=clips)

    def _merged(
        self,
        fragment: FragmentSpec,
        mean: Tensor | None,
        peers: tuple[PeerVerdict, ...],
        after: Mapping[str, NormStatistics],
        *,
        clips: bool,
    ) -> Merged:
        size = norm(mean) if mean is not None else 0.0
        if mean is None or not math.isfinite(size):
            return Merged(fragment.fragment_id, None, peers, after, size if clips else 0.0, 1.0)
        beta = clip_factor(size, self.penalty) if clips else 1.0
        return Merged(fragment.fragment_id, mean.mul_(beta) if beta < 1 else mean, peers, after, size, beta)


def _ordered(fragment: FragmentSpec, contributions: Sequence[Measured]) -> list[Measured]:
    """Return the contributions in peer_id order. Raises LocalProtocolError."""
    ordered = sorted(contributions, key=lambda contribution: contribution.peer_id)
    if len({one.peer_id for one in ordered}) != len(ordered):
        raise LocalProtocolError(f"fragment {fragment.fragment_id}: a peer contributes twice")
    return ordered


def _measurable_norms(ordered: Sequence[Measured]) -> dict[str, float]:
    """Return the norm of each by peer_id, as a verdict is given: infinite where its inner products may be."""
    return {one.peer_id: one.norm if one.norm <= _LONGEST else math.inf for one in ordered}


def _is_row(verdicts: Sequence[Verdict]) -> bool:
    """Whether a contribution with these verdicts, one for each fragment, can be compared with others as one vector."""
    return set(verdicts) <= {Verdict.OK, Verdict.IDLE} and Verdict.OK in verdicts


def _rows(
    good: Sequence[Measured], weights: Sequence[float] | None = None, otherwise: Sequence[float] | None = None
) -> list[_Row]:
    """Return the mean of each organisation: its contributions, and the share of each. otherwise: weights where all are 0."""
    found = []
    for group in organisations([one.peer_id for one in good]):
        weight = weights or [1.0] * len(good)
        if otherwise is not None and not any(weight[i] for i in group):
            weight = otherwise
        total = math.fsum(weight[i] for i in group)
        found.append([(good[i], weight[i] / total) for i in group])
    return found


def _normalised(shares: Sequence[float]) -> list[float]:
    """Return the shares, in all 1."""
    whole = math.fsum(shares)
    return [share / whole for share in shares]


def _over(row: _Row, of: Sequence[Measured]) -> list[float]:
    """Return the share of each of these contributions in a row."""
    shares = {one.peer_id: share for one, share in row}
    return [shares.get(one.peer_id, 0.0) for one in of]


def _combined(window: Tensor, over: Sequence[Sequence[float]]) -> Tensor:
    """Return fp32 [rows, m] of fp32 contributions [n, m], added up in their order."""
    found = torch.zeros(len(over), window.shape[1], dtype=torch.float32, device="cpu")
    for row, shares in zip(found, over, strict=True):
        for contribution, share in zip(window, shares, strict=True):
            if share:
                row.add_(contribution * share)
    return found


def _pooled(inner: Gram, rows: Sequence[_Row], good: Sequence[Measured]) -> Gram:
    """Return the inner products of the rows, by those of the contributions that they are means of."""
    return of_rows(inner, [_over(row, good) for row in rows]) if len(rows) < len(good) else inner


def _with_zeros(inner: Gram) -> Gram:
    """Return the inner products with those of a further row of zeros."""
    return [[*row, 0.0] for row in inner] + [[0.0] * (len(inner) + 1)]


@dataclass(frozen=True, slots=True)
class _LastMerged:
    """The last merged pseudo-gradient, as a further row."""

    vector: Tensor


def _pieces(fragment: FragmentSpec, row: Measured | _LastMerged) -> Iterator[Tensor]:
    if isinstance(row, Measured):
        return pieces(fragment, row)
    vector = row.vector
    return (vector[part].to(torch.float32) for part in parts(fragment.numel))


def _with_last(good: Sequence[Measured], rule: MergeRule) -> list[Measured | _LastMerged]:
    """Return the contributions and, where there is one, the last merged pseudo-gradient."""
    return [*good, *([_LastMerged(rule.last)] if rule.last is not None else [])]
