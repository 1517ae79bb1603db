"""How a residual is stored: what a codec left out of one vector, in fp32, bf16 or int8.

fp32 keeps it to the bit. bf16 (2 bytes for each element) and int8 (1.016) round what is written: the formats are those of the
codecs of these names, in the same bytes on every machine. A residual is small beside the vectors that it is added to, and what
is rounded away here was rounded away once already, so it is lost and not owed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import PIECE, new_vector, parts
from edit.codecs.int8 import BlockInt8
from edit.config.codec import RESIDUAL_FORMS, CodecSpec
from edit.errors import StorageError

__all__ = ["Residual", "owing"]

_DTYPES = dict(zip(RESIDUAL_FORMS, (torch.float32, torch.bfloat16, torch.uint8), strict=True))
_INT8 = BlockInt8(CodecSpec("int8"))


def owing(delta: Tensor, residual: Tensor | None, decay: float, out: Tensor) -> Tensor:
    """Return u = delta + decay * e in `out`. residual: e, None counts as zero. All are flat fp32 of one shape."""
    if residual is None:
        return out.copy_(delta)
    return torch.add(delta, residual if decay == 1 else residual * decay, out=out)


class Residual:
    """The residual e of one flat fp32 vector, zero at first; read and written in the pieces of `edit.codecs.base.parts`.

    numel: of the vector. form: one of `edit.config.codec.RESIDUAL_FORMS`. pinned: in memory that a GPU reads and writes faster.
    """

    __slots__ = ("_data", "form", "numel")

    def __init__(self, numel: int, form: str = "fp32", *, pinned: bool = False) -> None:
        self.numel = numel
        self.form = form
        # int8: the bytes of that codec. All bytes 0 are the vector 0 in every form.
        size, dtype = _size(numel, form), _DTYPES[form]
        if pinned:
            self._data = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
        else:
            self._data = new_vector(size, dtype, zeros=True)

    @classmethod
    def of(cls, tensor: Tensor, numel: int, form: str | None = None) -> Residual:
        """Return a residual in `form` with what `tensor`, that of another one, holds: to the bit in its own form, else rounded.

        form: None is the tensor's own.

        Raises StorageError when it is not the tensor of a residual of `numel` elements.
        """
        stored = next((one for one, dtype in _DTYPES.items() if dtype == tensor.dtype), None)
        if stored is None or tuple(tensor.shape) != (_size(numel, stored),):
            raise StorageError(f"{list(tensor.shape)} {tensor.dtype} is not the residual of {numel} elements")
        residual = cls(numel, form or stored)
        if stored == residual.form:
            residual._data.copy_(tensor)
            return residual
        source = cls.__new__(cls)
        source.numel, source.form, source._data = numel, stored, tensor.cpu()
        for part, piece in source.pieces():
            residual.write(part, piece)
        return residual

    def copy(self) -> Residual:
        """Return one that can be written without this one."""
        return Residual.of(self._data, self.numel)

    @property
    def tensor(self) -> Tensor:
        """All of it for a checkpoint, shared: fp32 or bf16 [numel]; int8: uint8, the bytes that the codec int8 makes of it."""
        return self._data

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""
        return self._data.nbytes

    def read(self, part: slice, device: torch.device | None = None) -> Tensor:
        """Return one piece in fp32 on `device` (None: the CPU), only to be read: e itself where that is it, else new memory.

        A copy to a GPU is queued on its current stream; e must stay as it is until that is done.
        """
        if self.form != "int8":
            return self._data[part].to(device=device, non_blocking=True).to(torch.float32)
        piece = torch.empty(part.stop - part.start, dtype=torch.float32, device="cpu")
        _INT8.decode_part(self._data.numpy().data, self.numel, part.start, piece)
        return piece.to(device=device)

    def write(self, part: slice, piece: Tensor) -> None:
        """e[part] = piece (fp32, not changed, on any device), rounded to the form. From a GPU: queued, as in `read`."""
        if self.form == "int8":
            _INT8.encode_part(piece.cpu(), self._data.numpy().data, self.numel, part.start)
        else:
            self._data[part].copy_(piece.to(self._data.dtype), non_blocking=True)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each part and what `read` returns for it."""
        return ((part, self.read(part)) for part in parts(self.numel))


def _size(numel: int, form: str) -> int:
    return _INT8.encoded_size(numel) if form == "int8" else numel


assert PIECE % _INT8.granule == 0  # so that no block lies in two parts
