"""Between a model's parameters and the flat fp32 vector of a fragment: read, compare with the outer one, write back.

Owns: the order of elements in a fragment (its tensors row-major, one after the other) and the sign of a pseudo-gradient
(outer minus local). Outer vectors are fp32 on the CPU, whatever the parameters' dtype and device (defect T15).
Must not know: codecs, rounds, peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edit.errors import LocalProtocolError

__all__ = ["flatten", "load_fragment", "pseudo_gradient"]


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """A fragment's local parameters as one new flat fp32 vector on the CPU, shape [sum of numel]."""
    flat = torch.empty(sum(parameter.numel() for parameter in parameters), dtype=torch.float32, device="cpu")
    for parameter, part in _parts(flat, parameters):
        part.copy_(parameter.detach().reshape(-1))
    return flat


def pseudo_gradient(outer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Delta = outer - local, a new fp32 vector of `outer`'s shape; outer SGD with lr 1 would move theta onto local.

    `outer` is taken as the parameters can hold it: a bf16 model starts a round at bf16(outer), and rounding is no progress.
    Without this every round would pull the fp32 outer parameters back onto the bf16 grid. For fp32 it is plain outer - local.
    """
    delta = outer.clone()
    for parameter, part in _parts(delta, parameters):
        part.copy_(part.to(parameter.dtype)).sub_(parameter.detach().reshape(-1).to(device="cpu", dtype=torch.float32))
    return delta


@torch.no_grad()
def load_fragment(outer: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write a flat fp32 vector into a fragment's parameters in place, rounding to their dtype, on their device."""
    for parameter, part in _parts(outer, parameters):
        parameter.copy_(part.view(parameter.shape))


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    expected = sum(parameter.numel() for parameter in parameters)
    if flat.numel() != expected:
        raise LocalProtocolError(f"a fragment of {expected} elements was given a vector of {flat.numel()}")
    yield from zip(parameters, torch.split(flat, [parameter.numel() for parameter in parameters]), strict=True)
