"""sdd: blocks of the vector as matrices, each as a short sum of d x y' with x and y of -1, 0 and 1.

A semidiscrete decomposition (Kolda and O'Leary, ACM Transactions on Information Systems 16(4), 1998), found term by term: each
is the best that a few alternating steps find for what those before it left. A pseudo-gradient is near a matrix of low rank, so
the terms hold much more of it than as many bits spent on its largest elements. It needs error feedback.
A block is `rows` x `columns` consecutive elements, row after row: `columns` is 128 by default, and rows is as many, at most
2^17 / columns. The last block has as many rows as it needs, and as many terms at most; its last row may be short. A block holds
most where `columns` divides the length of the model's rows.
Layout: planes of one fp32 step per block, a power of two; of the int16 d of its `rank` terms (9 by default); of their x; of
their y: five values t (0: 0, 1: 1, 2: -1) per byte as t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4, where byte j of w bytes has the values
j, j + w, ... Unused values are 0. 490 bytes a block of 16384 (0.239 bits each) with the defaults.
The block is rounded to multiples of its step, 2^-12 of its largest magnitude or less, and all else is arithmetic with whole
numbers that fp64 holds: so the bits are the same on every machine, whatever the order of a sum, and
||x - decoded|| <= ||x|| + 2^-13 sqrt(n) max |x|.
A block with a NaN or Inf has a step of NaN and so decodes to NaN throughout. A byte above 242, an unused value that is not 0
and a step that is not NaN, 0 or a positive power of two are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.base import PIECE, add_weighted
from edit.codecs.blockwise import Blockwise, absmax, divide_scales, with_bits
from edit.config.codec import CodecSpec
from edit.errors import RemoteProtocolError
from edit.kernels import fast

__all__ = ["SemidiscreteSum"]

_STEPS = 13  # the largest magnitude of a block is at most 2^13 steps: so what is left stays below 2^22, and sums below 2^31
_PASSES = 3  # alternating steps for each term
_PLACES = (1, 3, 9, 27, 81)


class SemidiscreteSum(Blockwise):
    """A block as a sum of few products of vectors of -1, 0 and 1."""

    has_kernels = True

    def __init__(self, spec: CodecSpec) -> None:
        values = spec.values()
        self.name, self._columns, self._rank = str(spec), int(values["columns"]), int(values["rank"])
        self.granule = self._columns * min(self._columns, PIECE // self._columns)

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """The step; the d, the x and the y of all terms."""
        rows, terms = self._rows(numel), self._terms(numel)
        return 4, terms * 2, terms * _packed(rows), terms * _packed(self._columns)

    def _rows(self, numel: int) -> int:
        return -(-numel // self._columns)

    def _terms(self, numel: int) -> int:
        """Return how many terms a block has: no more than rows, which are never more than a matrix needs."""
        return min(self._rank, self._rows(numel))

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Find one term after the other; see the module's docstring."""
        count, numel = blocks.shape
        steps, factors, packed_xs, packed_ys = self._views(planes, numel)
        xs = torch.empty(count, factors.shape[1], self._rows(numel), dtype=torch.int8, device=blocks.device)
        ys = torch.empty(count, factors.shape[1], self._columns, dtype=torch.int8, device=blocks.device)
        if (kernels := fast(blocks, steps, factors)) is not None:
            kernels.sdd_encode(*with_bits(blocks), steps.numpy(), factors.numpy(), xs.numpy(), ys.numpy())
        else:
            rest = self._matrices(blocks, steps)
            for k in range(factors.shape[1]):
                d, x, y = _term(rest)
                rest -= d * x * y
                factors[:, k], xs[:, k], ys[:, k] = d.flatten(), x.flatten(1), y.flatten(1)
        _pack(xs, packed_xs)
        _pack(ys, packed_ys)

    def _views(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """View the planes as the steps [count], d [count, terms], and the bytes of x and y [count, terms, bytes]."""
        steps, factors, xs, ys = planes
        count, terms = len(steps), self._terms(numel)
        flat = steps.view(torch.float32).view(-1)
        return flat, factors.view(torch.int16), xs.view(count, terms, -1), ys.view(count, terms, -1)

    def _matrices(self, blocks: Tensor, steps: Tensor) -> Tensor:
        """Return the blocks in whole steps, fp64 [count, rows, columns], and write the steps [count]."""
        absmax(blocks, steps)
        lost = divide_scales(steps)
        exponents, one = torch.frexp(torch.nan_to_num(steps))[1], torch.ones_like(steps)
        in_steps = (blocks * torch.ldexp(one, _STEPS - exponents).unsqueeze(1)).round_()
        steps.copy_(torch.where((steps == 0) | steps.isnan(), steps, torch.ldexp(one, exponents - _STEPS)))
        if lost is not None:
            in_steps.masked_fill_(lost, 0.0)
        short = -in_steps.shape[1] % self._columns
        return torch.nn.functional.pad(in_steps, (0, short)).view(len(blocks), -1, self._columns).to(torch.float64)

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Add the terms up in whole numbers, which is exact; then one product with the step."""
        self._decode(planes, blocks, 1.0, add=False)

    def add_blocks(self, planes: Sequence[Tensor], weight: float, blocks: Tensor) -> None:
        """See `Blockwise.add_blocks`."""
        self._decode(planes, blocks, weight, add=True)

    def _decode(self, planes: Sequence[Tensor], blocks: Tensor, weight: float, *, add: bool) -> None:
        (count, numel), rows = blocks.shape, self._rows(blocks.shape[1])
        steps, factors, packed_xs, packed_ys = self._views(planes, numel)
        _check_steps(steps)
        xs, ys = _unpack(packed_xs, rows), _unpack(packed_ys, self._columns)
        if (kernels := fast(blocks, steps, factors)) is not None:
            kernels.sdd_add(steps.numpy(), factors.numpy(), xs.numpy(), ys.numpy(), weight, add, blocks.numpy())
            return
        total = torch.zeros(count, rows, self._columns, dtype=torch.float32, device=blocks.device)
        for k in range(factors.shape[1]):
            total += (factors[:, k : k + 1] * xs[:, k].to(torch.float32)).unsqueeze(2) * ys[:, k].unsqueeze(1)
        decoded = total.flatten(1)[:, :numel] * steps.unsqueeze(1)
        if add:
            add_weighted(decoded, weight, blocks, decoded)
        else:
            blocks.copy_(decoded)


def _term(rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return d [count, 1, 1], x [count, rows, 1] and y [count, 1, columns] of the next term, whole numbers in fp64."""
    row = _first_largest(rest.abs().sum(2))
    y = _ternary(rest.gather(1, row.view(-1, 1, 1).expand(-1, 1, rest.shape[2])))
    for _ in range(_PASSES):
        x = _ternary((rest * y).sum(2, keepdim=True))
        y = _ternary((rest * x).sum(1, keepdim=True))
    along = ((rest * y).sum(2, keepdim=True) * x).sum((1, 2), keepdim=True)
    squares = x.abs().sum((1, 2), keepdim=True) * y.abs().sum((1, 2), keepdim=True)
    return (along / squares.clamp_(min=1)).round_().clamp_(-32767, 32767), x, y


def _ternary(values: Tensor) -> Tensor:
    """Return the signs of those of at least three quarters of the mean magnitude of a vector, 0 for the others; exact.

    values: [count, n, 1] or [count, 1, n], whole numbers.
    """
    magnitudes = values.abs()
    numel = values.shape[1] * values.shape[2]
    return values.sign() * (magnitudes * (4 * numel) >= 3 * magnitudes.sum((1, 2), keepdim=True))


def _first_largest(rows: Tensor) -> Tensor:
    """Return the index of the largest of each row [count, n], of equal ones the first."""
    at = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device).expand_as(rows)
    return torch.where(rows == rows.amax(1, keepdim=True), at, rows.shape[1]).amin(1)


def _packed(values: int) -> int:
    return -(-values // len(_PLACES))


def _pack(values: Tensor, out: Tensor) -> None:
    """Pack int8 -1, 0, 1 [.., n] into uint8 [.., w], w = ceil(n / 5): byte j has the values j, j + w, j + 2 w, ..."""
    width = out.shape[-1]
    digits = torch.nn.functional.pad(values % 3, (0, width * len(_PLACES) - values.shape[-1])).to(torch.uint8)
    digits = digits.view(*values.shape[:-1], len(_PLACES), width)
    out.copy_((digits * torch.tensor(_PLACES, dtype=torch.uint8, device=out.device).unsqueeze(1)).sum(-2))


def _unpack(packed: Tensor, numel: int) -> Tensor:
    """Return the values that `_pack` packed, int8 [.., numel]. Raises RemoteProtocolError for what it never makes."""
    if bool((packed > 242).any()):
        raise RemoteProtocolError("a byte above 242 is not five values of three")
    values = torch.cat([packed // place % 3 for place in _PLACES], -1)
    if bool(values[..., numel:].any()):
        raise RemoteProtocolError("unused values are not zero")
    values = values[..., :numel].to(torch.int8)
    return torch.where(values == 2, -1, values).contiguous()


def _check_steps(steps: Tensor) -> None:
    """Raise RemoteProtocolError unless each is NaN, 0 or a positive power of two."""
    fractions = torch.frexp(torch.nan_to_num(steps, nan=1.0, posinf=-1.0))[0]
    if bool(((fractions != 0.5) & (steps != 0)).any()):
        raise RemoteProtocolError("a step is not a power of two")
