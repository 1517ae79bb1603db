"""When a certificate is due, when somebody is warned, and what a wrong clock looks like."""

from __future__ import annotations

import pytest

from editpb.validity import DAY_S, Notice, Validity, duration, over

YEAR = Validity(begins=1_800_000_000.0, ends=1_800_000_000.0 + 365 * DAY_S)


def test_it_is_due_after_two_thirds_of_its_life() -> None:
    at = YEAR.begins + 365 * DAY_S * 2 / 3
    assert not YEAR.renewal_due(at - 1) and YEAR.renewal_due(at) and YEAR.renewal_due(YEAR.ends + 1)
    assert YEAR.notice(at) is Notice.NONE, "a renewal that works is never warned of"


@pytest.mark.parametrize(
    ("days_left", "notice", "text"),
    [
        (365, Notice.NONE, "expires in 365 days, on 2028-01-15 08:00 UTC"),
        (31, Notice.NONE, "expires in 31 days"),
        (30, Notice.SOON, "expires in 30 days"),
        (7.1, Notice.SOON, "expires in 7 days"),
        (7, Notice.VERY_SOON, "expires in 7 days"),
        (0.25, Notice.VERY_SOON, "expires in 6 h"),
        (0, Notice.EXPIRED, "expired on 2028-01-15 08:00 UTC, 0 min ago by this machine's clock"),
        (-3, Notice.EXPIRED, "expired on 2028-01-15 08:00 UTC, 3 days ago by this machine's clock"),
        (365 + 5 / 24, Notice.NOT_YET, "is valid from 2027-01-15 08:00 UTC on: this machine's clock is at least 5 h behind"),
    ],
)
def test_what_is_said(days_left: float, notice: Notice, text: str) -> None:
    now = YEAR.ends - days_left * DAY_S
    assert YEAR.notice(now) is notice
    assert YEAR.text(now).startswith(text)


def test_another_machine_is_told_whose_clock_says_so() -> None:
    assert YEAR.text(YEAR.begins - 5 * 3600, "the clock of b").endswith("on: the clock of b is at least 5 h behind")
    assert over("a", YEAR.ends, YEAR.ends + 3 * DAY_S, "the clock of b") == (
        "the certificate of a expired on 2028-01-15 08:00 UTC, 3 days ago by the clock of b; "
        "invite the member again, or set that clock if it is wrong"
    )


@pytest.mark.parametrize(("days", "refused"), [(-1, False), (0, True), (364, True), (365, False), (400, False)])
def test_one_that_is_not_valid_yet_replaces_none_that_is_valid(days: float, refused: bool) -> None:
    later, now = Validity(YEAR.ends + 40 * DAY_S, YEAR.ends + 400 * DAY_S), YEAR.begins + days * DAY_S
    said = later.too_early(YEAR, now, "the clock of b")
    assert said == (
        "the new certificate is valid from 2028-02-24 08:00 UTC on: the clock of b, or this machine's, is wrong"
        if refused
        else None
    )
    assert later.too_early(YEAR, later.begins, "the clock of b") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 min"), (7199, "119 min"), (7200, "2 h"), (2 * DAY_S - 1, "47 h"), (2 * DAY_S, "2 days")]
)
def test_a_duration_is_rounded_down(seconds: float, text: str) -> None:
    assert duration(seconds) == text
