"""The council in virtual time. `benchmarks/swarm/council.py` runs more seeds."""

from __future__ import annotations

import math

import pytest

from edit.council.machine import Council
from edit.council.record import Record
from edit.lab.council.plan import Plan, draw
from edit.lab.council.search import Result, failure, shrink
from edit.lab.council.swarm import Swarm
from tests.support.exhaustive import rarely


@pytest.mark.parametrize("first", rarely(range(0, 300, 50), kept=(0,)))
def test_no_split_and_progress_after_healing(first: int) -> None:
    result = Result()
    for seed in range(first, first + 50):
        assert failure(draw(seed), result=result) == "", f"python benchmarks/swarm/council.py --first {seed} --seeds 1"
    assert result.commits > 200
    assert (
        min(
            result.faults[kind]
            for kind in ("kill", "stop", "partition", "one-way", "jump", "drop", "power cut", "leave", "pause", "evict")
        )
        > 0
    )


def test_a_seed_is_the_same_each_time() -> None:
    traces: list[list[str]] = [[], []]
    for lines in traces:
        assert failure(draw(7), lines=lines) == ""
    assert traces[0] == traces[1] and len(traces[0]) > 100


def test_members_behind_a_relay_that_keep_parts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "balanced", lambda record, fit: record)
    plans = [plan for plan in map(draw, range(50, 100)) if plan.relayed and not plan.verify]
    assert any("members behind a relay own parts that others could" in failure(plan) for plan in plans)


def test_a_plan_that_fails_is_made_as_small_as_it_can() -> None:
    class Silent(Council):
        """Never stands for election: without a power cut the first leader would stay."""

        def _stand(self) -> None:
            if self.term == 0:
                super()._stand()
            else:
                self._election_at = math.inf

    def make(plan: Plan, lines: list[str] | None = None) -> Swarm:
        return Swarm(plan, Silent, lines)

    plan = next(plan for plan in map(draw, range(100)) if failure(plan, make) and len(plan.faults) > 5)
    smaller = shrink(plan, make)
    assert failure(smaller, make) and len(smaller.faults) <= 2
