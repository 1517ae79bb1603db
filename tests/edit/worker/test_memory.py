"""What a worker holds beside theta, the model and the optimizer: a fragment at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import pytest
from torch import Tensor

from edit.local import LocalRun
from edit.records import Here, RolledBack
from edit.replica.replica import Replica
from tests.support.trainee import Trainee, config


def test_an_update_replaces_one_fragment_of_theta_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the update is here and its digest is the commit's before the first one is replaced; then the old one is freed."""
    run = LocalRun(config(), ["a"])
    one = Trainee(run, "a", seed=0, every=2)
    one.worker.__enter__()
    one.step(3)  # the run's own tensors were theta at first, and others may hold them
    old = [weakref.ref(theta) for theta in one.worker.outer_of()[1].fragments]
    alive: list[int] = []
    checked: list[int] = []
    hashes_after, load_local = Replica.hashes_after, Replica.load_local

    def hashing(self: Replica, steps: Mapping[int, Here | RolledBack]) -> tuple[bytes, ...]:
        checked.append(len(steps))
        assert sum(ref() is not None for ref in old) == len(old), "nothing is replaced before all of it is checked"
        return hashes_after(self, steps)

    def loading(self: Replica, fragment_id: int, vector: Tensor) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in old))
        load_local(self, fragment_id, vector)

    monkeypatch.setattr(Replica, "hashes_after", hashing)
    monkeypatch.setattr(Replica, "load_local", loading)
    one.step(2)
    assert one.worker.outer_step == 2 and checked == [len(old)]
    assert alive == list(range(len(old), 0, -1)), "the one being replaced, and those not replaced yet"
    one.worker.__exit__(KeyboardInterrupt, None, None)
