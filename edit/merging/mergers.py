"""Which contributions are merged, and how: the Admission before a merge, and the Merger.

Both are seams. A policy (a bound on claimed tokens, a signature to check) is another Admission; a robust rule is another Merger
(`edit.merging.robust_merger`), or, as a plug-in, another way to combine what has weight. `merger` and `admission` choose them
from the run's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from edit import plugins
from edit.config.run import OuterConfig, PenaltyConfig, RunConfig
from edit.errors import LocalProtocolError, PluginError
from edit.fragments.schema import FragmentSpec
from edit.merging.merge import Measured, Merged, MergeRule, clip_factor, decoded, weighted_mean
from edit.merging.norms import norm
from edit.merging.penalty import NormStatistics, judge_round, weights
from edit.merging.robust_merger import RobustMerger
from edit.records import PeerVerdict, Verdict

__all__ = ["Admission", "AdmitAll", "Admitted", "EditMerger", "Merger", "Rejected", "Screened", "admission", "merger", "screen"]


class Merger(Protocol):
    """Turns the contributions to one fragment of one round into one pseudo-gradient."""

    def merge(
        self,
        fragment: FragmentSpec,
        contributions: Sequence[Measured],
        before: Mapping[str, NormStatistics],
        rule: MergeRule,
    ) -> Merged:
        """Merge one fragment. Pure; the same contributions in any order give the same bits.

        before: the norm statistics before this round by peer_id; a peer without any is left out.
        Raises LocalProtocolError for a peer named twice, RemoteProtocolError for a payload of another length and for shards
        that do not make up the fragment.
        """
        ...


Combine = Callable[[FragmentSpec, Sequence[tuple[Measured, float]], MergeRule], Tensor]


@dataclass(frozen=True, slots=True)
class EditMerger:
    """EDiT's merge (arXiv 2412.07210, section 3.3): verdicts, weights, weighted mean, clip; or rollback when no weight is left.

    With `penalty.enabled = false` it is DiLoCo's mean. A fragment of buffers is always the plain mean.
    """

    config: PenaltyConfig
    # What makes one vector of the contributions that have weight.
    combine: Combine = weighted_mean

    def merge(
        self,
        fragment: FragmentSpec,
        contributions: Sequence[Measured],
        before: Mapping[str, NormStatistics],
        rule: MergeRule,
    ) -> Merged:
        """See `Merger.merge`."""
        config, fragment_id = self.config, fragment.fragment_id
        ordered = sorted(contributions, key=lambda contribution: contribution.peer_id)
        norms = {contribution.peer_id: contribution.norm for contribution in ordered}
        if len(norms) != len(ordered):
            raise LocalProtocolError(f"fragment {fragment_id}: a peer contributes twice")
        if fragment.buffers:
            return _plain_mean(fragment, ordered, rule)
        judged, after = judge_round(norms, {one.peer_id: one.inner_steps for one in ordered}, before, config)
        shares = weights(
            list(judged.values()),
            list(norms.values()),
            [c.inner_steps for c in ordered],
            [c.tokens for c in ordered],
            config,
            [c.staleness for c in ordered],
            rule.damped,
        )
        peers = tuple(one.judged(judged[one.peer_id], share) for one, share in zip(ordered, shares, strict=True))
        kept = [(contribution, share) for contribution, share in zip(ordered, shares, strict=True) if share > 0]
        mean = self.combine(fragment, kept, rule) if kept else None
        size = norm(mean) if mean is not None else 0.0
        if mean is None or not math.isfinite(size):
            return Merged(fragment_id, None, peers, after, 0.0, 1.0)
        beta = clip_factor(size, config)
        return Merged(fragment_id, mean.mul_(beta) if beta < 1 else mean, peers, after, size, beta)


def _plain_mean(fragment: FragmentSpec, ordered: Sequence[Measured], rule: MergeRule) -> Merged:
    """Merge a fragment of buffers: the mean of the finite contributions, without weights, clip or statistics.

    A pseudo-gradient against older buffers does not say what the peer's buffers are now: it counts only as present.
    """
    judged = {one.peer_id: Verdict.OK if math.isfinite(one.norm) else Verdict.NONFINITE for one in ordered}
    present = [judged[one.peer_id] is Verdict.OK and one.staleness == 0 for one in ordered]
    shares = [1 / sum(present) if counts else 0.0 for counts in present]
    peers = tuple(one.judged(judged[one.peer_id], share) for one, share in zip(ordered, shares, strict=True))
    if not any(present):
        return Merged(fragment.fragment_id, None, peers, {}, 0.0, 1.0)
    mean = weighted_mean(fragment, [(one, share) for one, share in zip(ordered, shares, strict=True) if share > 0], rule)
    size = norm(mean)
    return Merged(fragment.fragment_id, mean if math.isfinite(size) else None, peers, {}, size, 1.0)


def merger(config: RunConfig) -> Merger:
    """Return the merger that the run's configuration chooses.

    Raises ConfigError for a plug-in that is not admitted, PluginError.
    """
    if config.robust.enabled:
        return RobustMerger(config.penalty, config.robust)
    plugin, made = plugins.make("mergers", config.outer.merger, config.outer)
    return EditMerger(config.penalty, made if plugin.built_in else _Combined(plugin, made))


@plugins.built_in("mergers", "mean")
def _mean(config: OuterConfig) -> Combine:
    return weighted_mean


@dataclass(frozen=True, slots=True)
class _Combined:
    """A plug-in's way to combine contributions. Verdicts, weights, the clip and the check for what is not finite stay."""

    plugin: plugins.Plugin
    made: Any

    def __call__(self, fragment: FragmentSpec, kept: Sequence[tuple[Measured, float]], rule: MergeRule) -> Tensor:
        """Return the plug-in's vector for `kept`, which is in peer_id order. Raises PluginError."""
        readers = [_Reader(fragment, contribution) for contribution, _ in kept]
        with plugins.blame(self.plugin):
            merged = self.made.combine(readers, [weight for _, weight in kept], fragment)
        if not isinstance(merged, Tensor) or merged.dtype != torch.float32 or tuple(merged.shape) != (fragment.numel,):
            found = f"{merged.dtype} {list(merged.shape)}" if isinstance(merged, Tensor) else type(merged).__name__
            raise PluginError(f"{self.plugin}: combine() must be torch.float32 [{fragment.numel}], not {found}")
        if not bool(merged.isfinite().all()):
            raise PluginError(f"{self.plugin}: combine() is not finite")
        return merged.detach().cpu().contiguous()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Called, it decodes one contribution: a new fp32 tensor on the CPU, shape [fragment.numel]."""

    fragment: FragmentSpec
    contribution: Measured

    def __call__(self) -> Tensor:
        return decoded(self.fragment, self.contribution)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The contribution may be merged."""

    # As it counts: a policy may have bounded what the peer claims.
    contribution: Measured


@dataclass(frozen=True, slots=True)
class Rejected:
    """The contribution is not merged."""

    # One line that says why, for the log.
    reason: str


class Admission(Protocol):
    """Decides whether a peer's measured contribution to one fragment may be merged, before any verdict on its norm."""

    def admit(self, fragment: FragmentSpec, contribution: Measured) -> Admitted | Rejected:
        """Decide. Pure. A rejected contribution has the verdict REJECTED and no weight."""
        ...


class AdmitAll:
    """Admits every contribution as it is."""

    def admit(self, fragment: FragmentSpec, contribution: Measured) -> Admitted | Rejected:
        """See `Admission.admit`."""
        return Admitted(contribution)


@dataclass(frozen=True, slots=True)
class Screened:
    """What an admission says of all contributions to one fragment."""

    admitted: list[Measured]
    # The verdicts of the others.
    rejected: list[PeerVerdict]
    # One line for each of them, for the log.
    reasons: list[str]

    def and_rejected(self, merged: Merged) -> Merged:
        """Return what was merged of the admitted, with the verdicts of the rejected among the others."""
        verdicts = sorted((*merged.verdicts, *self.rejected), key=lambda verdict: verdict.peer_id)
        return replace(merged, verdicts=tuple(verdicts))


def screen(policy: Admission, fragment: FragmentSpec, contributions: Sequence[Measured]) -> Screened:
    """Ask the admission about each contribution to one fragment."""
    screened = Screened([], [], [])
    for one in contributions:
        match policy.admit(fragment, one):
            case Admitted(contribution):
                screened.admitted.append(contribution)
            case Rejected(reason):
                screened.reasons.append(f"{one.peer_id}: {reason}")
                screened.rejected.append(one.judged(Verdict.REJECTED))
    return screened


def admission(config: RunConfig) -> Admission:
    """Return the admission that the run's configuration chooses. There is no setting for it yet: everything is admitted."""
    return AdmitAll()
