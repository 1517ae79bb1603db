"""The buffers that each peer keeps as its own (BatchNorm's statistics, spectral_norm's vectors), after a contribution with NaN.

The forwards behind such a contribution wrote NaN into them, too, and a running mean never loses it. So a copy of each buffer
is kept, of the last contribution at which it was finite: on the buffers' device, by each rank of what it holds. Checkpoints do
not have the copies: whoever resumes begins with new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from edit.replica.flat import is_finite
from edit.replica.layout import local_of

__all__ = ["LocalBuffers"]

_log = logging.getLogger(__name__)


class LocalBuffers:
    """Copies of the floating-point buffers of `model`, but those that are `exchanged` (ids of tensors). Under no_grad."""

    def __init__(self, model: nn.Module, exchanged: Collection[int] = ()) -> None:
        self._model, self._exchanged = model, exchanged
        self._constant: set[str] = set()  # not written until the first contribution: masks, caches; no copy is worth its memory
        self._first = True
        self._said = False
        self._copies = {name: buffer.clone() for name, buffer in self._held() if is_finite(buffer)}

    def keep(self) -> None:
        """Copy those that are finite now: a contribution was made."""
        for name, buffer in self._held():
            copy = self._copies.get(name)
            if copy is not None and (copy.shape, copy.dtype, copy.device) != (buffer.shape, buffer.dtype, buffer.device):
                copy = None
            # Compared, as versions do not count what BatchNorm or a CUDA graph writes.
            if self._first and copy is not None and torch.equal(buffer, copy):
                self._constant.add(name)
                del self._copies[name]
            elif name in self._constant or not is_finite(buffer):
                continue
            elif copy is not None:
                copy.copy_(buffer)
            else:
                self._copies[name] = buffer.clone()
        self._first = False

    def restore(self) -> None:
        """Give those that have NaN or Inf now their copy, in place. A warning names those with NaN that have none."""
        lost = []
        for name, buffer in self._held():
            if is_finite(buffer):
                continue
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape:
                buffer.copy_(copy)
            elif bool(buffer.isnan().any()):
                lost.append(name)
        if lost and not self._said:
            self._said = True
            _log.warning(
                "a contribution has NaN or Inf, and so have buffers of which no finite copy is kept: %s; set them anew, or "
                "leave, and enter an EditWorker with a new model",
                ", ".join(lost[:3]),
            )

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of each one that may be written, by name."""
        for name, buffer in self._model.named_buffers():
            held = local_of(buffer)
            plain = held.layout is torch.strided and not (
                held.is_meta or held.is_inference() or hasattr(held, "__tensor_flatten__")
            )
            if plain and held.is_floating_point() and held.itemsize > 1 and held.numel() and id(buffer) not in self._exchanged:
                yield name, held
