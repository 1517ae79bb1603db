"""What a masked round is about: the grid of each fragment, and what norms are relative to. Public, and the same for all.

The plan follows from the outer state, and its digest stands in the round's roster (`edit.trust.mask_roster`), so in every key
and every signature of the round. A peer that was shown another plan than the others shares no keys with them: a coordinator
cannot give one peer a fine grid and the others one on which all that they send is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edit.trust.mask_grid import BLOCK
from edit.trust.signatures import statement

__all__ = ["FragmentPlan", "plan_digest"]

_PLAN = "edit-mask-plan-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPlan:
    """The grid of one fragment in one round. Raises ValueError for what no plan has."""

    fragment_id: int
    # Of a masked word: 8, 16 or 32.
    bits: int
    # L: no peer sends a larger integer.
    limit: int
    # Of the scales: an int8 for each 256 elements, the last block being shorter.
    exponents: bytes
    # What the peers' norms are relative to; 0.0: nothing is known, all weights are 1.
    reference: float

    def __post_init__(self) -> None:
        if self.fragment_id < 0 or self.bits not in (8, 16, 32) or not 1 <= self.limit < 1 << (self.bits - 1):
            raise ValueError(
                f"fragment {self.fragment_id}: no grid has {self.bits} bits and {self.limit} as its largest integer"
            )
        if not self.exponents or not (math.isfinite(self.reference) and self.reference >= 0):
            raise ValueError(f"fragment {self.fragment_id}: a plan without exponents, or relative to {self.reference}")
        if min(memoryview(self.exponents).cast("b")) < -126:
            raise ValueError(f"fragment {self.fragment_id}: a scale below the normal fp32 numbers")

    @property
    def scales(self) -> NDArray[np.int8]:
        """The exponents as an array, which is only to be read."""
        return np.frombuffer(self.exponents, np.int8)

    def fits(self, numel: int) -> bool:
        """Return whether it has an exponent for each block of `numel` elements."""
        return len(self.exponents) == -(-numel // BLOCK)


def plan_digest(plans: Sequence[FragmentPlan]) -> bytes:
    """Return SHA-256 of the plans of a round's fragments, in ascending order."""
    fields: list[bytes | str | int] = []
    for plan in sorted(plans, key=lambda plan: plan.fragment_id):
        fields += [plan.fragment_id, plan.bits, plan.limit, plan.exponents, plan.reference.hex()]
    return hashlib.sha256(statement(_PLAN, fields)).digest()
