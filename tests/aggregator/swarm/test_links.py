"""Of two starts of one member the later one is heard, however their streams' beginnings interleave. How members are dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from aggregator.swarm import links
from edit.errors import StaleError
from editpb import council_pb2 as pb
from editpb.council_messages import Introduction, message_to_pb
from editpb.transport.channel_options import CONNECT_MS, QUICK_MS, channel_options
from tests.support.loops import WAIT_S


class Listener:
    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


async def stream_of(started: int, over: asyncio.Event) -> AsyncIterator[pb.CouncilMessage]:
    yield message_to_pb(Introduction("run", 7, started=started))
    await over.wait()


def test_an_earlier_start_whose_answer_is_slow_does_not_end_the_later_ones_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "proven", lambda introduction, *_: introduction)
    monkeypatch.setattr(links, "public_hash", lambda _: "key")
    nothing: Any = None

    async def main() -> None:
        here = links.Links("run", "a", 1, 1, nothing, nothing, Listener())
        asked, go_on, joined, over = (asyncio.Event() for _ in range(4))

        async def slowly(_: pb.CouncilMessage) -> None:
            asked.set()
            await go_on.wait()

        async def write(_: pb.CouncilMessage) -> None:
            joined.set()

        earlier = asyncio.create_task(here.serve("b", stream_of(1, over), slowly, nothing))
        await asked.wait()
        later = asyncio.create_task(here.serve("b", stream_of(2, over), write, nothing))
        await joined.wait()
        go_on.set()
        with pytest.raises(StaleError, match="was started later"):
            await asyncio.wait_for(earlier, WAIT_S)
        assert here.connected == {"b"} and not later.done()
        later.cancel()
        await asyncio.gather(later, return_exceptions=True)

    asyncio.run(main())


def test_of_several_addresses_each_is_tried_quickly_and_then_with_time_for_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    dialled: list[tuple[str, int]] = []

    async def main() -> None:
        enough = asyncio.Event()

        def options(address: str, *, within_ms: int, **others: Any) -> Any:
            dialled.append((address, within_ms))
            if len(dialled) == 4:
                enough.set()
            return channel_options(address, within_ms=within_ms, **others)

        monkeypatch.setattr(links, "channel_options", options)
        here = links.Links("run", "a", 1, 1, grpc.ssl_channel_credentials(), nothing, Listener())
        here.reach({"b": ("127.0.0.1:1", "127.0.0.1:2")})  # nobody listens there
        await asyncio.wait_for(enough.wait(), WAIT_S)
        await here.close()

    asyncio.run(main())
    first, second = "127.0.0.1:1", "127.0.0.1:2"
    assert dialled[:4] == [(first, QUICK_MS), (second, QUICK_MS), (first, CONNECT_MS), (second, CONNECT_MS)]
