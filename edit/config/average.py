"""The section [average]: which mean of the outer parameters an aggregator keeps beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, OneOf, check_bounds

__all__ = ["AverageConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageConfig:
    """The section [average]: a mean of the outer parameters over outer steps, which an export with --averaged writes.

    It is computed beside the training, which is the same with and without it. An aggregator keeps it in memory and in its
    checkpoints: 4 bytes per parameter with `ema`, 4 (last - 1) with `last`.
    """

    # `none`; `ema`: the exponential moving average, without the initial parameters (bias-corrected as in arXiv 1412.6980,
    # section 3); `last`: the plain mean of the last outer steps (LAWA, arXiv 2209.14981).
    kind: Annotated[str, OneOf("none", "ema", "last")] = "none"
    # Of `ema`: what the average keeps of itself at each outer step; 1 / (1 - decay) outer steps count.
    decay: Annotated[float, Between(0, 0.9999)] = 0.9
    # Of `last`: the number of outer steps.
    last: Annotated[int, Between(2, 16)] = 2

    def __post_init__(self) -> None:
        check_bounds("average.", self)

    @property
    def shown(self) -> str:
        """`ema 0.9` or `last 2`; "": none."""
        return {"none": "", "ema": f"ema {self.decay:g}", "last": f"last {self.last}"}[self.kind]

    @property
    def bytes_per_parameter(self) -> int:
        """What it takes of memory, and of a checkpoint."""
        return {"none": 0, "ema": 4, "last": 4 * (self.last - 1)}[self.kind]
