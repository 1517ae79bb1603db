"""Computes on the CPU as torch does on CUDA, where the two differ: for what has to give the same bits on both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CudaArithmetic"]

_aten = torch.ops.aten
_DIVISIONS = {_aten.div.Tensor, _aten.div_.Tensor, _aten.div.Scalar, _aten.div_.Scalar, _aten.div.out}
_ARITHMETIC = {
    *(op.overloadpacket for op in _DIVISIONS),
    *(_aten.mul, _aten.mul_, _aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub, _aten.neg, _aten.neg_),
    *(_aten.abs, _aten.sqrt, _aten.sqrt_, _aten.reciprocal, _aten.round, _aten.round_, _aten.sum, _aten.mean),
}
_READS = {_aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.equal}


class CudaArithmetic(TorchDispatchMode):
    """Inside, float32 operations on CPU tensors give what they give on CUDA, and to read a value is an AssertionError.

    reads: it is not.

    - A division by a Python number multiplies by its reciprocal (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).
    - Arithmetic gives one NaN, 0x7fffffff, and so does abs (PTX ISA, "NaN payloads").
    - A float that an integer type does not have becomes the nearest that it has, a NaN 0 (PTX ISA, cvt).

    All else rounds to nearest even on both and keeps subnormals: torch is built without --use_fast_math.
    """

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet, kwargs = func.overloadpacket, dict(kwargs or {})  # type: ignore[attr-defined]
        assert self._reads or packet not in _READS, f"{packet} waits for the device"
        if func in _DIVISIONS and not isinstance(args[1], Tensor):
            reciprocal = torch.ones(()).div(torch.tensor(float(args[1])))
            func = {_aten.div: _aten.mul.Tensor, _aten.div_: _aten.mul_.Tensor}[packet]
            if "out" in kwargs:
                func = _aten.mul.out
            args = (args[0], reciprocal)
        result = _converted(packet, args, kwargs) if packet in (_aten._to_copy, _aten.copy_) else None
        if result is None:
            result = func(*args, **kwargs)
        if packet in _ARITHMETIC and isinstance(result, Tensor) and result.dtype == torch.float32:
            result.view(torch.int32).masked_fill_(result.isnan(), 0x7FFFFFFF)
        return result


def _converted(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a conversion from fp32 to integers; None for any other copy."""
    source = args[1] if packet is _aten.copy_ else args[0]
    target = args[0].dtype if packet is _aten.copy_ else kwargs.get("dtype")
    if target is None or source.dtype != torch.float32 or target.is_floating_point or target == torch.bool:
        return None
    limits = torch.iinfo(target)
    whole = source.nan_to_num(0.0, limits.max, limits.min).clamp(limits.min, limits.max).to(target)
    return args[0].copy_(whole) if packet is _aten.copy_ else whole
