"""A masked merge: peers weigh themselves by the norms that they say, and only the sum of all of them is seen.

Before the sum is opened, claimed norms are judged as those of any contribution are; who has a verdict other than OK in one
fragment is left out of the sum of all. Each of the others has multiplied its vector u by w before it was masked:

    w = exp(-(x - 1) / T), x = G / R    (penalty.norm = "relative"; "raw": exp(-(G - R) / T)),  within [1/16, most]

R, the reference, is the median norm of the last merged contributions, which all know; w is 1 while there is none, or with the
penalty off. D = sum of w u / sum of w: the softmax of `edit.merging.penalty.weights`, whose normaliser cancels, with a median
that is one outer step old; `most` keeps a share near its cap (max_share / M).

A peer that lies can send any integers. Checked is only that D is no longer than the norms allow: ||D|| sum w <= sum w G, and
the grid's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edit.codecs.base import new_vector, parts
from edit.codecs.grid import lanes_in, words_in
from edit.config.run import PenaltyConfig
from edit.errors import RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.merging.merge import Measured, Merged, clip_factor
from edit.merging.norms import norm
from edit.merging.penalty import NormStatistics, judge_round
from edit.merging.portable_math import exp
from edit.records import EncodedTensor, PeerVerdict, Verdict
from edit.trust.mask_grid import BLOCK, weighted_mean
from edit.trust.mask_plan import FragmentPlan
from edit.trust.masks import LANES, Words, signed, word_type

__all__ = ["JudgedClaims", "MaskedSum", "judge_claims", "merge_nothing", "merge_sum", "reference_of", "sum_of", "weight_of"]

_LEAST, _MOST = 1 / 16, 3.0


def weight_of(size: float, reference: float, config: PenaltyConfig) -> float:
    """Return w, by which a peer multiplies what it masks; 0 where its norm is not finite.

    size: G, the norm over the whole replica; reference: R, 0 where there is none.
    """
    if not math.isfinite(size):
        return 0.0
    if not config.enabled or reference <= 0:
        return 1.0
    over = size - reference if config.norm == "raw" else size / reference - 1
    most = min(_MOST, config.max_share) if config.detector != "edit" else _MOST
    small = exp(-min(abs(over) / config.temperature, 4.0))
    return max(small, _LEAST) if over > 0 else min(1 / small, most)


def reference_of(verdicts: Sequence[PeerVerdict]) -> float:
    """Return R for the next outer step: the median norm of what was merged with a weight; 0 where nothing was."""
    norms = [verdict.norm for verdict in verdicts if verdict.weight > 0]
    return median(norms) if norms else 0.0


@dataclass(frozen=True, slots=True)
class JudgedClaims:
    """What is decided before a sum is opened, by fragment."""

    # By peer_id, of all who are complete.
    verdicts: Mapping[int, Mapping[str, Verdict]]
    # After the round, by peer_id.
    statistics: Mapping[int, Mapping[str, NormStatistics]]
    # Who is OK in every fragment.
    survivors: frozenset[str]

    def shortage(self, least: int) -> str:
        """Return why the sound are too few for a sum although the complete are not, or ''. least: how many a sum has."""
        bad = {
            peer: verdict
            for judged in self.verdicts.values()
            for peer, verdict in sorted(judged.items())
            if verdict is not Verdict.OK
        }
        if len(self.survivors) >= least or len(self.survivors) + len(bad) < least:
            return ""
        named = ", ".join(f"{peer} is {verdict.name}" for peer, verdict in sorted(bad.items()))
        return f"{named}: {len(self.survivors)} sound contributions are left, and a sum has at least {least}"


def judge_claims(
    claims: Mapping[int, Sequence[Measured]], before: Mapping[int, Mapping[str, NormStatistics]], config: PenaltyConfig
) -> JudgedClaims:
    """Judge the norms that the complete peers say. claims: by fragment, of the same peers; before: the statistics so far."""
    verdicts: dict[int, Mapping[str, Verdict]] = {}
    statistics: dict[int, Mapping[str, NormStatistics]] = {}
    for i, contributions in claims.items():
        norms = {one.peer_id: one.norm for one in contributions}
        verdicts[i], statistics[i] = judge_round(norms, {c.peer_id: c.inner_steps for c in contributions}, before[i], config)
    everybody = {one.peer_id for contributions in claims.values() for one in contributions}
    bad = {peer for judged in verdicts.values() for peer, verdict in judged.items() if verdict is not Verdict.OK}
    return JudgedClaims(verdicts, statistics, frozenset(everybody - bad))


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """The sum of masked vectors of one fragment, modulo 2^bits, or, once the masks are off, of integers."""

    # One for each element.
    words: Words
    # See `edit.trust.masks`.
    lanes: Words


def sum_of(fragment: FragmentSpec, plan: FragmentPlan, contributions: Sequence[Measured]) -> MaskedSum:
    """Add up what these peers sent of a fragment. One payload is read at a time. Raises RemoteProtocolError as `Measured`."""
    total = MaskedSum(np.zeros(fragment.numel, word_type(plan.bits)), np.zeros(LANES, word_type(plan.bits)))
    whole = torch.from_numpy(total.words.view(f"i{plan.bits // 8}"))
    for one in contributions:
        what = f"fragment {fragment.fragment_id} of peer {one.peer_id}"
        if not isinstance(one.payload, tuple):
            words = _words(
                one.payload() if callable(one.payload) else one.payload, plan.bits, fragment.numel, total.lanes, what
            )
            np.add(total.words, words, out=total.words)
            continue
        for part in one.payload:
            encoded = part.payload() if callable(part.payload) else part.payload
            words = _words(encoded, plan.bits, part.shard.numel, total.lanes, what)
            part.shard.add(torch.from_numpy(words.view(f"i{plan.bits // 8}").copy()), whole)
    return total


def _words(encoded: EncodedTensor, bits: int, numel: int, lanes: Words, what: str) -> Words:
    """Return the words of one payload, and add its lanes to `lanes`."""
    size = memoryview(encoded.data).nbytes
    if encoded.numel != numel or size != (numel + LANES) * bits // 8:
        raise RemoteProtocolError(f"{what}: {size} bytes are not {numel} masked words of {bits} bits")
    np.add(lanes, lanes_in(encoded.data, bits), out=lanes)
    return words_in(encoded.data, bits)[:numel]


def merge_sum(
    fragment: FragmentSpec,
    plan: FragmentPlan,
    total: MaskedSum,
    contributions: Sequence[Measured],
    judged: JudgedClaims,
    survivors: Collection[str],
    config: PenaltyConfig,
) -> Merged:
    """Return what was merged of one fragment. Pure.

    total: the opened sum of the survivors, whose lanes fit; contributions: of all who were complete, survivors or not.
    Raises RemoteProtocolError when the sum is longer than the norms that the survivors say.
    """
    ordered, i = sorted(contributions, key=lambda one: one.peer_id), fragment.fragment_id
    inside = [one for one in ordered if one.peer_id in survivors]
    each = {one.peer_id: weight_of(one.norm, plan.reference, config) for one in inside}
    weights = math.fsum(each.values())
    mean = _mean(total.words, plan, weights)
    size = norm(mean)
    claimed = math.fsum(each[one.peer_id] * one.norm for one in inside)
    allowed = (claimed + len(inside) * _rounding(plan, fragment.numel)) / weights
    if not size <= allowed * (1 + 1e-5):
        raise RemoteProtocolError(
            f"fragment {i}: the sum of {', '.join(one.peer_id for one in inside)} is {size:.4g} long, by the norms that they "
            f"say at most {allowed:.4g}: one of them does not send what it says"
        )
    verdicts = tuple(
        one.judged(_verdict(judged, i, one.peer_id, survivors), each.get(one.peer_id, 0.0) / weights) for one in ordered
    )
    beta = clip_factor(size, config)
    return Merged(i, mean.mul_(beta) if beta < 1 else mean, verdicts, judged.statistics[i], size, beta)


def merge_nothing(fragment_id: int, contributions: Sequence[Measured], judged: JudgedClaims) -> Merged:
    """Return the rollback of a fragment whose sum is not opened: all who were complete are REJECTED, or as they were judged."""
    ordered = sorted(contributions, key=lambda one: one.peer_id)
    verdicts = tuple(one.judged(_verdict(judged, fragment_id, one.peer_id, ()), 0.0) for one in ordered)
    return Merged(fragment_id, None, verdicts, judged.statistics[fragment_id], 0.0, 1.0)


def _rounding(plan: FragmentPlan, numel: int) -> float:
    """Return the length of the largest rounding error of one peer's w u: half a step in each element."""
    steps = np.ldexp(1.0, plan.scales.astype(np.int32))
    sizes = np.full(len(steps), float(BLOCK))
    sizes[-1] = numel - BLOCK * (len(steps) - 1)
    return 0.5 * math.sqrt(float(np.square(steps) @ sizes))


def _verdict(judged: JudgedClaims, i: int, peer_id: str, survivors: Collection[str]) -> Verdict:
    """Return the verdict in one fragment; REJECTED for who is left out because of another fragment."""
    verdict = judged.verdicts[i][peer_id]
    return Verdict.REJECTED if verdict is Verdict.OK and peer_id not in survivors else verdict


def _mean(words: Words, plan: FragmentPlan, weights: float) -> Tensor:
    """Return D = s S / sum w, fp32, a part at a time."""
    mean, exponents = new_vector(len(words)), plan.scales
    for part in parts(len(words)):
        integers: NDArray[np.int64] = signed(words[part])
        blocks = exponents[part.start // BLOCK : -(-part.stop // BLOCK)]
        mean[part] = torch.from_numpy(weighted_mean(integers, blocks, weights))
    return mean
