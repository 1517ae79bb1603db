"""Puts contributions on the public grid of their round, in a run with masks: weighed, rounded, with lanes. The carrier masks.

The plan of a round follows from theta's outer step, so a contribution that is made again is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edit.codecs.error_feedback import ErrorFeedback, Vector
from edit.codecs.grid import GridCodec, lanes_in, words_in
from edit.config.run import PenaltyConfig
from edit.errors import RemoteProtocolError
from edit.fragments.shards import Shard
from edit.merging.masked import weight_of
from edit.merging.norms import norm_of_pieces, whole_norm
from edit.records import EncodedTensor
from edit.replica.replica import Replica
from edit.trust.mask_grid import BLOCK
from edit.trust.mask_plan import FragmentPlan
from edit.trust.masks import Words, lanes_of, word_type

__all__ = ["GridStaging", "PlansRounds"]


class PlansRounds(Protocol):
    """What a worker needs of a `Collective` in a run with masks."""

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        """Return the plan of the round that is open for `outer_step`, once its peers share their keys; blocks until then.

        None: the carrier is cut off, the run has moved on, or this peer has no part in the round. All ranks ask together and
        get the same answer. What is contributed next belongs to this round.
        """
        ...


class GridStaging:
    """Stages the contributions of one replica on the grid.

    Args:
        replica: of this rank.
        feedback: encodes, and keeps what the grid leaves out.
        penalty: how norms become weights.
    """

    def __init__(self, replica: Replica, feedback: ErrorFeedback, penalty: PenaltyConfig) -> None:
        self._layout, self._feedback, self._penalty = replica.layout, feedback, penalty
        # The plan of the pending contribution, and the norm of each fragment of it.
        self.plans: dict[int, FragmentPlan] = {}
        self.norms: dict[int, float] = {}

    def begin(self, plans: Iterable[FragmentPlan]) -> None:
        """Stage by this plan from now on. Raises RemoteProtocolError when it does not fit the model."""
        known = {plan.fragment_id: plan for plan in plans}
        for i, plan in known.items():
            fragments = self._layout.schema.fragments
            if not 0 <= i < len(fragments) or not plan.fits(fragments[i].numel):
                raise RemoteProtocolError(f"the plan of a masked round has a grid for fragment {i} that does not fit the model")
        self.plans, self.norms = known, {}

    def load(self, plans: Sequence[FragmentPlan], norms: Mapping[int, float]) -> None:
        """Go on with the plan and the norms of a contribution that was made before this process began. Raises as `begin`."""
        self.begin(plans)
        self.norms = dict(norms)

    def stage(self, i: int, own: Vector) -> tuple[EncodedTensor, float]:
        """Encode fragment i; return it and the norm of u over the whole replica. All ranks call it, also with nothing of it.

        A vector that is not finite is sent as zeros, and its norm as inf: NaN would equal no other rank's.
        """
        ranks, shard, plan = self._layout.ranks, self._layout.owned[i], self.plans[i]
        if i not in self.norms:
            found = norm_of_pieces(shard.numel, self._feedback.owed(i, own)) if shard.numel else 0.0
            whole = whole_norm(ranks.collect(found))
            self.norms[i] = whole if math.isfinite(whole) else math.inf
        norm = self.norms[i]
        exponents, block = _exponents(plan, shard)
        weight = weight_of(norm, plan.reference, self._penalty)
        self._feedback.use(i, GridCodec(plan.bits, plan.limit, exponents, weight, block))
        payload = self._feedback.stage(i, own)
        lanes = np.sum(ranks.collect(_lanes(payload, shard, plan.bits)), axis=0, dtype=word_type(plan.bits))
        lanes_in(payload.data, plan.bits)[:] = lanes if _has_first(shard) else 0
        return payload, norm


def _exponents(plan: FragmentPlan, shard: Shard) -> tuple[NDArray[np.int8], int]:
    """Return the exponents of a shard's elements, and how many elements share one."""
    if shard.is_whole:
        return plan.scales, BLOCK
    each = torch.from_numpy(np.repeat(plan.scales, BLOCK)[: shard.fragment.numel])
    return shard.take(each).numpy(), 1


def _lanes(payload: EncodedTensor, shard: Shard, bits: int) -> Words:
    """Return the lanes of what this rank sends."""
    words = words_in(payload.data, bits)[: payload.numel]
    if shard.is_whole or shard.span is not None:
        return lanes_of(words, shard.span[0] if shard.span is not None else 0)
    whole = torch.zeros(shard.fragment.numel, dtype=getattr(torch, f"int{bits}"), device="cpu")
    shard.put(torch.from_numpy(words.view(f"i{bits // 8}").copy()), whole)
    return lanes_of(whole.numpy().view(words.dtype))


def _has_first(shard: Shard) -> bool:
    """Return whether the fragment's first element is in the shard."""
    return any(run.start == 0 for run in shard.runs)
