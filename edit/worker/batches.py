"""The batches of a user's loop, for as long as a run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeVar

from edit.errors import ConfigError
from edit.replica.ranks import Ranks

__all__ = ["agreed", "epochs"]

_Batch = TypeVar("_Batch")


def epochs(data: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield the batches, again from the beginning after the last one; an iterator's only once.

    `set_epoch` of the data or of its sampler, where there is one, is told the number of the pass, from 0. Raises ConfigError
    when there is no batch.
    """
    for epoch in count():
        for shuffled in (data, getattr(data, "sampler", None)):
            if callable(set_epoch := getattr(shuffled, "set_epoch", None)):
                set_epoch(epoch)
        empty = True
        for batch in data:
            empty = False
            yield batch
        if isinstance(data, Iterator):
            return
        if empty:
            raise ConfigError("data: has no batches")


def agreed(batches: Iterator[_Batch], ranks: Ranks, *, one_pass: bool) -> Iterator[_Batch]:
    """Yield the batches; with several ranks, end at all of them when those of one end.

    one_pass: whether they can end.
    """
    if not one_pass or ranks.size == 1:
        yield from batches
        return
    nothing = object()
    while True:
        batch = next(batches, nothing)
        if not ranks.all([batch is not nothing])[0]:
            return
        yield batch  # type: ignore[misc]
