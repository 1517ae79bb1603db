"""The merge of one fragment by a robust rule: verdicts as ever, then coefficients in place of the penalty's weights."""

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
from edit.merging.robust import by_rank, coefficients, copies, shared_prior
from edit.records import PeerVerdict, Verdict

__all__ = ["RobustMerger"]


@dataclass(frozen=True, slots=True)
class RobustMerger:
    """Verdicts of the penalty, then D by a rule of `edit.merging.robust`, then the penalty's clip; too few: a rollback.

    `PeerVerdict.weight` is the share among contributions made equally long; of a rule that goes element by element 1/n. A
    fragment of buffers is the element-wise median of those that are present, finite and not stale.
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
            counted = [one for one in ordered if present[one.peer_id] is Verdict.OK and one.staleness == 0]
            return self._by_element(fragment, ordered, counted, present, {}, (len(counted) - 1) // 2, clips=False)
        judged, after = judge_round(norms, {one.peer_id: one.inner_steps for one in ordered}, before, self.penalty)
        good = [one for one in ordered if judged[one.peer_id] is Verdict.OK]
        if len(good) < self.robust.least:
            return Merged(
                fragment.fragment_id, None, tuple(one.judged(judged[one.peer_id]) for one in ordered), after, 0.0, 1.0
            )
        known: list[Measured | _LastMerged] = [*good, *([_LastMerged(rule.last)] if rule.last is not None else [])]
        inner = gram([_pieces(fragment, one) for one in known], fragment.numel)
        groups, replayed = copies(inner, len(good), rule.outer_step, self.robust.hostile)
        for i in {*replayed, *(i for group in groups for i in group)}:
            judged[good[i].peer_id] = Verdict.COPIED
        if self.robust.by_element:
            left_out = {*replayed, *(i for group in groups for i in group[1:])}
            counted = [one for i, one in enumerate(good) if i not in left_out]
            drop = self.robust.hostile if self.robust.rule == "trimmed_mean" else (len(counted) - 1) // 2
            return self._by_element(fragment, ordered, counted, judged, after, drop, clips=True)
        if rule.last is None:  # there are zeros in its place
            inner = [[*row, 0.0] for row in inner] + [[0.0] * (len(good) + 1)]
        fresh = [freshness(one.staleness, self.penalty.staleness) for one in good]
        prior = shared_prior([share / math.fsum(fresh) for share in fresh], groups, replayed)
        found = coefficients(inner, prior, self.robust)
        shares = {one.peer_id: share for one, share in zip(good, found.weights, strict=True)}
        for peer_id, share in shares.items():
            if share == 0 and judged[peer_id] is Verdict.OK:
                judged[peer_id] = Verdict.OUTLIER
        kept = [(one, a * s) for one, a, s in zip(good, found.weights, found.scales, strict=True) if a > 0]
        mean = weighted_mean(fragment, kept, replace(rule, momentum=None)) if kept else None
        if mean is not None and rule.last is not None and found.last:
            for part in parts(fragment.numel):
                mean[part].add_(rule.last[part].float().mul_(found.last))
        return self._merged(
            fragment,
            mean,
            tuple(one.judged(judged[one.peer_id], shares.get(one.peer_id, 0.0)) for one in ordered),
            after,
            clips=True,
        )

    def _by_element(
        self,
        fragment: FragmentSpec,
        ordered: Sequence[Measured],
        counted: Sequence[Measured],
        judged: Mapping[str, Verdict],
        after: Mapping[str, NormStatistics],
        drop: int,
        *,
        clips: bool,
    ) -> Merged:
        """Merge what is counted element by element, without the `drop` smallest and largest."""
        mean = None
        if counted and len(counted) > 2 * drop:
            mean = new_vector(fragment.numel, zeros=False)
            for part, rows in windows([pieces(fragment, one) for one in counted], fragment.numel):
                mean[part] = by_rank(rows, drop)
        shares = {one.peer_id: 1 / len(counted) for one in counted} if mean is not None else {}
        return self._merged(
            fragment,
            mean,
            tuple(one.judged(judged[one.peer_id], shares.get(one.peer_id, 0.0)) for one in ordered),
            after,
            clips=clips,
        )

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


@dataclass(frozen=True, slots=True)
class _LastMerged:
    """The last merged pseudo-gradient, as a further row."""

    vector: Tensor


def _pieces(fragment: FragmentSpec, row: Measured | _LastMerged) -> Iterator[Tensor]:
    if isinstance(row, Measured):
        return pieces(fragment, row)
    vector = row.vector
    return (vector[part].to(torch.float32) for part in parts(fragment.numel))
