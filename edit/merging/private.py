"""A merge with differential privacy of organisations: clipped contributions, noise in their sum, a fixed denominator.

    D = (sum_m Delta_m min(1, S / ||Delta_m||) + N(0, z^2 S^2 I)) / n0

||Delta_m|| is the norm of what was decoded, over all fragments of the outer step; the contributions of one organisation count
as their mean. So one organisation more or less changes the sum by at most S. The sum and its noise are fp64; rounding to fp32
comes after the noise, and tells no more than it. Nothing that is published says how long a contribution was: the norm of a
verdict is NaN, and its weight, 1 / n0, does not follow the clip.

Source: McMahan et al. 2018 (arXiv 1710.06963), without sampling: who takes part is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from edit.codecs.base import PIECE, new_vector, parts
from edit.config.gaussian import noise_length
from edit.config.run import RunConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema
from edit.merging.merge import Measured, Merged, pieces
from edit.merging.norms import norm
from edit.merging.robust import organisations
from edit.records import Verdict

__all__ = ["Clipped", "Noise", "clip_contributions", "clip_of_norms", "merge_private", "noise_line"]

Noise = Callable[[int], npt.NDArray[np.float64]]
"""Returns so many independent values of N(0, 1), fp64."""
_MUCH, _TOO_MUCH = 1.0, 10.0  # times as long as the longest contribution
_ROUNDING = 2.0**-24  # of one operation in fp32, in which norms are summed, lane by lane


@dataclass(frozen=True, slots=True)
class Clipped:
    """What counts in one attempt at an outer step, over all of its fragments."""

    # min(1, S / ||Delta||), over the number of contributions of the same organisation, by peer_id; of those that count.
    factors: Mapping[str, float]
    # 1 / n0, over the same number: what is published.
    weights: Mapping[str, float]
    # Of those that do not.
    verdicts: Mapping[str, Verdict]


def clip_of_norms(clip: float, numel: int) -> float:
    """Return the length that a vector may have by its `norm`, so that it is no longer than `clip`.

    numel: of the largest fragment.

    A norm may be too small by the rounding of the squares, of the additions in a lane and of those of the lanes, of which half
    is in the root, and by that of the product with the factor that shortens it.
    """
    return clip * (1 - ((-(-numel // PIECE) + 20) / 2 + 1) * _ROUNDING)


def clip_contributions(
    contributions: Mapping[int, Sequence[Measured]],
    clip: float,
    denominator: int,
    rejected: Collection[str] = (),
    *,
    numel: int,
) -> Clipped:
    """Return by how much each contribution is shortened. Pure.

    Args:
        contributions: by fragment, of all fragments that are due; the same peers in each.
        clip: S.
        denominator: n0.
        rejected: the peers that do not count.
        numel: of the largest fragment.

    One that is not finite in any fragment does not count. Raises LocalProtocolError unless each peer has each fragment once.
    """
    norms: dict[str, list[float]] = {}
    for ones in contributions.values():
        for one in ones:
            norms.setdefault(one.peer_id, []).append(one.norm)
    if any(len(each) != len(contributions) for each in norms.values()):
        raise LocalProtocolError("a private merge needs each fragment of each contribution, once")
    clip = clip_of_norms(clip, numel)
    sizes = {peer_id: math.hypot(*each) for peer_id, each in sorted(norms.items())}
    verdicts = {peer_id: Verdict.NONFINITE for peer_id, size in sizes.items() if not math.isfinite(size)}
    verdicts |= {peer_id: Verdict.REJECTED for peer_id in sizes if peer_id in rejected and peer_id not in verdicts}
    factors, weights, good = dict[str, float](), dict[str, float](), [each for each in sizes if each not in verdicts]
    for group in organisations(good):
        for peer_id in (good[i] for i in group):
            size = sizes[peer_id]
            factors[peer_id] = (clip / size if size > clip else 1.0) / len(group)
            weights[peer_id] = 1 / (len(group) * denominator)
    return Clipped(factors, weights, verdicts)


def merge_private(
    fragment: FragmentSpec,
    contributions: Sequence[Measured],
    clipped: Clipped,
    deviation: float,
    denominator: int,
    noise: Noise,
) -> Merged:
    """Merge one fragment: the sum of what counts and of noise, over n0. Of nothing that counts it is the noise alone.

    deviation: z S. noise: what was drawn for this attempt is not to be used again.
    Raises RemoteProtocolError as `edit.merging.merge.weighted_mean`.
    """
    ordered = sorted(contributions, key=lambda one: one.peer_id)
    counted = [(clipped.factors[one.peer_id], pieces(fragment, one)) for one in ordered if one.peer_id in clipped.factors]
    mean = new_vector(fragment.numel)
    for part in parts(fragment.numel):
        total = torch.from_numpy(noise(part.stop - part.start)).mul_(deviation)
        for factor, piece in counted:
            total.add_(next(piece).double(), alpha=factor)
        mean[part] = total.div_(denominator)
    verdicts = tuple(
        replace(one.judged(clipped.verdicts.get(one.peer_id, Verdict.OK), clipped.weights.get(one.peer_id, 0.0)), norm=math.nan)
        for one in ordered
    )
    return Merged(fragment.fragment_id, mean, verdicts, {}, norm(mean), 1.0)


def noise_line(config: RunConfig, schema: Schema) -> tuple[str, bool]:
    """Return how long the noise of an outer step is, in words, and whether that is much.

    Raises ConfigError where it is more than 10 times as long as the longest contribution, unless privacy.accept_noise is set.
    """
    privacy, n0, sync = config.privacy, config.denominator, config.sync
    due = (fragments_due(step, len(schema.fragments), sync.groups, sync.pattern) for step in range(sync.groups))
    numel = max(sum(schema.fragments[i].numel for i in each) for each in due)
    length = noise_length(privacy.noise_multiplier, numel, n0)
    said = (
        f"the noise of an outer step is {length:.3g} times as long as the longest contribution (z sqrt(d) / n0, "
        f"z = {privacy.noise_multiplier:g}, d = {numel}, n0 = {n0})"
    )
    if length > _TOO_MUCH and not privacy.accept_noise:
        raise ConfigError(
            f"privacy.noise_multiplier = {privacy.noise_multiplier:g}: {said}: nothing would be learned; train fewer "
            "parameters with more organisations, or set privacy.accept_noise = true"
        )
    if length > _MUCH:
        return f"{said}: expect to learn little unless many organisations agree", True
    return said, False
