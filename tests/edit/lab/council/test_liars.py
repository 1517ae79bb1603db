"""A member that lies in the simulated swarm; and that the simulation notices a council that believes it."""

from __future__ import annotations

import pytest

from edit.council.machine import Council
from edit.lab.council.liars import LyingSwarm
from edit.lab.council.plan import LIES, Plan, draw_liar
from edit.lab.council.search import failure
from tests.support.council import mutants

SEEDS = range(2, 5)
MUTANT_SEEDS = range(2, 20)  # in the first two the liar owns nothing in the end


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("lie", LIES)
def test_the_others_go_on_beside_one_that_lies(lie: str, verify: int) -> None:
    believed = 0

    def make(plan: Plan, lines: list[str] | None = None) -> LyingSwarm:
        swarms.append(LyingSwarm(plan, lines=lines))
        return swarms[-1]

    swarms: list[LyingSwarm] = []
    for seed in SEEDS:
        assert failure(draw_liar(seed, lie, verify=verify), make) == "", seed
        believed += len(swarms[-1].believed)
    assert min(swarm.truth.commits for swarm in swarms) > 0
    if lie == "wrong":
        assert bool(believed) is (verify == 0), "what nobody computes again is believed"


NOTICED: list[tuple[type[Council], str, int]] = [
    (mutants.NoVerifiers, "wrong", 1),
    (mutants.AnyHolders, "two", 0),
    (mutants.CountsAll, "two", 0),
    (mutants.NeverComplains, "nothing", 0),
    (mutants.FollowsTheDeaf, "nothing", 0),
    (mutants.Hasty, "slander", 0),
    (mutants.BelievesOne, "slander", 0),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mutant", "lie", "verify"), NOTICED, ids=[f"{mutant.__name__} {lie} {verify}" for mutant, lie, verify in NOTICED]
)
def test_the_simulation_notices_a_council_that_one_can_deceive(mutant: type[Council], lie: str, verify: int) -> None:
    def make(plan: Plan, lines: list[str] | None = None) -> LyingSwarm:
        return LyingSwarm(plan, mutant, lines)

    assert any(failure(draw_liar(seed, lie, verify=verify), make) for seed in MUTANT_SEEDS)
