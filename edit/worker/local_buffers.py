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
from torch.nn.parameter import is_lazy

from edit.replica.flat import is_finite
from edit.replica.layout import local_of

__all__ = ["LocalBuffers"]

_log = logging.getLogger(__name__)

_LARGE = 1 << 16  # elements: of what is no larger (statistics), a copy is kept, also while nothing writes it


class LocalBuffers:
    """Copies of the floating-point buffers of `model`, but those that are `exchanged` (ids of tensors). Under no_grad."""

    def __init__(self, model: nn.Module, exchanged: Collection[int] = ()) -> None:
        self._model, self._exchanged = model, exchanged
        # Large ones that nothing writes until the first contribution (masks, caches), and those that were not finite at first.
        self._unkept = set[str]()
        self._first = True
        self._said = False
        self._copies = {name: buffer.clone() for name, buffer in self._held() if is_finite(buffer)}

    def keep(self) -> None:
        """Copy those that are finite now: a contribution was made.

        From the second one on the host does not wait for the device, but for buffers that are new.
        """
        for name, buffer in self._held():
            if name in self._unkept:
                continue
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype, copy.device) != (buffer.shape, buffer.dtype, buffer.device):
                self._keep_new(name, buffer)
            # Compared, as versions do not count what BatchNorm or a CUDA graph writes.
            elif self._first and buffer.numel() > _LARGE and torch.equal(buffer, copy):
                self._unkept.add(name)
                del self._copies[name]
            else:
                copy.copy_(torch.where(buffer.isfinite().all(), buffer, copy))
        self._first = False

    def _keep_new(self, name: str, buffer: Tensor) -> None:
        self._copies.pop(name, None)
        if is_finite(buffer):
            self._copies[name] = buffer.clone()
        else:
            self._unkept.add(name)

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
        """Yield what this rank holds of each one that may be written, by name; of an expanded one what its memory holds.

        Not those that share memory with an exchanged parameter: its outcome is written there.
        """
        exchanged = (local_of(each) for each in self._model.parameters() if id(each) in self._exchanged)
        shared = {each.untyped_storage().data_ptr() for each in exchanged if _is_plain(each)}
        for name, buffer in self._model.named_buffers():
            if is_lazy(buffer):
                continue
            held = local_of(buffer)
            if not (_is_plain(held) and held.is_floating_point() and held.itemsize > 1) or id(buffer) in self._exchanged:
                continue
            if held.untyped_storage().data_ptr() not in shared:
                yield name, held[tuple(slice(None) if stride else slice(1) for stride in held.stride())]


def _is_plain(held: Tensor) -> bool:
    odd = held.is_meta or held.is_inference() or hasattr(held, "__tensor_flatten__")
    return held.layout is torch.strided and not odd and held.numel() > 0
