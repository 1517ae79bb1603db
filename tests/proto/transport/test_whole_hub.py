"""All aggregators of a hub as one status, from what each of them says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from edit.errors import RefusedError, RemoteProtocolError, TransportError
from edit.web.page import render_live
from editpb import control_pb2 as cpb
from editpb.run_status import RunStatus, Setting
from editpb.status_messages import status_to_pb
from editpb.transport.watch import watch
from editpb.transport.whole_hub import FIRST_S, HubWatch, Statuses, further_aggregators, whole_hub
from tests.support.loops import pass_time, run_held
from tests.support.statuses import busy_run

COORDINATOR = replace(busy_run(34), parameters=10)
FURTHER = replace(busy_run(33, seed=1), parameters=7, aggregator=1)


def says(*told: RunStatus | Exception, then: asyncio.Event | None = None) -> Callable[[], AsyncGenerator[RunStatus, None]]:
    async def statuses() -> AsyncGenerator[RunStatus, None]:
        for each in told:
            if isinstance(each, Exception):
                raise each
            yield each
        if then is not None:
            await then.wait()

    return statuses


def hub(coordinator: Statuses, *further: Statuses) -> HubWatch:
    return HubWatch(coordinator, lambda status: further)


async def all_of(watch: HubWatch) -> list[RunStatus]:
    return [status async for status in watch.statuses()]


def held(body: Callable[[], Any]) -> None:
    run_held(body())


def test_the_shares_are_one_run() -> None:
    async def body() -> None:
        (status,) = await all_of(hub(says(COORDINATOR), says(FURTHER, then=asyncio.Event())))
        assert (status.outer_step, status.parameters, status.aggregator) == (33, 17, 0)
        assert max(each.outer_step for each in status.rounds if each.committed) == 33, "a step that all have taken"
        assert status.settings == COORDINATOR.settings and status.t == COORDINATOR.t and status.reason == ""

    held(body)


def test_who_does_not_answer_is_named_and_what_it_said_stays() -> None:
    async def body() -> None:
        silent = TransportError("aggregator 1 (b:7) does not answer")
        (status,) = await all_of(hub(says(COORDINATOR), says(silent), says(FURTHER, then=asyncio.Event())))
        assert status.reason == "aggregator 1 (b:7) does not answer" and status.parameters == 17
        end = asyncio.Event()

        async def twice() -> AsyncGenerator[RunStatus, None]:
            yield COORDINATOR
            end.set()
            while not watch._troubles:  # noqa: ASYNC110
                await asyncio.sleep(0)
            yield COORDINATOR

        watch = hub(twice, says(FURTHER, then=end))
        first, second = await all_of(watch)
        assert first.reason == "" and second.reason == "aggregator 1 has ended the connection"
        assert second.parameters == first.parameters == 17

    held(body)


def test_one_that_says_nothing_is_not_waited_for_long_and_nothing_is_left_when_the_watch_ends() -> None:
    async def body() -> None:
        before = asyncio.all_tasks()
        watching = asyncio.ensure_future(all_of(hub(says(COORDINATOR), says(then=asyncio.Event()))))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not watching.done()
        pass_time(FIRST_S)
        (status,) = await watching
        assert (status.parameters, status.reason) == (10, "aggregator 1 has not answered yet")
        assert asyncio.all_tasks() == before

    held(body)


def test_the_coordinators_refusal_ends_the_watch_and_a_finished_aggregators_end_is_no_trouble() -> None:
    async def body() -> None:
        with pytest.raises(RefusedError, match="no"):
            await all_of(hub(says(RefusedError("no")), says(FURTHER, then=asyncio.Event())))
        done = replace(FURTHER, phase="finished", reason="", waiting_for="")
        watch = hub(says(COORDINATOR), says(done))
        (status,) = await all_of(watch)
        assert status.reason == ""

    held(body)


def test_an_aggregator_lies_about_its_own_share_only() -> None:
    stranger = replace(FURTHER.members[0], peer_id="mallory")
    lie = replace(FURTHER, members=(*FURTHER.members, stranger), outer_steps=1, t=9e12, settings=())
    told = whole_hub(COORDINATOR, [lie])
    assert "mallory" not in {each.peer_id for each in told.members}
    assert (told.outer_steps, told.t, told.settings) == (COORDINATOR.outer_steps, COORDINATOR.t, COORDINATOR.settings)
    other = whole_hub(COORDINATOR, [replace(FURTHER, run_id="another-run")])
    assert other.parameters == 10 and other.run_id == COORDINATOR.run_id


class Tells:
    """A stub of an aggregator that sends these messages on Watch, and then no more."""

    def __init__(self, *replies: cpb.StatusReply) -> None:
        self._replies = iter(replies)

    def Watch(self, request: cpb.WatchRequest) -> Tells:
        return self

    async def read(self) -> cpb.StatusReply:
        return next(self._replies, None) or await asyncio.Event().wait()

    def cancel(self) -> None:
        return


def test_one_whose_status_cannot_be_is_named_and_the_others_are_shown() -> None:
    async def body() -> None:
        good = status_to_pb(FURTHER)
        bad = cpb.StatusReply.FromString(good.SerializeToString())
        bad.events[0].t = math.nan
        one, other = (partial(watch, Tells(reply), f"aggregator {n} (b:{n})") for n, reply in ((1, good), (2, bad)))
        async with aclosing(hub(says(COORDINATOR), one, other).statuses()) as told:
            status = await anext(told)
        assert status.reason == "aggregator 2 (b:2): t of an event is nan, not 0 to 2.53402e+11"
        assert status.parameters == 17 and status.outer_step == 33
        render_live(status)

    held(body)


def settings(addresses: str) -> RunStatus:
    return replace(COORDINATOR, settings=(Setting(name="aggregators.addresses", value=addresses, default="[]"),))


def test_a_member_learns_from_the_coordinator_whom_else_to_ask() -> None:
    async def body() -> None:
        told = settings('["b:7", "c:8"]')
        assert further_aggregators(told) == ("b:7", "c:8") and further_aggregators(replace(told, settings=())) == ()
        asked: list[str] = []

        def sources(status: RunStatus) -> list[Statuses]:
            asked.extend(further_aggregators(status))
            return [says(FURTHER, then=asyncio.Event()), says(TransportError("aggregator 2 (c:8) does not answer"))]

        first, second = await all_of(HubWatch(says(told, replace(told, t=1.0)), sources))
        assert asked == ["b:7", "c:8"], "once, not with each status"
        assert (first.parameters, first.reason) == (17, "aggregator 2 (c:8) does not answer")
        assert second.parameters == 17

    held(body)


@pytest.mark.parametrize(
    "addresses", ["no JSON", '"b:7"', "[1]", '["b"]', '["b:7 --evil"]', str(["b:7"] * 256).replace("'", '"')]
)
def test_what_are_no_addresses_ends_the_watch_in_one_line(addresses: str) -> None:
    async def body() -> None:
        with pytest.raises(RemoteProtocolError, match=r"aggregators\.addresses are not at most 255 of HOST:PORT"):
            await all_of(HubWatch(says(settings(addresses)), lambda status: [says()] * len(further_aggregators(status))))

    held(body)
