"""When the coordinator of a finished run ends."""

from __future__ import annotations

import math

from aggregator.control.farewell import ABSENT_S, LONGEST_S, LOOKS_ON_S, TOLD_S, Farewell


def over(
    farewell: Farewell,
    now: float,
    *,
    attending: bool = False,
    missing: tuple[str, ...] = (),
    finished: bool = True,
    knows_all: bool = True,
    looked_at: float = -math.inf,
) -> str:
    return farewell.over(now, finished=finished, attending=attending, missing=missing, knows_all=knows_all, looked_at=looked_at)


def test_it_serves_as_long_as_the_run_goes_on() -> None:
    assert not over(Farewell(), 1e9, finished=False)


def test_it_ends_at_once_when_every_peer_has_left() -> None:
    farewell = Farewell()
    assert not over(farewell, 5.0, attending=True, missing=("a",))
    assert not over(farewell, 5.1, attending=True), "a rank that still attends reads its update"
    assert over(farewell, 5.2) == "every peer has left"


def test_who_looks_on_has_time_to_see_that_the_run_has_finished() -> None:
    farewell = Farewell()
    assert not over(farewell, 100.0, looked_at=99.0)
    assert not over(farewell, 100.0 + TOLD_S - 0.1, looked_at=100.0 + TOLD_S - 0.1), "however often it asks"
    assert over(farewell, 100.0 + TOLD_S, looked_at=100.0 + TOLD_S) == "every peer has left"
    assert over(Farewell(), 100.0, looked_at=100.0 - LOOKS_ON_S) == "every peer has left", "that was long ago"


def test_who_was_cut_off_has_a_minute_to_come_back() -> None:
    farewell = Farewell()
    assert not over(farewell, 0.0, missing=("a", "b"))
    assert not over(farewell, ABSENT_S - 1, attending=True, missing=("a", "b"))
    assert not over(farewell, 2 * ABSENT_S - 1.5, missing=("b",)), "a came for it; since then nobody is here"
    assert over(farewell, 2 * ABSENT_S, missing=("b",)) == "nobody was here for 60 s, without a goodbye from b"


def test_where_nobody_is_enrolled_others_may_come_than_those_who_were_there() -> None:
    farewell = Farewell()
    assert not over(farewell, 0.0, attending=True, missing=("a",), knows_all=False)
    assert not over(farewell, ABSENT_S - 1, knows_all=False), "a has left; of b only the coordinator knows"
    assert over(farewell, ABSENT_S, knows_all=False) == "nobody was here for 60 s"


def test_a_stream_that_never_ends_holds_nothing_up() -> None:
    farewell = Farewell()
    assert not any(over(farewell, now, attending=True, missing=("a",)) for now in range(0, int(LONGEST_S), 10))
    assert over(farewell, LONGEST_S, attending=True, missing=("a",)) == "3600 s have passed since, and some still attend"


def test_a_run_that_goes_on_again_is_waited_for_anew() -> None:
    farewell = Farewell()
    assert not over(farewell, 0.0, missing=("a",))
    assert not over(farewell, ABSENT_S - 1, finished=False, missing=("a",))
    assert not over(farewell, ABSENT_S + 1, missing=("a",))
