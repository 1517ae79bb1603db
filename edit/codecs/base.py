"""The Codec protocol: the methods that a format implements, and what follows from them for every format.

All formats are little-endian, as every machine that torch is built for here; `edit.codecs.codec` refuses another byte order.

A vector may be on the CPU or on a CUDA device, and is encoded and decoded where it is; encoded bytes are on the CPU. A format
is written in torch operations that round alike on both, and off the CPU it reads no value back: all that the host waits for is
one copy of the bytes, at the end. Only a decoder looks at what it may have to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from edit.codecs.blocks import covering_numel, gather
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard
from edit.heaps import MAPPED_BYTES, mapping
from edit.records import EncodedTensor

__all__ = [
    "PIECE",
    "Adder",
    "Buffer",
    "Codec",
    "add_squares",
    "add_weighted",
    "new_buffer",
    "new_vector",
    "on_cpu",
    "parts",
    "readonly",
    "view",
]

Buffer = bytes | bytearray | memoryview

# Elements handled at a time, so that they stay in the cache from one operation on them to the next: 512 KiB of fp32 on the CPU;
# 32 MiB on a GPU, where each operation has to be long beside its launch.
PIECE = 1 << 17
_DEVICE_PIECE = 1 << 23


Adder = Callable[[slice, Tensor], None]  # takes a part, and what it adds to: fp32, as long as the part


class Codec(Protocol):
    """One format for flat fp32 vectors. It has no state.

    A new format is a class that derives from this one, sets the three attributes and implements `encoded_size`,
    `encode_part`, `pieces` and `cut_bytes`; it is made from a `CodecSpec` by a line in `edit.codecs`.
    """

    # The text of its CodecSpec, by which an EncodedTensor names it.
    name: str
    # decode(encode(x)) is x to the bit, so error feedback keeps no residual.
    lossless: bool
    # Elements in a block, which has bytes of its own; 1 where each element stands alone.
    granule: int

    # ---- what a format implements ----

    def encoded_size(self, numel: int) -> int:
        """Return the exact number of bytes that encode `numel` elements."""
        ...

    def encode_part(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> None:
        """Write fp32 `part`, the elements from `start` on, into `data`, `encoded_size(numel)` writable bytes of all of them.

        start: a multiple of `granule`; `part` ends at one too, or at the end of the vector. All parts make what `encode` makes,
        and `pieces` decodes a piece when it comes to it, so it may follow piece by piece.
        data: memory of the CPU, or flat uint8 on the device of `part`.
        An element that is not finite decodes to one that is not finite.
        """
        ...

    def pieces(self, data: Buffer | Tensor, numel: int) -> Iterator[Tensor]:
        """Decode as many elements at a time as `parts` says, in order. A tensor is uint8 and decoded on its device.

        Raises RemoteProtocolError for bytes of the right length that `encode` never makes, as far as the format tells them.
        A piece is fp32 and valid until the next one. A piece of a lossless codec may be `data` itself and is only to be read;
        any other is scratch that the caller may overwrite. The length of `data` has been checked.
        """
        ...

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        """Select the bytes of a shard from `data`, which encodes its whole fragment; may share `data`'s memory.

        granule 1: exactly the shard, in its own order. Else: all blocks that it touches, ascending (see
        `edit.codecs.blocks`), which is again a vector in this format. The length of `data` has been checked.
        """
        ...

    # ---- what follows ----

    def encode(self, flat: Tensor, fragment: FragmentSpec) -> EncodedTensor:
        """Encode a flat fp32 tensor of at least 0 elements, on the CPU or a CUDA device, into bytes on the CPU.

        Same input, same bytes, on any CPU and device; but which NaN bf16 and fp16 make of one is left to these. From a CUDA
        device the bytes are copied once, into pinned memory, on the current stream, for which this waits.
        fragment: of which `flat` is the vector, or a rank's shard of it. The size depends on the number of elements alone.
        Raises LocalProtocolError for another shape, dtype or device.
        """
        if flat.ndim != 1 or flat.dtype != torch.float32 or flat.device.type not in ("cpu", "cuda"):
            raise LocalProtocolError(
                f"a codec takes a flat fp32 tensor on the CPU or CUDA, not {list(flat.shape)} {flat.dtype} on {flat.device}"
            )
        data = device_buffer(self.encoded_size(flat.numel()), flat.device)
        flat = flat.detach().contiguous()
        for part in self.passes(flat):
            self.encode_part(flat[part], data, flat.numel(), part.start)
        return EncodedTensor(self.name, flat.numel(), fetched(data))

    def decode(self, encoded: EncodedTensor, device: torch.device | None = None) -> Tensor:
        """Decode into a new fp32 tensor on `device` (None: the CPU), shape [numel]. Raises as `decode_pieces`."""
        pieces = self.decode_pieces(encoded, device)
        out = torch.empty(encoded.numel, dtype=torch.float32, device=device or "cpu")
        for part, piece in zip(parts(encoded.numel, device), pieces, strict=True):
            out[part] = piece
        return out

    def decode_add(self, encoded: EncodedTensor, out: Tensor, weight: float) -> None:
        """out += weight * decode(encoded), in place, on out's device, rounded after the product and after the sum.

        Raises as `decode`; `out` may then have changed.
        """
        add = self.adder(encoded, weight, out.device)
        for part in parts(encoded.numel, out.device):
            add(part, out[part])

    def adder(self, encoded: EncodedTensor, weight: float, device: torch.device | None = None) -> Adder:
        """Return what does as `decode_add` for one part after the other: out += weight * part. All of `parts`, in order.

        Raises as `decode`, where the wrong length is told at once.
        """
        pieces, scratch = self.decode_pieces(encoded, device), torch.empty(0, dtype=torch.float32, device=device or "cpu")

        def add(part: slice, out: Tensor) -> None:
            nonlocal scratch
            piece = next(pieces)
            if self.lossless and scratch.numel() == 0:
                scratch = torch.empty_like(piece)
            add_weighted(piece, weight, out, scratch[: piece.numel()] if self.lossless else piece)

        return add

    def add_squares(self, encoded: EncodedTensor, lanes: Tensor) -> None:
        """Add the square of decoded element i to lanes[i mod PIECE], i ascending; both are rounded. lanes: fp32, on the CPU.

        Raises as `decode`; `lanes` may then have changed.
        """
        scratch = torch.empty(lanes.numel() if self.lossless else 0, dtype=torch.float32, device="cpu")
        for piece in self.decode_pieces(encoded):
            add_squares(piece, lanes, scratch[: piece.numel()] if self.lossless else piece)

    def passes(self, flat: Tensor) -> Iterator[slice]:
        """Yield the parts in which all of `flat` is encoded or decoded: as `parts`, or at once where one pass does it all."""
        return parts(flat.numel(), flat.device)

    def decode_pieces(self, encoded: EncodedTensor, device: torch.device | None = None) -> Iterator[Tensor]:
        """Decode on `device` (None: the CPU) as many elements at a time as `parts` says, see `pieces`.

        A device gets the bytes in one copy, on its current stream; they must stay as they are until it has done so.
        Raises RemoteProtocolError for another length, and as `pieces`.
        """
        return self.pieces(self.checked(encoded, device), encoded.numel)

    def checked(self, encoded: EncodedTensor, device: torch.device | None = None) -> Buffer | Tensor:
        """Return the bytes, on `device` in one copy. Raises RemoteProtocolError for another length than this format's."""
        size, numel = memoryview(encoded.data).nbytes, encoded.numel
        if numel < 0 or size != self.encoded_size(numel):
            raise RemoteProtocolError(f"{size} bytes cannot be {numel} elements in {self.name}")
        return encoded.data if device is None or device.type == "cpu" else _send(encoded.data, device)

    def cut(self, encoded: EncodedTensor, shard: Shard) -> EncodedTensor:
        """Return the shortest run of blocks of an encoded fragment that covers the shard; `encoded` itself for the whole of it.

        Element-wise codecs: exactly the shard, in its order. Same shard, same bytes; they may share memory with `encoded`.
        Raises LocalProtocolError when `encoded` is not the shard's fragment.
        """
        if (shard.fragment.numel, self.encoded_size(encoded.numel)) != (encoded.numel, memoryview(encoded.data).nbytes):
            raise LocalProtocolError(
                f"{encoded.numel} elements are not fragment {shard.fragment.name} ({shard.fragment.numel})"
            )
        if shard.is_whole:
            return encoded
        return EncodedTensor(self.name, self.cut_numel(shard), self.cut_bytes(encoded.data, shard))

    def cut_numel(self, shard: Shard) -> int:
        """Return how many elements `cut` leaves of the shard's fragment."""
        return covering_numel(shard, self.granule)

    def check_shard(self, encoded: EncodedTensor, shard: Shard) -> None:
        """Raise RemoteProtocolError unless `encoded` has as many elements as `cut` leaves for the shard."""
        if encoded.numel != (expected := self.cut_numel(shard)):
            raise RemoteProtocolError(f"fragment {shard.fragment.name}: {encoded.numel} elements instead of {expected}")

    def decode_shard(self, encoded: EncodedTensor, shard: Shard) -> Tensor:
        """Decode what `cut` returned for a shard: fp32, shape [shard.numel].

        Raises RemoteProtocolError when it has another number of elements than was cut, or another length.
        """
        self.check_shard(encoded, shard)
        flat = self.decode(encoded)
        return flat if self.granule == 1 or shard.is_whole else gather(shard, flat, self.granule)


def parts(numel: int, device: torch.device | None = None) -> Iterator[slice]:
    """Yield where the pieces of `Codec.pieces` on `device` (None: the CPU) stand in a vector of `numel` elements."""
    size = PIECE if device is None or device.type == "cpu" else _DEVICE_PIECE
    return (slice(start, min(numel, start + size)) for start in range(0, numel, size))


def add_weighted(decoded: Tensor, weight: float, out: Tensor, scratch: Tensor) -> None:
    """out += weight * decoded, rounded after the product and after the sum. scratch: as long, perhaps `decoded` itself."""
    if weight == -1:  # the product is exact
        out.sub_(decoded)
    else:
        out.add_(decoded if weight == 1 else torch.mul(decoded, weight, out=scratch))


def add_squares(piece: Tensor, lanes: Tensor, scratch: Tensor) -> None:
    """lanes += piece * piece, as far as the piece goes, rounded twice. scratch: as long, perhaps `piece` itself."""
    lanes[: piece.numel()].add_(torch.mul(piece, piece, out=scratch))


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a value of the tensor can be looked at without waiting for a device."""
    return tensor.device.type == "cpu"


def new_buffer(size: int) -> memoryview:
    """Return `size` writable bytes of arbitrary contents. Large ones are no part of a heap, and leave no hole in it."""
    if size >= MAPPED_BYTES:
        return memoryview(mapping(size))
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data  # a bytearray would clear its memory first


def new_vector(numel: int, dtype: torch.dtype = torch.float32, *, zeros: bool = False) -> Tensor:
    """Return a flat tensor on the CPU, in memory like that of `new_buffer`. zeros: of zeros, else of any contents."""
    if (size := numel * dtype.itemsize) >= MAPPED_BYTES:
        return torch.frombuffer(mapping(size), dtype=dtype)
    return (torch.zeros if zeros else torch.empty)(numel, dtype=dtype, device="cpu")


def readonly(data: Buffer | Tensor) -> bool:
    """Return whether `view` needs a spare for it."""
    return not isinstance(data, Tensor) and memoryview(data).readonly


def device_buffer(size: int, device: torch.device) -> Buffer | Tensor:
    """Return what `new_buffer` does, or `size` uint8 on another device."""
    return new_buffer(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)


def fetched(data: Buffer | Tensor) -> Buffer:
    """Return bytes on the CPU: `data` itself, or one copy of contiguous uint8 in pinned memory."""
    if not isinstance(data, Tensor):
        return data
    if not on_cpu(data):
        host = torch.empty(data.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        host.copy_(data, non_blocking=True)
        torch.cuda.current_stream(data.device).synchronize()
        data = host
    return data.numpy().data


def _send(data: Buffer, device: torch.device) -> Tensor:
    """Copy bytes to a device, flat uint8, on its current stream."""
    source = memoryview(data).cast("B")
    if source.readonly:  # torch takes no such memory
        host = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        host.numpy()[:] = np.frombuffer(source, dtype=np.uint8)
    else:
        host = view(source, torch.uint8, source.nbytes, 0, bytearray())
    return host.to(device, non_blocking=True)


def view(data: Buffer | Tensor, dtype: torch.dtype, count: int, offset: int, spare: bytearray) -> Tensor:
    """View `count` elements of `data` from byte `offset` as a tensor that shares its memory.

    Read-only data is first copied into `spare`, which must be large enough. A tensor is flat uint8.
    """
    if isinstance(data, Tensor):
        return data[offset : offset + count * dtype.itemsize].view(dtype)
    source = memoryview(data).cast("B")
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if not source.readonly:
        return torch.frombuffer(source, dtype=dtype, count=count, offset=offset)
    size = count * dtype.itemsize
    memoryview(spare)[:size] = source[offset : offset + size]
    return torch.frombuffer(spare, dtype=dtype, count=count)
