"""The ranks of a replica as threads of one process: the calls of `edit.replica.ranks.Ranks`, over a barrier instead of gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from edit.errors import ConfigError
from edit.replica.ranks import Ranks

_T = TypeVar("_T")
PATIENCE_S = 30.0


class ThreadRanks:
    """One rank. `meeting` and `table` are shared by all."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank = rank
        self.size = meeting.parties
        self.leads = rank == 0
        self._meeting = meeting
        self._table = table

    def collect(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._meeting.wait()
        values = list(self._table)
        self._meeting.wait()
        return values

    def lead(self, call: Callable[[], Any]) -> Any:
        result: tuple[Any, Exception | None] = (None, None)
        if self.leads:
            try:
                result = (call(), None)
            except Exception as error:
                result = (None, error)
        value, failure = self.collect(result)[0]
        if failure is not None:
            raise failure
        return value

    def all(self, flags: Sequence[bool]) -> list[bool]:
        return [all(column) for column in zip(*self.collect(list(flags)), strict=True)]

    def same(self, what: str, value: object) -> None:
        if len(set(self.collect(value))) != 1:
            raise ConfigError(f"the ranks disagree on {what}")


def at_every_rank(ranks: int, work: Callable[[Ranks], _T]) -> list[_T]:
    """What `work` returns at each rank; raises what one raised. A rank that fails breaks the waits of the others."""
    meeting, table = threading.Barrier(ranks, timeout=PATIENCE_S), [None] * ranks

    def one(rank: int) -> _T:
        try:
            return work(cast(Ranks, ThreadRanks(rank, meeting, table)))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
