"""How many bytes a call carries: what the link takes in the time that a call may take."""

from __future__ import annotations

import pytest

from peers.carriers.hub.pace import (
    CALL_S,
    ENOUGH_BYTES,
    LEAST_BYTES,
    LONGEST_S,
    MOST_BYTES,
    ROUND_TRIPS,
    START_BYTES,
    Pace,
    Piece,
)


def settled(bytes_per_s: float, rtt_s: float, *, before: int = 0) -> tuple[Pace, list[int]]:
    """A pace after 20 calls, one by one, over a link of this rate and round trip; and what each of them carried."""
    pace, sizes = Pace(lambda: rtt_s), []
    for _ in range(20):
        sizes.append(pace.bytes)
        pace.carried(pace.bytes, rtt_s + (before + pace.bytes) / bytes_per_s, asked=pace.bytes)
    return pace, sizes


@pytest.mark.parametrize("mbit", [0.1, 1, 10, 100, 1000])
@pytest.mark.parametrize("rtt_s", [0.0, 0.02, 0.1, 0.2])
def test_calls_one_after_the_other_fill_a_link_and_take_no_longer_than_they_may(mbit: float, rtt_s: float) -> None:
    rate = mbit * 125_000
    pace, _ = settled(rate, rtt_s)
    assert pace.bytes / rate <= max(pace.call_s, LEAST_BYTES / rate), "what is on the way, in seconds of the link"
    if LEAST_BYTES < pace.bytes < MOST_BYTES:
        assert rtt_s + pace.bytes / rate == pytest.approx(pace.call_s, rel=0.01)
        assert pace.bytes / rate >= (1 - 1 / ROUND_TRIPS - 0.01) * pace.call_s


def test_a_fast_link_is_found_out_in_a_few_calls() -> None:
    _, sizes = settled(125e6, 0.1)
    assert sizes[0] == START_BYTES
    assert sizes[4] > ENOUGH_BYTES


def test_behind_the_bytes_of_others_fewer_are_sent() -> None:
    alone, _ = settled(1.25e6, 0.02)
    shared, _ = settled(1.25e6, 0.02, before=200_000)
    assert shared.bytes < alone.bytes


def test_an_answer_that_took_long_makes_no_call_longer_than_it_may_ever_be() -> None:
    assert Pace(lambda: 0.0).call_s == CALL_S
    assert Pace(lambda: 0.1).call_s == pytest.approx(0.4)
    assert Pace(lambda: 60.0).call_s == LONGEST_S


def test_a_piece_that_the_coordinator_has_room_for_makes_no_link_slow() -> None:
    """Over a fat link of 0.1 s it takes little longer than the round trip, whatever it carries."""
    pace, most = settled(125e6, 0.1)[0], 1 << 20
    before = pace.bytes
    with pace.piece(0, 1 << 26, most) as piece:
        assert (piece.start, piece.stop, piece.last) == (0, most, False)
    piece.arrived(0.12)
    assert pace.bytes == before and not pace.slow
    with pace.piece((1 << 26) - most, 1 << 26, most) as piece:
        assert piece.last and piece.stop == 1 << 26
    narrow = settled(125e3, 0.1)[0]
    assert narrow.piece(0, 1 << 26, most).stop == narrow.bytes < most
    with narrow.piece(0, 1 << 26, narrow.bytes // 2) as piece:
        pass
    piece.arrived(10.0)
    assert narrow.bytes < (piece.stop - piece.start), "a link that has become slow"


def test_what_fits_or_nearly_fits_goes_in_one_call() -> None:
    pace = Pace()
    assert pace.piece(0, START_BYTES).last
    assert pace.piece(100, 100 + START_BYTES * 5 // 4).last
    divided = pace.piece(100, 10 * START_BYTES)
    assert (divided.start, divided.stop, divided.last) == (100, 100 + START_BYTES, False)
    assert not pace.slow, "it is not known yet"
    pace.carried(START_BYTES, 1e-3, asked=START_BYTES)
    assert pace.bytes >= ENOUGH_BYTES and not pace.slow
    assert pace.piece(5, 1 << 40).stop == 1 << 40, "a fast link is not paced"


class SlowLink:
    """Two calls that send side by side over one link, their bytes in turn; each answer comes `delay_s` after its bytes."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_at = 0.0
        self.now, self.pace, self.sizes = 0.0, Pace(), [0, 0]

    def run(self, pieces: int) -> None:
        under_way = [self._begin() for _ in self.sizes]
        for _ in range(pieces):
            call = min(range(len(under_way)), key=lambda each: under_way[each][2])
            piece, began, self.now = under_way[call]
            piece.__exit__(None, None, None)
            piece.arrived(self.now - began)
            self.sizes[call] = piece.stop
            under_way[call] = self._begin()

    def _begin(self) -> tuple[Piece, float, float]:
        piece = self.pace.piece(0, 1 << 30)
        piece.__enter__()
        self._free_at = max(self._free_at, self.now) + piece.stop / self._bytes_per_s
        return piece, self.now, self._free_at + self._delay_s


def test_calls_side_by_side_find_out_the_link_and_share_it_evenly() -> None:
    link = SlowLink(1.25e6, 0.0)
    link.run(20)
    assert link.pace.bytes == pytest.approx(1.25e6 * CALL_S, rel=0.01)
    assert link.sizes == pytest.approx([1.25e6 * CALL_S / 2] * 2, rel=0.05)


def test_answers_that_wait_behind_what_comes_the_other_way_do_not_starve_the_calls() -> None:
    link = SlowLink(1.25e6, 0.1)
    link.run(20)
    assert link.pace.bytes > 0.5 * 1.25e6 * CALL_S


def test_what_carried_less_than_it_might_only_tells_of_a_slow_link() -> None:
    pace = Pace(lambda: 0.1)
    pace.carried(10, 0.1, asked=START_BYTES)
    assert pace.bytes == START_BYTES, "a round trip"
    pace.carried(START_BYTES - 1, 1e-6, asked=START_BYTES)
    assert pace.bytes == START_BYTES, "no sign of a faster one"
    pace.carried(START_BYTES // 2, 2.0, asked=START_BYTES)
    assert pace.bytes == START_BYTES // 2 // 5


def test_a_call_is_never_too_small_nor_too_large_to_be_worth_it() -> None:
    pace = Pace()
    pace.carried(START_BYTES, 1e9, asked=START_BYTES)
    assert pace.bytes == LEAST_BYTES
    pace.carried(LEAST_BYTES, 0.0, asked=LEAST_BYTES)
    pace.carried(MOST_BYTES, 0.0, asked=MOST_BYTES)
    assert pace.bytes == MOST_BYTES
