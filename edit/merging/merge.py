"""Merging one fragment: measure, judge, weigh, average in peer_id order, clip; or roll back.

Owns: the numbers of one fragment of one round (arXiv 2412.07210, section 3.3). Pure: it changes no state. Norms are
taken of what was decoded, never believed; weight 0 never touches the sum. A sharded replica is one contribution in parts, one a
rank; the sum is taken element by element, so with a lossless codec and equal weights no bit depends on how anybody shards.
Must not know: rounds, carriers, optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edit.codecs import codec, decode
from edit.config.run import PenaltyConfig
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.shards import Shard, partition_fault
from edit.merging.heloco import Momentum, correct
from edit.merging.norms import norm, norm_of_pieces, whole_norm
from edit.merging.penalty import NormStatistics, observe, verdicts, weights
from edit.records import EncodedTensor, PeerVerdict, Verdict

__all__ = ["Measured", "MergeRule", "Merged", "ShardPayload", "measure", "merge", "norm", "whole_norm"]


@dataclass(frozen=True, slots=True)
class ShardPayload:
    """What one rank contributes of a fragment. payload: the encoded shard, or what reads it back from the spill."""

    shard: Shard
    payload: EncodedTensor | Callable[[], EncodedTensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """A contribution whose norm the merger has taken, over the whole replica.

    payload: the encoded vector, or what reads it back from the spill, or the parts of a sharded replica by rank. staleness: the
    outer steps committed since the one it was computed against.
    """

    peer_id: str
    inner_steps: int
    tokens: int
    norm: float
    payload: EncodedTensor | Callable[[], EncodedTensor] | tuple[ShardPayload, ...]
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How contributions become one pseudo-gradient, besides their verdicts and shares.

    direction: `mean`, or `rda` (arXiv 2604.21428): the normalised mean of the unit vectors times the mean of the lengths.
    momentum: what each contribution is corrected towards first, None for no correction. damped: see
    `edit.merging.penalty.weights`.
    """

    direction: str = "mean"
    momentum: Momentum | None = None
    damped: bool = False


PLAIN = MergeRule()


@dataclass(frozen=True, slots=True)
class Merged:
    """One fragment of one round, reduced; with the outer state before it, it determines the state after it.

    merged: D after the clip, None is a rollback; statistics: after this round, of its contributors only; merged_norm: ||D||
    before the clip; clip: beta; injection, replaces: what the run above adds, or what theta becomes (see
    `edit.merging.injection`).
    """

    fragment_id: int
    merged: Tensor | None
    verdicts: tuple[PeerVerdict, ...]
    statistics: Mapping[str, NormStatistics]
    merged_norm: float
    clip: float
    injection: Tensor | None = None
    replaces: bool = False


def measure(encoded: EncodedTensor) -> float:
    """||decode(encoded)||_2; NaN or Inf when an element is not finite or the norm overflows. One piece in memory at a time.

    Does not depend on the number of threads. Raises RemoteProtocolError when the bytes are not what they claim to be.
    """
    return norm_of_pieces(codec(encoded.codec).decode_pieces(encoded))


def merge(
    fragment_id: int,
    numel: int,
    contributions: Sequence[Measured],
    before: Mapping[str, NormStatistics],
    config: PenaltyConfig,
    rule: MergeRule = PLAIN,
) -> Merged:
    """Reduce one fragment. before: the contributors' statistics before this round, those without any left out.

    Raises LocalProtocolError for a peer named twice, RemoteProtocolError for a payload of another length and for parts that do
    not make up the fragment.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution.peer_id)
    norms = {contribution.peer_id: contribution.norm for contribution in ordered}
    if len(norms) != len(ordered):
        raise LocalProtocolError(f"fragment {fragment_id}: a peer contributes twice")
    judged = verdicts(norms, before, config)
    shares = weights(
        list(judged.values()),
        list(norms.values()),
        [c.inner_steps for c in ordered],
        [c.tokens for c in ordered],
        config,
        [c.staleness for c in ordered],
        rule.damped,
    )
    peers = tuple(
        PeerVerdict(peer_id=one.peer_id, verdict=judged[one.peer_id], norm=one.norm, weight=share, staleness=one.staleness)
        for one, share in zip(ordered, shares, strict=True)
    )
    after = _statistics_after(norms, judged, before, config)
    kept = [(contribution, share) for contribution, share in zip(ordered, shares, strict=True) if share > 0]
    mean = _average(fragment_id, numel, kept, rule) if kept else None
    size = norm(mean) if mean is not None else 0.0
    if mean is None or not math.isfinite(size):
        return Merged(fragment_id, None, peers, after, 0.0, 1.0)
    beta = _clip(size, config)
    return Merged(fragment_id, mean.mul_(beta) if beta < 1 else mean, peers, after, size, beta)


def _average(fragment_id: int, numel: int, kept: Sequence[tuple[Measured, float]], rule: MergeRule) -> Tensor:
    """sum of w_m * Delta_m in the order given; with `rda` of w_m * Delta_m / G_m, made sum of w_m * G_m long."""
    mean, length, one = torch.zeros(numel, dtype=torch.float32), 0.0, None
    for contribution, share in kept:
        what, size = f"fragment {fragment_id} of peer {contribution.peer_id}", contribution.norm
        if rule.momentum is not None:
            one = torch.zeros_like(mean)
            _add_all(contribution, 1.0, one, what)
            correct(one, rule.momentum)
            size = norm(one)
        length += share * size
        if rule.direction == "rda":
            share = share / size if size > 0 else 0.0
        if one is not None:
            mean.add_(one.mul_(share))
        else:
            _add_all(contribution, share, mean, what)
    if rule.direction == "rda" and (size := norm(mean)) > 0:
        mean.mul_(length / size)
    return mean


def _add_all(contribution: Measured, share: float, mean: Tensor, what: str) -> None:
    """mean += share * decoded, of all parts of a contribution."""
    if not isinstance(contribution.payload, tuple):
        _add(contribution.payload, share, mean, what)
        return
    _check_parts(contribution.payload, mean.numel(), what)
    for part in contribution.payload:
        _add_part(part, share, mean, what)


def _check_parts(parts: Sequence[ShardPayload], numel: int, what: str) -> None:
    fragment = parts[0].shard.fragment if parts else None
    if fragment is None or fragment.numel != numel or any(part.shard.fragment != fragment for part in parts):
        raise RemoteProtocolError(f"{what}: its parts are not of one fragment of {numel} elements")
    if fault := partition_fault(fragment, [part.shard.boxes for part in parts]):
        raise RemoteProtocolError(f"{what}: {fault}")


def _add_part(part: ShardPayload, share: float, mean: Tensor, what: str) -> None:
    """mean[shard] += share * decoded, rounded after the product and after the sum, as for a whole fragment."""
    if part.shard.span is not None:
        start, end = part.shard.span
        _add(part.payload, share, mean[start:end], what)
        return
    weighted = decode(_read(part.payload, part.shard.numel, what)).mul_(share)
    part.shard.add(weighted, mean)


def _add(payload: EncodedTensor | Callable[[], EncodedTensor], share: float, out: Tensor, what: str) -> None:
    encoded = _read(payload, out.numel(), what)
    codec(encoded.codec).decode_add(encoded, out, share)


def _read(payload: EncodedTensor | Callable[[], EncodedTensor], numel: int, what: str) -> EncodedTensor:
    encoded = payload() if callable(payload) else payload
    if encoded.numel != numel:
        raise RemoteProtocolError(f"{what} has {encoded.numel} elements, not {numel}")
    return encoded


def _statistics_after(
    norms: Mapping[str, float],
    judged: Mapping[str, Verdict],
    before: Mapping[str, NormStatistics],
    config: PenaltyConfig,
) -> dict[str, NormStatistics]:
    if not config.enabled:
        return {}
    history = {peer_id: before.get(peer_id, NormStatistics()) for peer_id in norms}
    return {
        peer_id: observe(norms[peer_id], statistics, config) if judged[peer_id] is Verdict.OK else statistics
        for peer_id, statistics in history.items()
    }


def _clip(size: float, config: PenaltyConfig) -> float:
    """beta = min(1, phi / (||D|| + 1e-6)); 1 with the penalty or the clip off."""
    if not config.enabled or config.clip == 0:
        return 1.0
    return min(1.0, config.clip / (size + 1e-6))
