"""The newest status, for everybody who watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from edit.errors import RefusedError, TransportError
from edit.web.access import Viewer
from edit.web.app import MOST_STREAMS, make_app
from edit.web.feed import ENDED, Feed
from editpb.run_status import RunStatus
from tests.edit.web.asking import Answer, ask
from tests.support.loops import on_a_loop, until
from tests.support.statuses import busy_run

OPERATOR = {"edit.viewer": Viewer("op", "operator"), "edit.allowed": lambda: True}


class Run:
    """A source: says what a test puts into it; an exception is raised."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[RunStatus | Exception | None] = asyncio.Queue()
        self.asked = 0

    async def __call__(self) -> AsyncGenerator[RunStatus, None]:
        self.asked += 1
        while (said := await self.says.get()) is not None:
            if isinstance(said, Exception):
                raise said
            yield said


class Pauses:
    def __init__(self) -> None:
        self.taken: list[float] = []
        self.go = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await self.go.wait()


@on_a_loop
async def test_a_run_that_does_not_answer_is_asked_again_less_and_less_often() -> None:
    run, pauses = Run(), Pauses()
    pauses.go.set()
    feed = Feed(run, pauses)
    following = asyncio.create_task(feed.follow())
    for _ in range(7):
        run.says.put_nowait(TransportError("not there"))
    await until(lambda: run.asked == 8)
    assert pauses.taken == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert feed.problem == "not there" and feed.version == 1  # one change, however often
    run.says.put_nowait(status := busy_run())
    await until(lambda: feed.status is status)
    assert feed.problem == ""
    run.says.put_nowait(None)
    await until(lambda: feed.problem == ENDED)
    assert feed.status is status and pauses.taken[-1] == 0.5
    following.cancel()


@on_a_loop
async def test_a_run_that_refuses_ends_the_page() -> None:
    run = Run()
    run.says.put_nowait(RefusedError("no observer"))
    with pytest.raises(RefusedError, match="no observer"):
        await Feed(run).follow()


@on_a_loop
async def test_who_watches_slowly_gets_the_newest_and_holds_nobody_up() -> None:
    run, pauses = Run(), Pauses()
    feed = Feed(run, pauses)
    following = asyncio.create_task(feed.follow())
    for step in range(1, 51):
        run.says.put_nowait(replace(busy_run(2), outer_step=step))
    await until(run.says.empty)
    version = await feed.newer(0)
    assert feed.status is not None and feed.status.outer_step == 50
    slow = asyncio.create_task(feed.newer(version))
    await asyncio.sleep(0)
    assert not slow.done()
    feed.close()
    await slow
    following.cancel()


@on_a_loop
async def test_the_stream_sends_what_changed_and_ends_with_the_page() -> None:
    feed = Feed(Run())
    app = make_app(feed, monotonic=lambda: 0.0)
    feed.status = busy_run(5)
    watching = asyncio.create_task(ask(app, "/stream", **OPERATOR))
    await until(lambda: feed._news._waiters)  # it has all there is, and waits
    feed.status = replace(feed.status, waiting_for="the next attempt")
    feed._changed()
    await until(lambda: feed._news._waiters)
    feed.close()
    answer: Answer = await watching
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names == ["summary", "members", "key", "rounds", "events", "settings", "leaving", "charts", "summary"]
    for block in answer.text.strip().split("\n\n"):
        assert all(line.startswith(("event: ", "data: ", ":")) or line == "data:" for line in block.split("\n"))


@on_a_loop
async def test_streams_are_bounded_and_their_places_are_free_again() -> None:
    feed = Feed(Run())
    app = make_app(feed, monotonic=lambda: 0.0)
    feed.status = busy_run(2)
    streams = [asyncio.create_task(ask(app, "/stream", **OPERATOR)) for _ in range(MOST_STREAMS)]
    await until(lambda: len(feed._news._waiters) == MOST_STREAMS)
    assert (await ask(app, "/stream", **OPERATOR)).status == 503
    gone = streams.pop()
    gone.cancel()
    await until(gone.done)
    again = asyncio.create_task(ask(app, "/stream", **OPERATOR))
    await until(lambda: len(feed._news._waiters) == MOST_STREAMS)
    feed.close()
    assert [answer.status for answer in await asyncio.gather(*streams, again)] == [200] * MOST_STREAMS


@on_a_loop
async def test_before_the_run_has_answered_the_page_says_so() -> None:
    feed = Feed(Run())
    app = make_app(feed, monotonic=lambda: 0.0)
    feed.problem = "the coordinator does not answer; is `serve` running?"
    answer = await ask(app, "/", **OPERATOR)
    assert answer.status == 200 and "is `serve` running?" in answer.text and 'http-equiv="refresh"' in answer.text
    assert (await ask(app, "/status.json", **OPERATOR)).status == 503
