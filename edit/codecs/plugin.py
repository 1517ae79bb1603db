"""A codec that is a plug-in: blocks of equal size to blocks of equal bytes. The rest follows from that, as it does for int8.

The plug-in says once how many elements and bytes a block has. So the size of whatever it encodes is known before any of it is
there, and no bytes of others make this process take more memory than the run's model says.

Layout: one plane, block after block; a vector's last block is filled up with zeros. Whatever the plug-in returns is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from edit import plugins
from edit.codecs.blockwise import Blockwise
from edit.config.codec import CodecSpec
from edit.errors import PluginError, RemoteProtocolError

__all__ = ["BlockFormat", "PluginCodec"]

_GRANULES = tuple(1 << power for power in range(1, 15))  # they divide PIECE
_TESTED = 3  # blocks


class BlockFormat(Protocol):
    """What an entry point of the group `edit.codecs` returns when it is called with its CodecSpec. It has no state."""

    # Elements in a block: a power of two from 2 to 2^14.
    granule: int
    # Bytes of an encoded block: at most those of its elements in fp32.
    block_bytes: int

    def encode(self, blocks: Tensor) -> Tensor:
        """Return uint8 [rows, block_bytes] for fp32 [rows, granule], on the same device. `blocks` is only to be read.

        The same values give the same bytes on every machine and device, however many rows come at a time. A block with an
        element that is not finite decodes to one with an element that is not.
        """
        ...

    def decode(self, data: Tensor) -> Tensor:
        """Return fp32 [rows, granule] for uint8 [rows, block_bytes], on the same device; the bytes may be anything.

        Raises ValueError for bytes that `encode` never makes.
        """
        ...


class PluginCodec(Blockwise):
    """A plug-in's BlockFormat as a codec. Raises PluginError for one that breaks its contract on a few blocks."""

    def __init__(self, plugin: plugins.Plugin, spec: CodecSpec) -> None:
        self._plugin = plugin
        _, made = plugins.make("codecs", spec.name, spec)
        self._format: Any = made
        with plugins.blame(plugin):
            granule, size = made.granule, made.block_bytes
        if not isinstance(granule, int) or granule not in _GRANULES:
            raise PluginError(f"{plugin}: granule = {granule!r:.40}: must be a power of two from 2 to {_GRANULES[-1]}")
        if not isinstance(size, int) or not 1 <= size <= 4 * granule:
            raise PluginError(f"{plugin}: block_bytes = {size!r:.40}: must be between 1 and {4 * granule}, the block in fp32")
        self.name, self.granule, self._block_bytes = str(spec), granule, size
        self._try_out()

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """As many for a short block."""
        return (self._block_bytes,)

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Let the plug-in encode. Raises PluginError."""
        if (missing := self.granule - blocks.shape[1]) > 0:
            blocks = torch.nn.functional.pad(blocks, (0, missing))
        with plugins.blame(self._plugin):
            data = self._format.encode(blocks.clone())
        self._check("encode()", data, torch.uint8, (blocks.shape[0], self._block_bytes), PluginError)
        planes[0].copy_(data)

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Let the plug-in decode. Raises RemoteProtocolError: it was tried out, so what it fails at are these bytes."""
        with plugins.blame(self._plugin, RemoteProtocolError):
            decoded = self._format.decode(planes[0].clone())
        self._check("decode()", decoded, torch.float32, (planes[0].shape[0], self.granule), RemoteProtocolError)
        blocks.copy_(decoded[:, : blocks.shape[1]])

    def _check(
        self, what: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, int], error: type[PluginError | RemoteProtocolError]
    ) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise error(f"{self._plugin}: {what} must be {dtype} {list(shape)}, not {found}")

    def _try_out(self) -> None:
        """Raise PluginError unless blocks of zeros, of other values and with one NaN go through it as they should."""
        values = torch.linspace(-1, 1, _TESTED * self.granule, dtype=torch.float32, device="cpu").view(_TESTED, -1).clone()
        values[0] = 0
        values[-1, 0] = torch.nan
        data, decoded = torch.empty(_TESTED, self._block_bytes, dtype=torch.uint8, device="cpu"), torch.empty_like(values)
        self.encode_blocks(values, [data])
        try:
            self.decode_blocks([data], decoded)
        except RemoteProtocolError as error:
            raise PluginError(str(error)) from error
        if not bool(decoded[:-1].isfinite().all()) or bool(decoded[-1].isfinite().all()):
            raise PluginError(f"{self._plugin}: a block with a NaN, and no other, must decode to one that is not finite")
        one = torch.empty(1, self._block_bytes, dtype=torch.uint8, device="cpu")
        self.encode_blocks(values[1:2], [one])
        if not torch.equal(one[0], data[1]):
            raise PluginError(f"{self._plugin}: a block must encode to the same bytes alone and among others")
