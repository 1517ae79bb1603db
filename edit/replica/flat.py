"""Between a model's parameters and the flat fp32 vector of a fragment: read, compare with the outer one, write back.

A vector has its tensors row-major, one after the other; a pseudo-gradient is outer minus local. Vectors are fp32 on the CPU,
whatever the parameters' dtype and device (defect T15). Next to parameters on a GPU they are pinned, and the copies of one
vector are asynchronous, with one wait at the end. None of them need be there as a whole: `LocalVector` and `PseudoGradient`
read and write a part at a time, which stays in the cache, and `DevicePseudoGradient` is computed on the GPU.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edit.codecs.base import PIECE, new_vector
from edit.errors import LocalProtocolError

__all__ = [
    "DevicePseudoGradient",
    "LocalVector",
    "PseudoGradient",
    "as_held",
    "flatten",
    "flatten_there",
    "is_finite",
    "load_fragment",
    "on_gpu",
    "pseudo_gradient",
]

_COPIED = 1 << 24  # elements at a time: where the dtypes differ, torch converts in new memory of the GPU, 64 MiB of fp32


def on_gpu(parameters: Sequence[Tensor]) -> torch.device | None:
    """Return the GPU that all of them are on, contiguous, so that vectors can be computed there a part at a time; else None."""
    devices = {parameter.device for parameter in parameters}
    one = len(devices) == 1 and all(parameter.is_cuda and parameter.is_contiguous() for parameter in parameters)
    return devices.pop() if one else None


def flatten_there(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return what `flatten` does, on the device where the parameters are."""
    flat = torch.empty(sum(parameter.numel() for parameter in parameters), dtype=torch.float32, device=device)
    for parameter, part in _parts(flat, parameters):
        part.copy_(parameter.detach().reshape(-1))
    return flat


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Return a fragment's local parameters as one new flat fp32 vector on the CPU, shape [sum of numel]."""
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True) if _on_gpu(parameters) else new_vector(numel)
    for parameter, part in _parts(flat, parameters):
        _copy(part, parameter.detach().reshape(-1))
    _wait(parameters)
    return flat


def as_held(outer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `outer` as the parameters can hold it, rounded to their dtypes; a new fp32 vector."""
    held = new_vector(outer.numel()).copy_(outer)
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
    delta = new_vector(outer.numel())
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


class _Joined:
    """Contiguous parameters on one device as one flat vector that shares their memory."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._flat = [parameter.detach().view(-1) for parameter in parameters]
        self._starts = list(itertools.accumulate((flat.numel() for flat in self._flat), initial=0))

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._flat[0].device

    def numel(self) -> int:
        """Return the number of elements."""
        return self._starts[-1]

    def pieces(self, part: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield what each parameter has of a part of the vector: where it stands in the part, and its memory."""
        starts, flat = self._starts, self._flat
        i = bisect.bisect_right(starts, part.start) - 1
        while i < len(flat) and starts[i] < part.stop:
            begin, end = max(starts[i], part.start), min(starts[i + 1], part.stop)
            if begin < end:
                yield slice(begin - part.start, end - part.start), flat[i][begin - starts[i] : end - starts[i]]
            i += 1

    def check(self, outer: Tensor, earlier: Tensor | None) -> None:
        """Raise LocalProtocolError unless the vectors of a pseudo-gradient are as long."""
        if any(vector.numel() != self.numel() for vector in (outer, *(() if earlier is None else (earlier,)))):
            raise LocalProtocolError(f"a fragment of {self.numel()} elements was given a vector of {outer.numel()}")


class LocalVector(_Joined):
    """The parameters of a fragment as one flat vector that shares their memory. Does not take gradients along.

    Raises LocalProtocolError unless `readable`.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        if not self.readable(parameters):
            raise LocalProtocolError("only contiguous parameters on the CPU are one vector")
        super().__init__(parameters)

    @staticmethod
    def readable(parameters: Sequence[Tensor]) -> bool:
        """Return whether all are contiguous and on the CPU."""
        return all(parameter.device.type == "cpu" and parameter.is_contiguous() for parameter in parameters)

    def write(self, part: slice, values: Tensor) -> None:
        """Write flat fp32 `values` into a part of the vector, rounding to the parameters' dtypes."""
        for here, into in self.pieces(part):
            into.copy_(values[here])


class PseudoGradient:
    """`pseudo_gradient`, computed a part at a time: Delta[part] is fp32 and valid until the next part is read.

    outer: flat fp32, as long as the local vector; local: the parameters; earlier: what they were (flat fp32), None for now.
    Parts are at most PIECE elements long.
    """

    def __init__(self, outer: Tensor, local: LocalVector, earlier: Tensor | None = None) -> None:
        local.check(outer, earlier)
        self._outer, self._local, self._earlier = outer, local, earlier
        self._scratch = torch.empty(min(PIECE, outer.numel()), dtype=torch.float32, device="cpu")

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._outer.device

    def numel(self) -> int:
        """Return the number of elements."""
        return self._local.numel()

    def __getitem__(self, part: slice) -> Tensor:
        outer, delta = self._outer[part], self._scratch[: part.stop - part.start]
        earlier = self._earlier[part] if self._earlier is not None else None
        for here, now in self._local.pieces(part):
            held = outer[here] if now.dtype == torch.float32 else outer[here].to(now.dtype).to(torch.float32)
            torch.sub(held, now.to(torch.float32) if earlier is None else earlier[here], out=delta[here])
        return delta


class DevicePseudoGradient:
    """`pseudo_gradient`, computed a part at a time on the device of the parameters: Delta[part] is fp32, valid until the next.

    outer: flat fp32 on the CPU, pinned; parameters: contiguous, on one device; earlier: what they were (flat fp32 on the CPU),
    None for now. The copies to the device are queued on its current stream. Same bits as on the CPU.
    """

    def __init__(self, outer: Tensor, parameters: Sequence[Tensor], earlier: Tensor | None = None) -> None:
        self._local = _Joined(parameters)
        self._local.check(outer, earlier)
        self._outer, self._earlier = outer, earlier

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._local.device

    def numel(self) -> int:
        """Return the number of elements."""
        return self._local.numel()

    def __getitem__(self, part: slice) -> Tensor:
        delta = torch.empty(part.stop - part.start, dtype=torch.float32, device=self.device).copy_(
            self._outer[part], non_blocking=True
        )
        before = None
        if self._earlier is not None:
            before = self._earlier[part].to(self.device, non_blocking=True)
        for here, now in self._local.pieces(part):
            held = delta[here]
            if now.dtype != torch.float32:
                held.copy_(held.to(now.dtype))
            held.sub_(now.to(torch.float32) if before is None else before[here])
        return delta


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
