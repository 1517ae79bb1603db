"""What a worker holds beside theta, the model and the optimizer: a fragment at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from edit.config.run import CodecConfig
from edit.fragments.digest import digest
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
    hashes_after, apply_fragment = Replica.hashes_after, Replica.apply_fragment

    def hashing(self: Replica, steps: Mapping[int, Here | RolledBack]) -> tuple[bytes, ...]:
        checked.append(len(steps))
        assert sum(ref() is not None for ref in old) == len(old), "nothing is replaced before all of it is checked"
        return hashes_after(self, steps)

    def applying(self: Replica, *args: Any) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in old))
        apply_fragment(self, *args)

    monkeypatch.setattr(Replica, "hashes_after", hashing)
    monkeypatch.setattr(Replica, "apply_fragment", applying)
    one.step(2)
    assert one.worker.outer_step == 2 and checked == [len(old)]
    assert alive == list(range(len(old), 0, -1)), "the one being replaced, and those not replaced yet"
    one.worker.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_theta_moves_in_place_but_for_what_others_keep_of_it(codec: str) -> None:
    """A checkpoint that is being written and a reader of a snapshot hold theta of a past outer step by reference."""
    run = LocalRun(config(codec=CodecConfig(up=codec, down=codec)), ["a"])
    one = Trainee(run, "a", seed=0, every=2, codec=codec)
    one.worker.__enter__()
    one.step(5)

    def places() -> list[int]:
        return [replica.theta(i).data_ptr() for i in range(len(replica.schema.fragments))]

    replica = one.worker._exchanges[0].replica
    before = places()
    one.step(2)
    assert one.worker.outer_step == 3 and places() == before, "no memory is taken for an update"
    schema, outer = one.worker.outer_of()
    state, as_kept = one.worker.state_dict()["outer"], digest(outer.fragments)
    one.step(2)
    assert one.worker.outer_step == 4 and digest(outer.fragments) == outer.digest == as_kept != one.worker.digest
    named = [tensor.name for fragment in schema.fragments for tensor in fragment.tensors]
    assert torch.equal(torch.cat([state[name].reshape(-1) for name in named]), torch.cat(outer.fragments))
    assert not set(places()) & set(before)
    one.worker.__exit__(KeyboardInterrupt, None, None)
