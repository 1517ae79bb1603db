from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.rounds.deadlines import FEWEST, WINDOW, Deadlines, PeerPhase
from tests.support.exhaustive import examples

CONFIG = RoundsConfig(floor_s=5.0, ceiling_s=100.0, spread=6.0)
SECONDS = st.lists(st.floats(0, 1e4), min_size=FEWEST, max_size=3 * WINDOW)


def record(deadlines: Deadlines, peer_id: str, compute: float, upload: float = 0.0) -> None:
    deadlines.record(peer_id, PeerPhase.COMPUTE, compute)
    deadlines.record(peer_id, PeerPhase.UPLOAD, upload)


def measured(*seconds: float) -> Deadlines:
    """Of peer a, whose uploads take no time."""
    deadlines = Deadlines(CONFIG)
    for value in seconds:
        record(deadlines, "a", value)
    return deadlines


@pytest.mark.parametrize("seconds", [(), (8.0,), (8.0, 8.0)])
def test_the_ceiling_before_three_measurements(seconds: tuple[float, ...]) -> None:
    deadlines = measured(*seconds)
    assert not deadlines.measured("a")
    assert deadlines.expected_s("a") == 100.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((10.0, 12.0, 14.0), 12 + 6 * 2),  # median 12, MAD 2
        ((10.0, 10.0, 10.0), 10 + 6 * 1),  # constant: a tenth of the median is the margin
        ((10.0, 10.0, 10.0, 90.0), 10 + 6 * 1),  # one outlier moves nothing
        ((0.1, 0.1, 0.1), 5.0),  # floor
        ((50.0, 60.0, 70.0), 100.0),  # 60 + 6 * 10: ceiling
    ],
)
def test_median_plus_spread_times_deviation(seconds: tuple[float, ...], expected: float) -> None:
    assert measured(*seconds).expected_s("a") == pytest.approx(expected)


def test_only_the_last_measurements_count() -> None:
    assert measured(*[90.0] * 50, *[10.0] * WINDOW).expected_s("a") == 16.0


def test_each_peer_has_its_own_time_and_a_new_measurement_counts_at_once() -> None:
    deadlines = measured(10.0, 10.0, 10.0)
    for _ in range(3):
        record(deadlines, "b", 20.0)
    assert (deadlines.expected_s("a"), deadlines.expected_s("b"), deadlines.expected_s("unmeasured")) == (16.0, 32.0, 100.0)
    for _ in range(WINDOW):
        record(deadlines, "b", 10.0)
    assert deadlines.expected_s("b") == 16.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_our_own_bug(seconds: float) -> None:
    with pytest.raises(LocalProtocolError, match="measured compute time of a"):
        measured(seconds)


@settings(deadline=None, max_examples=examples(200))
@given(SECONDS)
def test_always_between_floor_and_ceiling_and_never_below_the_median(seconds: list[float]) -> None:
    expected = measured(*seconds).expected_s("a")
    assert 5.0 <= expected <= 100.0
    window = sorted(seconds[-WINDOW:])
    assert expected >= min(window[(len(window) - 1) // 2], 100.0)


@settings(deadline=None, max_examples=examples(100))
@given(SECONDS)
def test_the_order_within_the_window_does_not_matter(seconds: list[float]) -> None:
    window = seconds[-WINDOW:]
    assert measured(*window).expected_s("a") == measured(*reversed(window)).expected_s("a")


def test_each_phase_has_its_own_spread_and_they_add_up() -> None:
    deadlines = Deadlines(CONFIG)
    for compute, upload in ((10.0, 1.0), (10.0, 2.0), (10.0, 3.0)):
        record(deadlines, "a", compute, upload)
    deadlines.record("a", PeerPhase.DOWNLOAD, 5.0)
    allowed = [deadlines.allowed_s("a", phase) for phase in (PeerPhase.DOWNLOAD, PeerPhase.COMPUTE, PeerPhase.UPLOAD)]
    assert allowed == pytest.approx([5 + 6 * 0.5, 10 + 6 * 1, 2 + 6 * 1])
    assert deadlines.expected_s("a") == pytest.approx(sum(allowed))


def test_uploads_must_have_been_measured_too() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(FEWEST):
        deadlines.record("a", PeerPhase.COMPUTE, 10.0)
    assert deadlines.expected_s("a") == 100.0


def test_no_deadline_is_shorter_than_one_inner_step_and_a_claim_above_the_ceiling_counts_as_far_as_it_was_measured() -> None:
    deadlines = measured(10.0, 10.0, 10.0)
    deadlines.claim("a", 50.0)
    assert deadlines.expected_s("a") == 50.0
    deadlines.claim("a", 250.0)
    assert deadlines.expected_s("a") == 100.0
    deadlines.record_step("a", 180.0)
    assert deadlines.expected_s("a") == 180.0
    deadlines.record_step("a", 1000.0)
    deadlines.record_step("a", 1000.0)
    assert deadlines.expected_s("a") == 200.0, "twice the ceiling, whatever was measured"
    deadlines.claim("a", 1.0)
    assert deadlines.expected_s("a") == 16.0


def test_an_impossible_measured_step_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError, match="measured step of a"):
        Deadlines(CONFIG).record_step("a", float("inf"))


def test_measurements_survive_a_restart() -> None:
    before, after = measured(10.0, 12.0, 14.0), Deadlines(CONFIG)
    after.load(before.to_json())
    assert after.expected_s("a") == before.expected_s("a") == 24.0


def test_measured_steps_survive_a_restart() -> None:
    before, after = measured(10.0), Deadlines(CONFIG)
    before.record_step("a", 0.5)
    after.load(before.to_json())
    assert after.measured_step_s("a") == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '[["a", "compute", 7]]',
        '[["a", "lunch", [7]]]',
        '[["a", "compute", ["7"]]]',
        '[["a", "compute", [-1]]]',
        '[["a", "compute", [NaN]]]',
        '[["a"]]',
    ],
)
def test_damaged_measurements_are_an_error_and_change_nothing(text: str) -> None:
    deadlines = measured(10.0, 12.0, 14.0)
    with pytest.raises(ValueError):
        deadlines.load(text)
    assert deadlines.expected_s("a") == 24.0


def test_where_h_changes_compute_is_expected_to_take_as_much_longer() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(3):
        record(deadlines, "a", compute=4.0, upload=1.0)
    before = deadlines.expected_s("a")
    deadlines.pace = 3.0
    assert deadlines.expected_s("a") == pytest.approx(3 * 1.6 * 4.0 + 1.6 * 1.0)
    for _ in range(WINDOW):
        record(deadlines, "a", compute=12.0, upload=1.0)
    again = Deadlines(CONFIG)
    again.load(deadlines.to_json())
    assert again.expected_s("a") == before == pytest.approx(1.6 * 5.0), "they are kept as of the first H"


def test_where_batches_may_double_a_peer_has_twice_the_time_of_its_last_computation() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(WINDOW):
        record(deadlines, "a", compute=4.0, upload=1.0)
    usual = deadlines.expected_s("a")
    deadlines.may_double = True
    assert deadlines.expected_s("a") == pytest.approx(1.6 * 2 * 4.0 + 1.6 * 1.0)
    for doubled in (8.0, 16.0):
        assert deadlines.allowed_s("a", PeerPhase.COMPUTE) > 1.5 * doubled
        record(deadlines, "a", compute=doubled, upload=1.0)
    record(deadlines, "a", compute=1.0, upload=1.0)
    assert deadlines.expected_s("a") == pytest.approx(usual), "no less than without it"
