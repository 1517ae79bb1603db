"""The section [secagg]: whether an aggregator sees no contribution, but the sum of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, Matches, check_bounds, require

__all__ = ["SecaggConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecaggConfig:
    """The section [secagg]: secure aggregation. Peers mask their pseudo-gradients; only the sum of all can be opened.

    The aggregator learns the norm of each peer's fragments, its inner steps, its tokens and when it sent them, but no vector.
    Contributions are not encoded by `codec.up` but as integers on a grid that all peers know, with error feedback.
    """

    # Whether contributions are masked. Two thirds of the peers of a round are enough to open the sum; the others may drop out.
    enabled: bool = False
    # Bits of a masked element: 8, 16 or 32. The first outer step always takes 32.
    bits: Annotated[int, Matches(lambda bits: bits in (8, 16, 32), "must be 8, 16 or 32")] = 16
    # The smallest number of peers in a sum. A peer does not help to open a sum of fewer.
    min_peers: Annotated[int, Between(2, 64)] = 3
    # The largest number of peers in a round; the grid leaves room for the sum of that many.
    max_peers: Annotated[int, Between(2, 64)] = 16

    def __post_init__(self) -> None:
        check_bounds("secagg.", self)
        rule = f"must not be below secagg.min_peers ({self.min_peers})"
        require(self.max_peers >= self.min_peers, "secagg.max_peers", self.max_peers, rule)

    @property
    def shown(self) -> str:
        """`16 bits, at least 3 peers`; "": off."""
        return f"{self.bits} bits, at least {self.min_peers} peers" if self.enabled else ""
