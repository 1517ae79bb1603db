"""The ranks of one replica: how they agree, over torch.distributed, on what one of them decided.

The few collectives that a sharded replica needs besides FSDP2's own. Rank 0 decides and broadcasts to the others, exceptions
included, so that ranks never disagree. One process is a replica of one rank: the same calls, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from edit.errors import ConfigError

__all__ = ["ALONE", "Ranks"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process of a replica."""

    # Of this process in the replica.
    rank: int = 0
    # How many processes the replica has.
    size: int = 1
    # A group of all of them that can move CPU tensors; None when size is 1.
    group: dist.ProcessGroup | None = None

    @classmethod
    def world(cls) -> Ranks:
        """Return all processes of the initialised torch.distributed world, over a gloo group of their own; `ALONE` for one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ALONE
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def lead(self, call: Callable[[], _T]) -> _T:
        """Return at every rank what `call` gives at rank 0; an exception that it raises there is raised at every rank."""
        if self.group is None:
            return call()
        result: list[object] = [None, None]
        if self.leads:
            try:
                result[0] = call()
            except Exception as error:
                result[1] = error
        dist.broadcast_object_list(result, group=self.group, group_src=0)
        if isinstance(result[1], BaseException):
            raise result[1]
        return cast(_T, result[0])

    def all(self, flags: Sequence[bool]) -> list[bool]:
        """Return, element by element, whether the flag is set at every rank."""
        if self.group is None:
            return list(flags)
        tensor = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(value) for value in tensor.tolist()]

    def collect(self, value: _T) -> list[_T]:
        """Return every rank's small value, by rank, at every rank."""
        if self.group is None:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return cast(list[_T], values)

    def together(self, call: Callable[[], _T]) -> _T:
        """Return each rank's own result of `call`; if one fails, raise the first such rank's error at every rank."""
        if self.group is None:
            return call()
        result: _T | None = None
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failure = error
        if (first := next((error for error in self.collect(failure) if error is not None), None)) is not None:
            raise first
        return cast(_T, result)

    def same(self, what: str, value: object) -> None:
        """Raise ConfigError at every rank unless `value` is equal at all of them."""
        values = self.collect(value)
        other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"the ranks of this replica disagree on {what}: rank 0 has {values[0]}, rank {other} {values[other]}"
            )

    def gather(self, tensor: Tensor, numels: Sequence[int], to: int = 0) -> list[Tensor] | None:
        """Return every rank's flat fp32 CPU tensor (numels[rank] elements) at rank `to`, None elsewhere."""
        if self.group is None:
            return [tensor]
        if self.rank != to:
            if tensor.numel():
                dist.send(tensor, group=self.group, group_dst=to)
            return None
        parts = [
            tensor if rank == to else torch.empty(numels[rank], dtype=tensor.dtype, device="cpu") for rank in range(self.size)
        ]
        for rank, part in enumerate(parts):
            if rank != to and part.numel():
                dist.recv(part, group=self.group, group_src=rank)
        return parts

    def transfer(self, tensor: Tensor | None, numel: int, source: int, target: int) -> Tensor | None:
        """Move a flat fp32 CPU tensor of `numel` elements from rank `source` to rank `target`.

        Returns it at `target`, None at every other rank.
        """
        if self.group is None or self.rank not in (source, target):
            return None
        if self.rank == source:
            assert tensor is not None
            dist.send(tensor.contiguous(), group=self.group, group_dst=target)
            return None
        received = torch.empty(numel, dtype=torch.float32, device="cpu")
        dist.recv(received, group=self.group, group_src=source)
        return received


ALONE = Ranks()
