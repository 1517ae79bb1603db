"""The plan of a masked round: only what a grid can be, and one digest for one plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edit.trust.mask_plan import FragmentPlan, plan_digest

PLAN = FragmentPlan(fragment_id=1, bits=16, limit=100, exponents=bytes([0, 255, 3]), reference=0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"fragment_id": 2},
        {"bits": 32},
        {"limit": 101},
        {"exponents": bytes([0, 254, 3])},
        {"exponents": bytes([0, 255, 3, 0])},
        {"reference": 0.5000000001},
    ],
)
def test_another_plan_has_another_digest(change: dict[str, Any]) -> None:
    assert plan_digest([replace(PLAN, **change)]) != plan_digest([PLAN])


def test_the_digest_is_of_all_fragments_in_any_order() -> None:
    other = replace(PLAN, fragment_id=0)
    assert plan_digest([PLAN, other]) == plan_digest([other, PLAN]) != plan_digest([PLAN])


@pytest.mark.parametrize(
    "change",
    [
        {"fragment_id": -1},
        {"bits": 12},
        {"limit": 0},
        {"limit": 1 << 15},
        {"exponents": b""},
        {"exponents": bytes([128])},
        {"reference": -1.0},
        {"reference": float("nan")},
        {"reference": float("inf")},
    ],
)
def test_what_no_plan_has_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fragment"):
        replace(PLAN, **change)


def test_it_fits_a_fragment_of_as_many_blocks() -> None:
    assert PLAN.fits(513) and PLAN.fits(768) and not PLAN.fits(512) and not PLAN.fits(769)
    assert PLAN.scales.tolist() == [0, -1, 3]
