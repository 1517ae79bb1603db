"""fp32, bf16, fp16: each element as a raw little-endian float, nothing else.

Rounding is to nearest even. NaN and Inf come out as such. fp16 turns what exceeds 65504 into Inf: a NONFINITE verdict for a
contribution, a rollback for an update. bf16 has the range of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import Buffer, Codec, parts, readonly, view
from edit.config.codec import CodecSpec
from edit.fragments.shards import Shard

__all__ = ["RawFloat"]


class RawFloat(Codec):
    """Elements of one torch float type. Has no options."""

    granule = 1

    def __init__(self, spec: CodecSpec, dtype: torch.dtype) -> None:
        spec.values()
        self.name = str(spec)
        self.lossless = dtype == torch.float32
        self._dtype = dtype

    def encoded_size(self, numel: int) -> int:
        """Return the element size times `numel`."""
        return numel * self._dtype.itemsize

    def encode_part(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> None:
        """Round each element of the part."""
        view(data, self._dtype, part.numel(), start * self._dtype.itemsize, bytearray()).copy_(part)

    def pieces(self, data: Buffer | Tensor, numel: int) -> Iterator[Tensor]:
        """Widen each element; a piece of fp32 is a view of `data` itself."""
        size, device = self._dtype.itemsize, data.device if isinstance(data, Tensor) else None
        longest = next((part.stop for part in parts(numel, device)), 0)
        spare = bytearray(longest * size if readonly(data) else 0)
        scratch = torch.empty(0 if self.lossless else longest, dtype=torch.float32, device=device or "cpu")
        for part in parts(numel, device):
            raw = view(data, self._dtype, part.stop - part.start, part.start * size, spare)
            yield raw if self.lossless else scratch[: raw.numel()].copy_(raw)

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        """Select the shard's elements as they are."""
        size, source = self._dtype.itemsize, memoryview(data).cast("B")
        if shard.span is not None:
            start, end = shard.span
            return source[start * size : end * size]
        spare = bytearray(source.nbytes if source.readonly else 0)
        taken = shard.take(view(source, self._dtype, shard.fragment.numel, 0, spare))
        return taken.view(torch.uint8).numpy().data
