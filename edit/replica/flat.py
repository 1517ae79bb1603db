"""Between a model's parameters and the flat fp32 vector of a fragment: read, compare with the outer one, write back.

A vector has its tensors row-major, one after the other; a pseudo-gradient is outer minus local. Vectors are fp32 on the CPU,
whatever the parameters' dtype and device (defect T15). Next to parameters on a GPU they are pinned, and the copies of one
vector are asynchronous, with one wait at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edit.errors import LocalProtocolError

__all__ = ["as_held", "flatten", "is_finite", "load_fragment", "pseudo_gradient"]

_COPIED = 1 << 24  # elements at a time: where the dtypes differ, torch converts in new memory of the GPU, 64 MiB of fp32


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Return a fragment's local parameters as one new flat fp32 vector on the CPU, shape [sum of numel]."""
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=_on_gpu(parameters))
    for parameter, part in _parts(flat, parameters):
        _copy(part, parameter.detach().reshape(-1))
    _wait(parameters)
    return flat


def as_held(outer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `outer` as the parameters can hold it, rounded to their dtypes; a new fp32 vector."""
    held = outer.clone()
    for parameter, part in _parts(held, parameters):
        if parameter.dtype != torch.float32:
            part.copy_(part.to(parameter.dtype))
    return held


def pseudo_gradient(outer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return Delta = outer - local, a new fp32 vector of `outer`'s shape; outer SGD with lr 1 would move theta onto local.

    `outer` is taken as the parameters can hold it: a bf16 model starts a round at bf16(outer), and rounding is no progress.
    Without this every round would pull the fp32 outer parameters back onto the bf16 grid. For fp32 it is plain outer - local.
    """
    if not all(parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in parameters):
        local = flatten(parameters)
        return torch.sub(as_held(outer, parameters), local, out=local)  # pinned next to a GPU
    delta = torch.empty_like(outer)
    for (parameter, theta), (_, part) in zip(_parts(outer, parameters), _parts(delta, parameters), strict=True):
        torch.sub(theta, parameter.detach().reshape(-1), out=part)
    return delta


@torch.no_grad()
def load_fragment(outer: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write a flat fp32 vector into a fragment's parameters in place, rounding to their dtype, on their device."""
    for parameter, part in _parts(outer, parameters):
        if parameter.is_contiguous():
            _copy(parameter.view(-1), part)
        else:
            parameter.copy_(part.view(parameter.shape), non_blocking=True)
    _wait(parameters)


def is_finite(vector: Tensor) -> bool:
    """Return whether no element is NaN or infinite; one pass, which torch.isfinite(...).all() is not."""
    return not vector.numel() or all(math.isfinite(value.item()) for value in torch.aminmax(vector))


def _copy(target: Tensor, source: Tensor) -> None:
    for into, part in zip(torch.split(target, _COPIED), torch.split(source, _COPIED), strict=True):
        into.copy_(part, non_blocking=True)


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    expected = sum(parameter.numel() for parameter in parameters)
    if flat.numel() != expected:
        raise LocalProtocolError(f"a fragment of {expected} elements was given a vector of {flat.numel()}")
    yield from zip(parameters, torch.split(flat, [parameter.numel() for parameter in parameters]), strict=True)


def _on_gpu(parameters: Sequence[Tensor]) -> bool:
    return any(parameter.is_cuda for parameter in parameters)


def _wait(parameters: Sequence[Tensor]) -> None:
    """Wait until the copies on the current streams are done."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
