"""How long the control connection's attempts may take, at one address and at several."""

from __future__ import annotations

from typing import Any

import pytest

from editpb.transport.channel_options import CONNECT_MS, QUICK_MS, channel_options
from peers.carriers.hub import channels
from peers.carriers.hub.channels import Channels
from tests.support.loops import on_a_loop


@on_a_loop
async def test_an_address_that_swallows_what_is_sent_is_soon_passed_over_and_a_slow_one_has_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[str, int]] = []

    def options(address: str, *, within_ms: int, **others: Any) -> Any:
        opened.append((address, within_ms))
        return channel_options(address, within_ms=within_ms, **others)

    monkeypatch.setattr(channels, "channel_options", options)

    async def tried(known: Channels, times: int) -> list[tuple[str, int]]:
        opened.clear()
        for _ in range(times):
            await known.release(known.control())
            known.rotate()
        return list(opened)

    assert await tried(Channels(["a:1"]), 2) == [("a:1", CONNECT_MS)] * 2
    two = Channels(["a:1", "b:1"])
    assert await tried(two, 4) == [("a:1", QUICK_MS), ("b:1", QUICK_MS), ("a:1", CONNECT_MS), ("b:1", CONNECT_MS)]
    two.welcomed(1)
    assert await tried(two, 1) == [("a:1", QUICK_MS)], "it begins anew once it was connected"
    two.data()
    assert opened[-1][1] == CONNECT_MS, "data goes where control is"
    await two.close()
