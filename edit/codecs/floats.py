"""fp32, bf16, fp16: each element as a raw little-endian float, nothing else.

Rounding is to nearest even. NaN and Inf come out as such. fp16 turns what exceeds 65504 into Inf: a NONFINITE verdict for a
contribution, a rollback for an update. bf16 has the range of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec, flat_fp32, new_buffer, view
from edit.fragments.shards import Shard

__all__ = ["RawFloat"]


class RawFloat(Codec):
    """Elements of one torch float type."""

    granule = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.lossless = dtype == torch.float32
        self._dtype = dtype

    def encoded_size(self, numel: int) -> int:
        """Element size times `numel`."""
        return numel * self._dtype.itemsize

    def encode(self, flat: Tensor) -> memoryview:
        """Round each element."""
        flat = flat_fp32(flat)
        data = new_buffer(self.encoded_size(flat.numel()))
        view(data, self._dtype, flat.numel(), 0, bytearray()).copy_(flat)
        return data

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """Widen each element; fp32 is handed out as it lies in `data`."""
        size = self._dtype.itemsize
        spare = bytearray(min(PIECE, numel) * size if memoryview(data).readonly else 0)
        scratch = torch.empty(0 if self.lossless else min(PIECE, numel), dtype=torch.float32)
        for start in range(0, numel, PIECE):
            raw = view(data, self._dtype, min(PIECE, numel - start), start * size, spare)
            yield raw if self.lossless else scratch[: raw.numel()].copy_(raw)

    def cut(self, data: Buffer, shard: Shard) -> memoryview:
        """The region's elements as they are."""
        size, source = self._dtype.itemsize, memoryview(data).cast("B")
        if shard.span is not None:
            start, end = shard.span
            return source[start * size : end * size]
        spare = bytearray(source.nbytes if source.readonly else 0)
        part = shard.take(view(source, self._dtype, shard.fragment.numel, 0, spare))
        return part.view(torch.uint8).numpy().data
