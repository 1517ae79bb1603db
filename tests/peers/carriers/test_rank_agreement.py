"""What the ranks of a replica decide together. The ranks are threads; nothing waits longer than a slice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from edit.errors import EvictedError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.replica.ranks import ALONE, Ranks
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement, worst_error
from peers.carriers.run_connection import Interrupted
from tests.support.thread_ranks import at_every_rank


def agreeing(ranks: int, work: Callable[[RankAgreement, Ranks, IoThread], object]) -> list[object]:
    """What `work` returns at each rank; an exception counts as a result. Its trouble is its io's."""

    def one(rank: Ranks) -> object:
        with IoThread() as io:
            try:
                return work(RankAgreement(io, rank, lambda: io.trouble), rank, io)
            except Exception as error:
                return error

    return at_every_rank(ranks, one) if ranks > 1 else [one(ALONE)]


async def give(value: int) -> int:
    return value


@pytest.mark.parametrize("ranks", [1, 3])
def test_rank_0_decides_and_every_rank_hears_it(ranks: int) -> None:
    assert agreeing(ranks, lambda agreement, rank, _: agreement.decide(lambda: 10 + rank.rank)) == [10] * ranks
    assert agreeing(ranks, lambda agreement, rank, _: agreement.ask(lambda: 10 + rank.rank)) == [10] * ranks
    assert agreeing(ranks, lambda agreement, rank, _: agreement.flag(lambda: rank.leads)) == [True] * ranks
    assert agreeing(ranks, lambda agreement, rank, _: agreement.flag(lambda: not rank.leads)) == [False] * ranks


def test_an_undecided_rank_0_is_waited_for() -> None:
    def work(agreement: RankAgreement, rank: Ranks, io: IoThread) -> object:
        asked: list[int] = []

        def look() -> int | None:
            asked.append(rank.rank)
            return 7 if len(asked) > 2 else None

        return agreement.decide(look), len(asked) > 0

    assert agreeing(2, work) == [(7, True), (7, False)]


def test_a_rest_ends_with_rank_0s_value_or_the_slice() -> None:
    assert agreeing(2, lambda agreement, rank, _: agreement.pause(lambda: None)) == [None, None]
    assert agreeing(2, lambda agreement, rank, _: agreement.pause(lambda: 1 if rank.leads else None)) == [None, None]


def test_what_rank_0_raises_every_rank_raises() -> None:
    def refuse() -> int:
        raise RefusedError("another model")

    for error in agreeing(3, lambda agreement, rank, _: agreement.decide(refuse)):
        assert isinstance(error, RefusedError) and str(error) == "another model"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    "wait",
    [
        lambda agreement: agreement.check(),
        lambda agreement: agreement.decide(lambda: None),
        lambda agreement: agreement.ask(lambda: 1),
        lambda agreement: agreement.together(asyncio.Event().wait()),
        lambda agreement: agreement.on_leader(lambda: asyncio.Event().wait()),
    ],
    ids=["check", "decide", "ask", "together", "led"],
)
def test_a_rank_that_is_interrupted_ends_all_at_the_same_point(rank: int, wait: Callable[[RankAgreement], object]) -> None:
    def work(agreement: RankAgreement, ranks: Ranks, io: IoThread) -> object:
        agreement.check()
        if ranks.rank == rank:
            io.interrupt()
        return wait(agreement)

    assert [type(each) for each in agreeing(3, work)] == [Interrupted] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_together_gives_each_rank_its_own(ranks: int) -> None:
    assert agreeing(ranks, lambda agreement, rank, _: agreement.together(give(rank.rank))) == list(range(ranks))
    assert agreeing(ranks, lambda agreement, rank, _: agreement.on_leader(lambda: give(5 + rank.rank))) == [5] * ranks


@pytest.mark.parametrize("failing", [0, 2])
def test_where_one_fails_all_fail_alike_and_nobody_is_waited_for(failing: int) -> None:
    cancelled: list[int] = []

    async def own(rank: int) -> None:
        if rank == failing:
            raise StaleError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(rank)

    def work(agreement: RankAgreement, rank: Ranks, io: IoThread) -> object:
        try:
            return agreement.together(own(rank.rank))
        finally:
            io.call(give(0), timeout=5)  # the loop has seen the cancellation

    assert [type(error) for error in agreeing(3, work)] == [StaleError] * 3
    assert sorted(cancelled) == [rank for rank in range(3) if rank != failing]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, TransportError("cut"), None], TransportError),
        ([TransportError("cut"), StaleError("gone"), None], StaleError),
        ([TransportError("cut"), None, RemoteProtocolError("bad")], RemoteProtocolError),
        ([StaleError("gone"), EvictedError("noisy"), TransportError("cut")], EvictedError),
    ],
)
def test_of_several_errors_the_one_that_ends_most_is_raised(errors: list[Exception | None], expected: type[Exception]) -> None:
    assert type(worst_error(errors)) is expected
