"""The simulated swarm with real parts in real folders; and that it notices storage that breaks its rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import PartReplica, PartSnapshot
from edit.council.record import PartState
from edit.errors import EditError
from edit.lab.council.parts_on_disk import MemberDisk
from edit.lab.council.plan import draw
from edit.lab.council.replicated import ReplicatedSwarm
from edit.lab.council.truth import Broken
from tests.support.exhaustive import rarely

SEEDS = 20
MUTANT_SEEDS = 20


# 548: a member is killed when a fetched state is on its disk, and before it says so
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", rarely([*range(SEEDS), 548], kept=(*range(6), 548)))
def test_members_that_are_killed_in_any_write_come_to_the_same_bits(tmp_path: Path, seed: int) -> None:
    swarm = ReplicatedSwarm(draw(seed), tmp_path)
    swarm.run_all()
    assert swarm.truth.commits


class WithoutSync(MemberDisk):
    """Says that it holds an update before that is on disk."""

    def _sync(self, descriptor: int) -> None:
        pass


class AppliesWhatIsHeld(MemberDisk):
    """A restart takes the outer step that is held, agreed on or not, as a coordinator's does."""

    class replica(PartReplica):
        def _recover(self) -> None:
            super()._recover()
            if self._state.held is not None:
                self.adopt(self._state.held.id)


class ForgetsTheResidual(MemberDisk):
    """A snapshot lacks what the updates left out."""

    class replica(PartReplica):
        def snapshot(self) -> PartSnapshot:
            found = super().snapshot()
            return replace(found, tensors={name: each for name, each in found.tensors.items() if "residual" not in name})


class KeepsTheOlder(MemberDisk):
    """What was held for an older grant stays on disk, and the newer is said to be held."""

    class replica(PartReplica):
        def hold(self, offer: Offer, own: object = (), *, agreed: bool = False) -> None:
            if self._state.held is None:
                super().hold(offer, own, agreed=agreed)  # type: ignore[arg-type]
            self._state = PartState(self._state.outer_step, self._state.digest, offer.update)


@pytest.mark.parametrize("disk", [WithoutSync, AppliesWhatIsHeld, ForgetsTheResidual, KeepsTheOlder])
def test_the_simulation_notices(tmp_path: Path, disk: type[MemberDisk]) -> None:
    for seed in range(MUTANT_SEEDS):
        try:
            ReplicatedSwarm(draw(seed), tmp_path / str(seed), disk=disk).run_all()
        except (Broken, EditError):
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds saw nothing wrong with {disk.__name__}")
