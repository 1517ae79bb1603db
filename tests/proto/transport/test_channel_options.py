"""How long an attempt to connect may take."""

from __future__ import annotations

from editpb.transport.channel_options import (
    CONNECT_MS,
    HANDSHAKE_MS,
    QUICK_MS,
    attempts,
    channel_options,
    connect_ms,
)


def test_an_attempt_may_take_at_least_as_long_as_a_server_gives_it_unless_it_is_a_quick_one() -> None:
    assert dict(channel_options("a.example:7"))["grpc.min_reconnect_backoff_ms"] == CONNECT_MS > HANDSHAKE_MS
    assert dict(channel_options("a.example:7", within_ms=QUICK_MS))["grpc.min_reconnect_backoff_ms"] == QUICK_MS


def test_one_address_has_all_the_time_and_several_are_tried_quickly_in_every_other_pass() -> None:
    assert [connect_ms(turn, 1) for turn in attempts(1)] == [CONNECT_MS]
    assert [connect_ms(turn, 2) for turn in attempts(2)] == [QUICK_MS, QUICK_MS, CONNECT_MS, CONNECT_MS]
    for known in (2, 3, 4):
        for begin in range(2 * known):  # who was connected before begins anywhere
            tried = {((begin + i) % known, connect_ms(begin + i, known)) for i in attempts(known)}
            assert tried == {(each, ms) for each in range(known) for ms in (QUICK_MS, CONNECT_MS)}
