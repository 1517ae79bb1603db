"""The grid of a masked round: integers that sum up exactly, modulo 2^bits, on a grid that all peers know.

Not a format of `[codec]`: what an element means depends on the round's plan (`edit.trust.mask_plan`) and on the peer's weight,
which are not in the bytes. The formulas are `edit.trust.mask_grid`'s. Bytes: one little-endian word for each element, then 8
lanes (`edit.trust.masks`): of the whole replica at the rank that has the fragment's first element, zeros at the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edit.codecs.base import Buffer, Codec, parts
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.shards import Shard
from edit.trust.mask_grid import BLOCK, dequantise, quantise
from edit.trust.masks import LANES, Words, as_words, signed, word_type

__all__ = ["GridCodec", "MaskedCodec", "lanes_in", "words_in"]


class MaskedCodec(Codec):
    """The words of a masked vector, which nobody can decode: `masked8`, `masked16` or `masked32`."""

    lossless = False
    granule = 1

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"masked{bits}"

    def encoded_size(self, numel: int) -> int:
        return (numel + LANES) * self.bits // 8

    def encode_part(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> None:
        raise LocalProtocolError(f"{self.name}: an aggregator encodes no masked vector")

    def pieces(self, data: Buffer | Tensor, numel: int) -> Iterator[Tensor]:
        raise RemoteProtocolError(f"{self.name}: a masked vector cannot be decoded, the sum of all can")

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        raise RemoteProtocolError(f"{self.name}: a masked vector is not cut")


class GridCodec(MaskedCodec):
    """One peer's vectors on the grid of one round: q = clamp(round(w u / s), -L, L), which decodes to s q / w.

    Args:
        bits: of a word, 8, 16 or 32.
        limit: L.
        exponents: of s, one per `block` elements of the vector.
        weight: w; 0: whatever the vector is, zeros are sent.
        block: elements that share an exponent.
    """

    def __init__(self, bits: int, limit: int, exponents: NDArray[np.int8], weight: float, block: int = BLOCK) -> None:
        super().__init__(bits)
        self._limit, self._exponents, self._weight, self._block = limit, exponents, weight, block

    def encode_part(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> None:
        words, end = words_in(data, self.bits)[:numel], start + part.numel()
        if self._weight == 0:
            words[start:end] = 0
            return
        integers = quantise(part.numpy(), self._weight, self._of(start, end), self._limit, self._block)
        words[start:end] = as_words(integers, self.bits)

    def pieces(self, data: Buffer | Tensor, numel: int) -> Iterator[Tensor]:
        words = words_in(data, self.bits)
        for part in parts(numel):
            exponents = self._of(part.start, part.stop)
            yield torch.from_numpy(dequantise(signed(words[part]), self._weight, exponents, self._block))

    def _of(self, start: int, end: int) -> NDArray[np.int8]:
        """Return the exponents of elements [start, end); start: a multiple of the block, as those of `parts` are."""
        return self._exponents[start // self._block : -(-end // self._block)]


def words_in(data: Buffer | Tensor, bits: int) -> Words:
    """Return the words of an encoded vector, lanes included; they share its memory."""
    if isinstance(data, Tensor):
        if data.device.type != "cpu":
            raise LocalProtocolError("masked vectors are made on the CPU")
        words: Words = data.numpy().view(word_type(bits))
        return words
    return np.frombuffer(data, word_type(bits))


def lanes_in(data: Buffer, bits: int) -> Words:
    """Return the lanes of an encoded vector; they share its memory."""
    return words_in(data, bits)[-LANES:]
