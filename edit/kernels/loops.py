"""The loops themselves, as numba compiles them: one pass over contiguous arrays each. As Python they are right, but slow.

Blocks are fp32 [rows, numel], with one fp32 scale and one integer per element, as in `edit.codecs.int8` and `int4`; what is
written is what the torch code there writes, to the bit. So every operation on floats is one of fp32, rounded by itself, and
in a fixed order: no sum over a row. An array that is read as integers, too, comes in twice. Those of `edit.codecs.sdd` count
in whole numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["SIGNATURES"]

_ONE, _ZERO, _NAN = np.float32(1), np.float32(0), np.float32(np.nan)
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float but its sign
_INFINITE = np.int32(0x7F800000)  # the bits of Inf; those of a NaN are larger
_TINY = np.float32(2.0**-100).view(np.int32)  # `edit.codecs.blockwise`
_INT8 = np.float32(127)
_INT4 = np.float32(7)
_CODE = np.float32(8)  # int4: the code of 0

Array = Any  # numba compiles for the types in SIGNATURES

SIGNATURES = {
    "int8_encode": "void(f4[:,::1], i4[:,::1], f4[::1], i4[::1], i1[:,::1])",
    "int8_decode": "void(f4[::1], i1[:,::1], f4[:,::1])",
    "int8_add": "void(f4[::1], i1[:,::1], f4, f4[:,::1])",
    "int4_encode": "void(f4[:,::1], i4[:,::1], f4[::1], i4[::1], u1[:,::1])",
    "int4_decode": "void(f4[::1], u1[:,::1], f4[:,::1])",
    "int4_add": "void(f4[::1], u1[:,::1], f4, f4[:,::1])",
    "int8_add_squares": "void(f4[::1], i1[:,::1], i8, f4[::1])",
    "add_squares": "void(f4[::1], f4[::1])",
    "gram": "void(f4[:,::1], f4[:,::1])",
    "largest": "i4(i4[::1])",
    "sdd_encode": "void(f4[:,::1], i4[:,::1], f4[::1], i2[:,::1], i1[:,:,::1], i1[:,:,::1])",
    "sdd_add": "void(f4[::1], i2[:,::1], i1[:,:,::1], i1[:,:,::1], f4, b1, f4[:,::1])",
}


def int8_encode(blocks: Array, bits: Array, scales: Array, scale_bits: Array, values: Array) -> None:
    """Quantise blocks to scales and integers. bits, scale_bits: blocks and scales as int32."""
    for row in range(blocks.shape[0]):
        block, block_bits, integers = blocks[row], bits[row], values[row]
        largest = np.int32(0)
        for i in range(block.shape[0]):
            largest = max(largest, block_bits[i] & _MAGNITUDE)
        if largest < _TINY or largest >= _INFINITE:
            scales[row] = _ZERO if largest < _TINY else _NAN
            for i in range(block.shape[0]):
                integers[i] = 0
        else:
            scale_bits[row] = largest
            factor = (_ONE / scales[row]) * _INT8
            for i in range(block.shape[0]):
                integers[i] = np.int8(np.rint(block[i] * factor))
            scales[row] /= _INT8


def int8_decode(scales: Array, values: Array, blocks: Array) -> None:
    """blocks = values * scales."""
    for row in range(blocks.shape[0]):
        block, integers, scale = blocks[row], values[row], scales[row]
        for i in range(block.shape[0]):
            block[i] = np.float32(integers[i]) * scale


def int8_add(scales: Array, values: Array, weight: Any, blocks: Array) -> None:
    """blocks += weight * (values * scales)."""
    for row in range(blocks.shape[0]):
        block, integers, scale = blocks[row], values[row], scales[row]
        for i in range(block.shape[0]):
            block[i] += (np.float32(integers[i]) * scale) * weight


def int4_encode(blocks: Array, bits: Array, scales: Array, scale_bits: Array, packed: Array) -> None:
    """Quantise blocks of an even number of elements to scales and packed codes; byte j has the codes j and j + half."""
    half = packed.shape[1]
    for row in range(blocks.shape[0]):
        block, block_bits, codes = blocks[row], bits[row], packed[row]
        largest = np.int32(0)
        for i in range(block.shape[0]):
            largest = max(largest, block_bits[i] & _MAGNITUDE)
        if largest < _TINY or largest >= _INFINITE:
            scales[row] = _ZERO if largest < _TINY else _NAN
            for i in range(half):
                codes[i] = 0x88
        else:
            scale_bits[row] = largest
            factor = (_ONE / scales[row]) * _INT4
            for i in range(half):
                low = np.uint8(np.rint(block[i] * factor) + _CODE)
                codes[i] = low | np.uint8(np.rint(block[half + i] * factor) + _CODE) << np.uint8(4)
            scales[row] /= _INT4


def int4_decode(scales: Array, packed: Array, blocks: Array) -> None:
    """blocks = (codes - 8) * scales."""
    half = packed.shape[1]
    for row in range(blocks.shape[0]):
        block, codes, scale = blocks[row], packed[row], scales[row]
        for i in range(half):
            block[i] = (np.float32(codes[i] & 15) - _CODE) * scale
        for i in range(half):
            block[half + i] = (np.float32(codes[i] >> 4) - _CODE) * scale


def int4_add(scales: Array, packed: Array, weight: Any, blocks: Array) -> None:
    """blocks += weight * ((codes - 8) * scales)."""
    half = packed.shape[1]
    for row in range(blocks.shape[0]):
        block, codes, scale = blocks[row], packed[row], scales[row]
        for i in range(half):
            block[i] += ((np.float32(codes[i] & 15) - _CODE) * scale) * weight
        for i in range(half):
            block[half + i] += ((np.float32(codes[i] >> 4) - _CODE) * scale) * weight


def int8_add_squares(scales: Array, values: Array, start: int, lanes: Array) -> None:
    """Add the square of each element to its lane. start: where the first one stands; no block lies at two ends of the lanes."""
    for row in range(values.shape[0]):
        integers, scale, first = values[row], scales[row], (start + row * values.shape[1]) % lanes.shape[0]
        block = lanes[first : first + values.shape[1]]
        for i in range(block.shape[0]):
            element = np.float32(integers[i]) * scale
            block[i] += element * element


def add_squares(flat: Array, lanes: Array) -> None:
    """Add the square of each element to its lane, in ascending order: lanes[i mod number of lanes] += flat[i] * flat[i]."""
    for start in range(0, flat.shape[0], lanes.shape[0]):
        piece = flat[start : start + lanes.shape[0]]
        for i in range(piece.shape[0]):
            lanes[i] += piece[i] * piece[i]


def gram(rows: Array, lanes: Array) -> None:
    """Add the products of each two rows to the lanes of the pair, in ascending order: (0, 0), (1, 0), (1, 1), (2, 0), ...

    lanes[pair, i mod lanes of a pair] += rows[a, i] * rows[b, i]
    """
    width, numel = lanes.shape[1], rows.shape[1]
    for start in range(0, numel, 8 * width):
        end = min(start + 8 * width, numel)
        pair = 0
        for a in range(rows.shape[0]):
            for b in range(a + 1):
                out = lanes[pair]
                pair += 1
                for first in range(start, end, width):
                    left = rows[a, first : min(first + width, end)]
                    right = rows[b, first : min(first + width, end)]
                    for i in range(left.shape[0]):
                        out[i] += left[i] * right[i]


def largest(bits: Array) -> Any:
    """Return the bits of the largest magnitude among floats, given as int32; those of a NaN are larger than those of Inf."""
    found = np.int32(0)
    for i in range(bits.shape[0]):
        found = max(found, bits[i] & _MAGNITUDE)
    return found


def sdd_encode(blocks: Array, bits: Array, steps: Array, factors: Array, xs: Array, ys: Array) -> None:
    """Find the terms d x y' of each block: factors [rows of blocks, terms], xs [.., terms, rows], ys [.., terms, columns]."""

    def ternary(values: Array, out: Array) -> None:
        """The signs of those of at least three quarters of the mean magnitude, 0 for the others."""
        sum_ = np.int64(0)
        for i in range(values.shape[0]):
            sum_ += abs(values[i])
        for i in range(values.shape[0]):
            out[i] = np.sign(values[i]) if 4 * values.shape[0] * np.int64(abs(values[i])) >= 3 * sum_ else 0

    def times(matrix: Array, vector: Array, out: Array) -> None:
        for i in range(matrix.shape[0]):
            sum_ = np.int32(0)
            for j in range(matrix.shape[1]):
                sum_ += matrix[i, j] * np.int32(vector[j])
            out[i] = sum_

    terms, rows, columns = factors.shape[1], xs.shape[2], ys.shape[2]
    rest, along, across = np.empty((rows, columns), np.int32), np.empty(rows, np.int32), np.empty(columns, np.int32)
    flat = rest.reshape(rows * columns)
    for b in range(blocks.shape[0]):
        block, block_bits = blocks[b], bits[b]
        largest = np.int32(0)
        for i in range(block.shape[0]):
            largest = max(largest, block_bits[i] & _MAGNITUDE)
        flat[:] = 0
        if largest < _TINY or largest >= _INFINITE:
            steps[b] = _ZERO if largest < _TINY else _NAN
        else:
            exponent = (int(largest) >> 23) - 126 - 13  # of the step
            steps[b] = np.float32(2.0**exponent)
            factor = np.float32(2.0**-exponent)
            for i in range(block.shape[0]):
                flat[i] = np.int32(np.rint(block[i] * factor))
        for k in range(terms):
            x, y = xs[b, k], ys[b, k]
            first, most = 0, np.int32(-1)
            for i in range(rows):
                weight = np.int32(0)
                for j in range(columns):
                    weight += abs(rest[i, j])
                if weight > most:
                    first, most = i, weight
            ternary(rest[first], y)
            for _ in range(3):
                times(rest, y, along)
                ternary(along, x)
                across[:] = 0
                for i in range(rows):
                    if x[i] > 0:
                        for j in range(columns):
                            across[j] += rest[i, j]
                    elif x[i] < 0:
                        for j in range(columns):
                            across[j] -= rest[i, j]
                ternary(across, y)
            times(rest, y, along)
            dot, of_x, of_y = 0, 0, 0
            for i in range(rows):
                dot += np.int64(along[i]) * x[i]
                of_x += abs(x[i])
            for j in range(columns):
                of_y += abs(y[j])
            d = np.int32(min(32767.0, max(-32767.0, np.rint(np.float64(dot) / np.float64(max(1, of_x * of_y))))))
            factors[b, k] = d
            for i in range(rows):
                if x[i] != 0:
                    step = d * np.int32(x[i])
                    for j in range(columns):
                        rest[i, j] -= step * np.int32(y[j])


def sdd_add(steps: Array, factors: Array, xs: Array, ys: Array, weight: Any, add: Any, blocks: Array) -> None:
    """blocks += weight * what the terms add up to, or, unless `add`, blocks = that. See `sdd_encode`."""
    terms, rows, columns = factors.shape[1], xs.shape[2], ys.shape[2]
    total = np.empty(columns, np.int32)
    for b in range(blocks.shape[0]):
        block, unit = blocks[b], steps[b]
        for i in range(rows):
            total[:] = 0
            for k in range(terms):
                if xs[b, k, i] != 0:
                    step, y = np.int32(factors[b, k]) * np.int32(xs[b, k, i]), ys[b, k]
                    for j in range(columns):
                        total[j] += step * np.int32(y[j])
            start = i * columns
            out = block[start : start + columns]
            if add:
                for j in range(out.shape[0]):
                    out[j] += (np.float32(total[j]) * unit) * weight
            else:
                for j in range(out.shape[0]):
                    out[j] = np.float32(total[j]) * unit
