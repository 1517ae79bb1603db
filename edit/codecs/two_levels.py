"""Two bits for an element: its sign, and whether its magnitude is the lower or the higher of two levels of its row."""

from __future__ import annotations

import torch
from torch import Tensor

from edit.codecs.blockwise import row_sums

__all__ = ["join", "split"]


def split(values: Tensor, magnitudes: Tensor, threshold: Tensor, levels: Tensor) -> Tensor:
    """Return the codes of fp32 `values` [rows, numel], uint8 [rows, numel]: bit 0 the sign, bit 1 above the threshold.

    levels [rows, 2] gets the means of the magnitudes up to the threshold [rows, 1] and above it: no other two numbers leave a
    smaller sum of squared errors. 0 for none; NaN where a sum is not finite, for both.
    """
    above = (magnitudes > threshold).to(torch.float32)  # products with 0 and 1 are exact, and faster than torch.where
    counts = above.sum(1)  # of whole numbers: exact in any order
    higher = magnitudes * above
    torch.div(row_sums(higher), counts.clamp(min=1), out=levels[:, 1])
    torch.div(row_sums(magnitudes - higher), (values.shape[1] - counts).clamp_(min=1), out=levels[:, 0])
    levels.masked_fill_(~levels.isfinite().all(1, keepdim=True), torch.nan)
    return above.mul_(2.0).add_(values < 0).to(torch.uint8)


def join(codes: Tensor, levels: Tensor) -> Tensor:
    """Return the values of codes [rows, numel]: fp32. levels [rows, 2]."""
    above = (codes >> 1).to(torch.float32)
    values = above * levels[:, 1:]
    values.add_(above.sub_(1.0).neg_().mul_(levels[:, :1]))
    return values.mul_((codes & 1).to(torch.float32).mul_(-2.0).add_(1.0))
