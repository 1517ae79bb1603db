"""Copies between a GPU and the CPU beside the computation, on a stream of their own. On a CPU there is nothing to do.

Why a stream of its own: an update is written just before a layer's forward, while the GPU still computes the layers before it.
On the computing stream the CPU would wait for all of them; and FSDP gathers shards on streams that do not wait for what was
queued after its own root forward began. So a copy here has finished before the caller goes on, and then any stream may read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from edit.errors import ConfigError

__all__ = ["Transfers"]

_Item = TypeVar("_Item")


class Transfers:
    """Copies of tensors that are on at most one GPU. pinned: whether vectors beside them should be in pinned memory.

    Raises ConfigError for several GPUs: one stream does not wait for what another GPU copies.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
        if len(devices) > 1:
            raise ConfigError(
                f"the model is on {', '.join(map(str, devices))} in one process: load it onto one GPU, or start a process per "
                "GPU with torchrun and shard it (`fully_shard`)"
            )
        device = next(iter(devices), None)
        self.pinned = device is not None
        self._stream = torch.cuda.Stream(device) if device is not None else None  # type: ignore[no-untyped-call]
        self._unchanged_since: torch.cuda.Event | None = None

    def mark_unchanged(self) -> None:
        """Note that what is queued after this neither writes the parameters that are copied nor reads those that are written.

        Until `mark_changing`, copies do not wait for it.
        """
        if self._stream is not None:
            self._unchanged_since = torch.cuda.current_stream(self._stream.device).record_event()

    def mark_changing(self) -> None:
        """Note that this is over: copies wait for all that is queued."""
        self._unchanged_since = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the copies inside on the stream; they are finished at the end."""
        if self._stream is None:
            yield
            return
        if self._unchanged_since is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        else:
            self._stream.wait_event(self._unchanged_since)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def each_beside(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield what `items` yields; what it does for each runs on the stream, and is finished when that is yielded."""
        if self._stream is None:
            yield from items
            return
        while True:
            with self.beside():
                item = next(items, None)
            if item is None:
                return
            yield item
