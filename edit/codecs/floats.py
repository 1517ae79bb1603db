"""fp32, bf16, fp16: each element as a raw little-endian float, nothing else.

Rounding is to nearest even. NaN and Inf come out as such. fp16 turns what exceeds 65504 into Inf: a NONFINITE verdict for a
contribution, a rollback for an update. bf16 has the range of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec, new_buffer, view
from edit.config.codec import CodecSpec
from edit.fragments.schema import FragmentSpec
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

    def to_bytes(self, flat: Tensor, fragment: FragmentSpec) -> memoryview:
        """Round each element."""
        data = new_buffer(self.encoded_size(flat.numel()))
        view(data, self._dtype, flat.numel(), 0, bytearray()).copy_(flat)
        return data

    def encode_part(self, part: Tensor, data: Buffer, numel: int, start: int) -> None:
        """Round each element of the part."""
        view(data, self._dtype, part.numel(), start * self._dtype.itemsize, bytearray()).copy_(part)

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """Widen each element; a piece of fp32 is a view of `data` itself."""
        size = self._dtype.itemsize
        spare = bytearray(min(PIECE, numel) * size if memoryview(data).readonly else 0)
        scratch = torch.empty(0 if self.lossless else min(PIECE, numel), dtype=torch.float32)
        for start in range(0, numel, PIECE):
            raw = view(data, self._dtype, min(PIECE, numel - start), start * size, spare)
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
