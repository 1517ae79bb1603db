"""How many faults quarantine a peer, for how long, and what forgives them."""

from __future__ import annotations

from edit.rounds.faults import Faults, delay_s


def test_three_faults_quarantine_and_each_time_is_twice_as_long_up_to_an_hour() -> None:
    faults = Faults()
    assert [faults.faulted("bad", now) for now in (0.0, 1.0, 2.0)] == [0.0, 0.0, 60.0]
    assert faults.quarantined == {"bad"} and faults.until("bad") == faults.next_release() == 62.0
    assert [faults.faulted("bad", 100.0) for _ in range(7)] == [120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]


def test_a_quarantine_ends_by_itself() -> None:
    faults = Faults()
    for _ in range(3):
        faults.faulted("bad", 0.0)
        faults.faulted("worse", 5.0)
    faults.release(59.9)
    assert faults.quarantined == {"bad", "worse"}
    faults.release(60.0)
    assert faults.quarantined == {"worse"} and faults.until("bad") is None


def test_a_message_damaged_now_and_then_is_forgiven() -> None:
    faults = Faults()
    for _ in range(50):
        assert faults.faulted("a", 0.0) == 0.0
        faults.merged(["a"] * 7)  # two faults among sixteen outcomes
    assert faults.faulted("a", 0.0) == 0.0
    faults.merged(["a"] * 6)
    assert faults.faulted("a", 0.0) == 60.0, "three are too many, whatever lies between them"


def test_enough_merged_contributions_make_the_next_quarantine_the_first() -> None:
    faults = Faults()
    for _ in range(4):
        faults.faulted("a", 0.0)
    faults.merged(["a", "b"] * 15)
    assert faults.faulted("a", 0.0) == 0.0, "the fault that is left and this one"
    faults.merged(["a"] * 16)
    assert [faults.faulted("a", 0.0) for _ in range(3)] == [0.0, 0.0, 60.0]


def test_a_pardon_forgets_everything() -> None:
    faults = Faults()
    for _ in range(5):
        faults.faulted("a", 0.0)
    faults.pardon()
    assert not faults.quarantined
    assert [faults.faulted("a", 0.0) for _ in range(3)] == [0.0, 0.0, 60.0]


def test_the_delays_between_rounds_that_come_to_nothing() -> None:
    assert [delay_s(aborts) for aborts in range(12)] == [0, 0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
