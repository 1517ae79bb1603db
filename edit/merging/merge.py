"""The numbers of a merge: norms of what was decoded, the weighted mean in peer_id order, the clip. Pure functions.

Norms are taken of what was decoded, never believed; a contribution with weight 0 never touches the sum. A sharded replica is
one contribution in shards, one per rank. The sum is taken element by element, so with a lossless codec and equal weights no bit
depends on how anybody shards. Source: arXiv 2412.07210, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edit.codecs import codec, decode
from edit.codecs.base import PIECE, new_vector, parts
from edit.config.run import PenaltyConfig
from edit.errors import RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard, partition_fault
from edit.merging.heloco import Momentum, correct
from edit.merging.norms import norm, norm_of_encoded
from edit.merging.penalty import NormStatistics
from edit.merging.trust import Trust
from edit.records import EncodedTensor, PeerVerdict, Verdict

__all__ = ["Measured", "MergeRule", "Merged", "ShardPayload", "clip_factor", "decoded", "measure", "pieces", "weighted_mean"]


@dataclass(frozen=True, slots=True)
class ShardPayload:
    """What one rank contributes of a fragment."""

    shard: Shard
    # The encoded shard, or what reads it back from the spill.
    payload: EncodedTensor | Callable[[], EncodedTensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """One peer's contribution to one fragment, with its norm taken over the whole replica."""

    peer_id: str
    # The work behind it, of the whole replica.
    inner_steps: int
    tokens: int
    # ||Delta||_2 of what was decoded; NaN or Inf when an element is not finite.
    norm: float
    # The encoded vector, or what reads it back from the spill, or a sharded replica's shards by rank.
    payload: EncodedTensor | Callable[[], EncodedTensor] | tuple[ShardPayload, ...]
    # Outer steps committed since the one it was computed against.
    staleness: int = 0

    def judged(self, verdict: Verdict, weight: float = 0.0) -> PeerVerdict:
        """Return what a commit says of it."""
        return PeerVerdict(peer_id=self.peer_id, verdict=verdict, norm=self.norm, weight=weight, staleness=self.staleness)


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How contributions become one pseudo-gradient, besides their verdicts and weights."""

    # `mean`, or `rda` (arXiv 2604.21428): the normalised mean of the unit vectors times the mean of the lengths.
    direction: str = "mean"
    # What each contribution is first corrected towards; None: no correction.
    momentum: Momentum | None = None
    # The weights are damped by staleness and need not sum to 1, see `edit.merging.penalty.weights`.
    damped: bool = False
    # The outer step that the merge advances from.
    outer_step: int = 0
    # What was merged last of this fragment, bf16 of shape [fragment.numel]; None: nothing yet, or no rule asks for it.
    last: Tensor | None = None
    # What scorers have said of peers, by peer_id; empty: nothing yet, or nobody is asked.
    trust: Mapping[str, Trust] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merged:
    """One fragment of one round, merged; with the outer state before it, it determines the state after it."""

    fragment_id: int
    # D after the clip, flat fp32; None is a rollback.
    merged: Tensor | None
    # One per contributor, in peer_id order.
    verdicts: tuple[PeerVerdict, ...]
    # After this round, of its contributors only.
    statistics: Mapping[str, NormStatistics]
    # ||D|| before the clip.
    merged_norm: float
    # beta, the factor of the clip.
    clip: float


def measure(encoded: EncodedTensor) -> float:
    """Return ||decode(encoded)||_2; NaN or Inf when an element is not finite or the norm overflows.

    Holds one piece in memory at a time; its bits are those of `edit.merging.norms.norm`. Raises RemoteProtocolError when the
    bytes are not what they claim to be.
    """
    return norm_of_encoded(encoded)


def weighted_mean(fragment: FragmentSpec, kept: Sequence[tuple[Measured, float]], rule: MergeRule) -> Tensor:
    """Return the sum of w_m * Delta_m over (contribution, w), in the order given: fp32, shape [fragment.numel].

    With direction `rda`: of w_m * Delta_m / G_m, scaled to the length sum of w_m * G_m. Reads one contribution at a time.
    Raises RemoteProtocolError for a payload of another length and for shards that do not make up the fragment.
    """
    mean, length, one = new_vector(fragment.numel, zeros=True), 0.0, None
    for contribution, share in kept:
        what, size = f"fragment {fragment.fragment_id} of peer {contribution.peer_id}", contribution.norm
        if rule.momentum is not None:
            one = torch.zeros_like(mean)
            _add_contribution(contribution, 1.0, one, what)
            correct(one, rule.momentum)
            size = norm(one)
        length += share * size
        if rule.direction == "rda":
            share = share / size if size > 0 else 0.0
        if one is not None:
            mean.add_(one.mul_(share))
        else:
            _add_contribution(contribution, share, mean, what)
    if rule.direction == "rda" and (size := norm(mean)) > 0:
        mean.mul_(length / size)
    return mean


def decoded(fragment: FragmentSpec, contribution: Measured) -> Tensor:
    """Return what one peer contributes to a fragment: fp32, shape [fragment.numel]. Raises as `weighted_mean`."""
    vector = new_vector(fragment.numel, zeros=True)
    _add_contribution(contribution, 1.0, vector, f"fragment {fragment.fragment_id} of peer {contribution.peer_id}")
    return vector


def pieces(fragment: FragmentSpec, contribution: Measured) -> Iterator[Tensor]:
    """Yield what one peer contributes to a fragment as fp32 pieces, as `edit.codecs.base.parts` says, valid until the next one.

    Of shards that lie one behind the other one piece is held; of others (tensor parallel) the whole vector. Raises as
    `weighted_mean`.
    """
    what, payload = f"fragment {fragment.fragment_id} of peer {contribution.peer_id}", contribution.payload
    if not isinstance(payload, tuple):
        encoded = _read(payload, fragment.numel, what)
        yield from codec(encoded.codec).decode_pieces(encoded)
        return
    _check_shards(payload, fragment.numel, what)
    spans = sorted((one.shard.span, i) for i, one in enumerate(payload) if one.shard.span is not None)
    if len(spans) < len(payload):
        whole = decoded(fragment, contribution)
        yield from (whole[part] for part in parts(fragment.numel))
        return
    buffer, filled = torch.empty(min(PIECE, fragment.numel), dtype=torch.float32, device="cpu"), 0
    for _, i in spans:
        encoded = _read(payload[i].payload, payload[i].shard.numel, what)
        for piece in codec(encoded.codec).decode_pieces(encoded):
            while piece.numel():
                fits = min(piece.numel(), buffer.numel() - filled)
                buffer[filled : filled + fits].copy_(piece[:fits])
                piece, filled = piece[fits:], filled + fits
                if filled == buffer.numel():
                    yield buffer
                    filled = 0
    if filled:
        yield buffer[:filled]


def clip_factor(size: float, config: PenaltyConfig) -> float:
    """Return beta = min(1, phi / (||D|| + 1e-6)); 1 with the penalty or the clip off."""
    if not config.enabled or config.clip == 0:
        return 1.0
    return min(1.0, config.clip / (size + 1e-6))


def _add_contribution(contribution: Measured, share: float, mean: Tensor, what: str) -> None:
    """mean += share * decoded, of the whole vector or of all shards."""
    if not isinstance(contribution.payload, tuple):
        _add(contribution.payload, share, mean, what)
        return
    _check_shards(contribution.payload, mean.numel(), what)
    for one in contribution.payload:
        _add_shard(one, share, mean, what)


def _check_shards(payloads: Sequence[ShardPayload], numel: int, what: str) -> None:
    fragment = payloads[0].shard.fragment if payloads else None
    if fragment is None or fragment.numel != numel or any(one.shard.fragment != fragment for one in payloads):
        raise RemoteProtocolError(f"{what}: its shards are not of one fragment of {numel} elements")
    if fault := partition_fault(fragment, [one.shard.boxes for one in payloads]):
        raise RemoteProtocolError(f"{what}: {fault}")


def _add_shard(one: ShardPayload, share: float, mean: Tensor, what: str) -> None:
    """mean[shard] += share * decoded, rounded after the product and after the sum, as for a whole fragment."""
    if one.shard.span is not None:
        start, end = one.shard.span
        _add(one.payload, share, mean[start:end], what)
        return
    weighted = decode(_read(one.payload, one.shard.numel, what)).mul_(share)
    one.shard.add(weighted, mean)


def _add(payload: EncodedTensor | Callable[[], EncodedTensor], share: float, out: Tensor, what: str) -> None:
    encoded = _read(payload, out.numel(), what)
    codec(encoded.codec).decode_add(encoded, out, share)


def _read(payload: EncodedTensor | Callable[[], EncodedTensor], numel: int, what: str) -> EncodedTensor:
    encoded = payload() if callable(payload) else payload
    if encoded.numel != numel:
        raise RemoteProtocolError(f"{what} has {encoded.numel} elements, not {numel}")
    return encoded
