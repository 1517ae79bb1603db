"""The batches of a user's loop, for as long as a run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TypeVar

from edit.errors import ConfigError
from edit.replica.ranks import Ranks

__all__ = ["agreed", "epochs"]

_Batch = TypeVar("_Batch")


def epochs(data: Iterable[_Batch], first: int = 0, skip: int = 0) -> Iterator[_Batch]:
    """Yield the batches, again from the beginning after the last one; an iterator's only once.

    `set_epoch` of the data, its dataset, its sampler and its batch sampler, where there is one, is told the number of the pass.

    Args:
        first: the number of the first pass.
        skip: how many batches of the first pass are left out.

    Raises ConfigError when there is no batch, or fewer than `skip`, and for a loader that leaves out batches in every pass.
    """
    if first < 0 or skip < 0:
        raise ConfigError(f"epoch = {first}, skip = {skip}: must be at least 0")
    if skipped := _skipped(data):
        raise ConfigError(
            f"data: leaves out its first {skipped} batches in every pass; give the loader itself, and skip={skipped}"
        )
    for epoch in count(first):
        for shuffled in _parts(data):
            if callable(set_epoch := getattr(shuffled, "set_epoch", None)):
                set_epoch(epoch)
        batches, out = iter(data), skip if epoch == first else 0
        if (there := sum(1 for _ in islice(batches, out))) < out:
            raise ConfigError(f"skip = {skip}: data has {there} batches")
        empty = not out
        for batch in batches:
            empty = False
            yield batch
        if isinstance(data, Iterator):
            return
        if empty:
            raise ConfigError("data: has no batches")


def _parts(data: object) -> list[object]:
    """Return a loader, and what decides on its order, each once: dataset, samplers, and batch samplers around one another."""
    parts, around = [getattr(data, "dataset", None)], list[object]()
    part: object = data
    while part is not None and not any(part is each for each in around):
        around.append(part)
        parts += [part, getattr(part, "sampler", None)]
        part = getattr(part, "batch_sampler", None)
    return list({id(part): part for part in parts}.values())


def _skipped(data: object) -> int:
    """Return how many batches a loader leaves out in each pass, as accelerate's `skip_first_batches` makes it."""
    for part in _parts(data):
        of_accelerate = any(kind.__module__.startswith("accelerate.") for kind in type(part).__mro__)
        if of_accelerate and (skipped := getattr(part, "skip_batches", 0)):
            return int(skipped)
    return 0


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
