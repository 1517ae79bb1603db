"""The merge of one fragment by a robust rule or by anchors: verdicts, then coefficients in place of the penalty's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    by_anchors,
    by_rank,
    coefficients,
    copies,
    of_rows,
    organisation,
    organisations,
    shared_prior,
)
from edit.records import PeerVerdict, Verdict

__all__ = ["RobustMerger"]

_Row = list[tuple[Measured, float]]  # the contributions of one organisation, and the share of each in their mean


@dataclass(frozen=True, slots=True)
class RobustMerger:
    """Verdicts of the penalty, then D by a rule of `edit.merging.robust`, then the penalty's clip; too few: a rollback.

    Contributions of one organisation are averaged first, and count as one. With anchors D is by
    `edit.merging.robust.by_anchors`; no anchor among the good ones: a rollback.

    `PeerVerdict.weight` is the share among contributions made equally long; of a rule that goes element by element 1/n. A
    fragment of buffers is the element-wise median of those that are present, finite and not stale; with anchors, of theirs.
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
        ordered = sorted(contributions, key=lambda contribution: contribution.peer_id)
        norms = {one.peer_id: one.norm for one in ordered}
        if len(norms) != len(ordered):
            raise LocalProtocolError(f"fragment {fragment.fragment_id}: a peer contributes twice")
        if fragment.buffers:
            present = {one.peer_id: Verdict.OK if math.isfinite(one.norm) else Verdict.NONFINITE for one in ordered}
            rows = _rows([one for one in ordered if present[one.peer_id] is Verdict.OK and one.staleness == 0])
            if self.robust.anchored:
                rows = [row for row in rows if self._is_anchor(row)]
            return self._by_element(fragment, ordered, rows, present, {}, (len(rows) - 1) // 2, clips=False)
        judged, after = judge_round(norms, {one.peer_id: one.inner_steps for one in ordered}, before, self.penalty)
        good = [one for one in ordered if judged[one.peer_id] is Verdict.OK]
        fresh = [freshness(one.staleness, self.penalty.staleness) for one in good]
        rows = _rows(good, fresh)
        anchors = [self._is_anchor(row) for row in rows]
        if len(rows) < self.robust.least or (self.robust.anchored and not any(anchors)):
            return Merged(
                fragment.fragment_id, None, tuple(one.judged(judged[one.peer_id]) for one in ordered), after, 0.0, 1.0
            )
        known: list[Measured | _LastMerged] = [*good, *([_LastMerged(rule.last)] if rule.last is not None else [])]
        inner = gram([_pieces(fragment, one) for one in known], fragment.numel)
        squares = [math.fsum(share * inner[i][i] for i, share in enumerate(_over(row, good)) if share) for row in rows]
        if len(rows) < len(good):
            inner = of_rows(inner, [_over(row, good) for row in rows])
        groups, replayed = copies(inner, len(rows), rule.outer_step, self.robust.hostile)
        for i in {*replayed, *(i for group in groups for i in group)}:
            judged |= {one.peer_id: Verdict.COPIED for one, _ in rows[i]}
        if self.robust.by_element:
            left_out = {*replayed, *(i for group in groups for i in group[1:])}
            counted = [row for i, row in enumerate(rows) if i not in left_out]
            drop = self.robust.hostile if self.robust.rule == "trimmed_mean" else (len(counted) - 1) // 2
            return self._by_element(fragment, ordered, counted, judged, after, drop, clips=True)
        weight = {one.peer_id: share for one, share in zip(good, fresh, strict=True)}
        mean_fresh = [math.fsum(weight[one.peer_id] for one, _ in row) / len(row) for row in rows]
        prior = shared_prior(_normalised(mean_fresh), groups, replayed)
        if rule.last is None:  # there are zeros in its place
            inner = [[*row, 0.0] for row in inner] + [[0.0] * (len(rows) + 1)]
        if self.robust.anchored:
            of_anchors = [share if is_one else 0.0 for share, is_one in zip(mean_fresh, anchors, strict=True)]
            found = by_anchors(inner, prior, _normalised(of_anchors), squares)
        else:
            found = coefficients(inner, prior, self.robust)
        shares = {one.peer_id: a * part for row, a in zip(rows, found.weights, strict=True) for one, part in row}
        for peer_id, share in shares.items():
            if share == 0 and judged[peer_id] is Verdict.OK and any(shares.values()):
                judged[peer_id] = Verdict.OUTLIER
        scales = {one.peer_id: s for row, s in zip(rows, found.scales, strict=True) for one, _ in row}
        kept = [(one, shares[one.peer_id] * scales[one.peer_id]) for one in good if shares[one.peer_id] > 0]
        mean = weighted_mean(fragment, kept, replace(rule, momentum=None)) if kept else None
        if mean is not None and rule.last is not None and found.last:
            for part in parts(fragment.numel):
                mean[part].add_(rule.last[part].float().mul_(found.last))
        peers = tuple(one.judged(judged[one.peer_id], shares.get(one.peer_id, 0.0)) for one in ordered)
        return self._merged(fragment, mean, peers, after, clips=True)

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


def _rows(good: Sequence[Measured], weights: Sequence[float] | None = None) -> list[_Row]:
    """Return the mean of each organisation: its contributions, and the share of each."""
    weight = weights or [1.0] * len(good)
    found = []
    for group in organisations([one.peer_id for one in good]):
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
    found = torch.zeros(len(over), window.shape[1])
    for row, shares in zip(found, over, strict=True):
        for contribution, share in zip(window, shares, strict=True):
            if share:
                row.add_(contribution * share)
    return found


@dataclass(frozen=True, slots=True)
class _LastMerged:
    """The last merged pseudo-gradient, as a further row."""

    vector: Tensor


def _pieces(fragment: FragmentSpec, row: Measured | _LastMerged) -> Iterator[Tensor]:
    if isinstance(row, Measured):
        return pieces(fragment, row)
    vector = row.vector
    return (vector[part].to(torch.float32) for part in parts(fragment.numel))
