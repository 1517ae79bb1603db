"""What a peer that joins has of the run's outer parameters is not fetched: of its own model, or of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from edit.errors import ConfigError
from edit.fragments.digest import digest, fragment_hash
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Contribution, DescribedSnapshot, Lacks, Outcome, Progress, Snapshot
from edit.replica.ranks import ALONE, Ranks
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker
from tests.support.models import TinyTransformer
from tests.support.ranks import at_every_rank
from tests.support.trainee import worker_config

LAST = len(Replica(TinyTransformer()).schema.fragments) - 1
ALL = list(range(LAST + 1))


class Sparing:
    """A run whose carrier brings what is lacking, and nothing else."""

    peer_id = "me"

    def __init__(self, theta: Sequence[Tensor], outer_step: int = 0, run_outer_step: int = 0) -> None:
        self.theta, self.outer_step, self.run_outer_step = theta, outer_step, run_outer_step
        self.fetched: list[int] = []

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        assert lacks is not None
        hashes = tuple(map(fragment_hash, self.theta))
        run = DescribedSnapshot(self.outer_step, digest(self.theta), hashes, self.run_outer_step)
        lacks(DescribedSnapshot(run.outer_step, "", (bytes(32),) * len(hashes)))  # one that is gone before it is read
        self.fetched = sorted(lacks(run).fragments)
        held = shards if shards is not None else [Shard(fragment) for fragment in schema.fragments]
        parts = [shard.take(self.theta[i]) if i in self.fetched else torch.empty(0) for i, shard in enumerate(held)]
        return Snapshot(run.outer_step, run.digest, tuple(parts), run.run_outer_step)

    def contribute(self, contribution: Contribution) -> None:
        raise AssertionError("it does not train here")

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        return None

    def snapshot(self) -> Snapshot:
        raise AssertionError("it has one")

    def report(self, progress: Progress) -> None:
        pass


def initial(seed: int = 3) -> list[Tensor]:
    return Replica(TinyTransformer(seed=seed)).local()


def but_the_last(theta: list[Tensor]) -> list[Tensor]:
    return [*theta[:-1], theta[-1] + 1]


def joined(
    run: Sparing, saved: dict[str, Any] | None = None, ranks: Ranks = ALONE, **sync: Any
) -> tuple[EditWorker, nn.Module]:
    model = TinyTransformer(seed=3)
    if ranks.size > 1:
        mesh = init_device_mesh("cpu", (ranks.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    worker = EditWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), run, worker_config(**sync), ranks)
    if saved is not None:
        worker.load_state_dict(saved)
    with worker:
        assert worker.digest == digest(run.theta) or saved is not None
    return worker, model


def saved_in(run: Sparing) -> dict[str, Any]:
    model = TinyTransformer(seed=3)
    with EditWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), run, worker_config()) as worker:
        return worker.state_dict()


RUNS: dict[str, tuple[Callable[[], Sparing], list[int]]] = {
    "the same initial parameters": (lambda: Sparing(initial()), []),
    "all but one fragment": (lambda: Sparing(but_the_last(initial())), [LAST]),
    "another model": (lambda: Sparing(initial(seed=5)), [i for i in ALL if not torch.equal(initial(3)[i], initial(5)[i])]),
    "further": (lambda: Sparing(initial(), outer_step=1), ALL),
}


@pytest.mark.parametrize("name", RUNS)
def test_who_built_the_parameters_that_the_run_begins_with_fetches_only_what_differs(name: str) -> None:
    make, lacking = RUNS[name]
    run = make()
    _, model = joined(run)
    assert run.fetched == lacking
    assert all(torch.equal(a, b) for a, b in zip(Replica(model).local(), run.theta, strict=True))


def at_a_rank() -> dict[str, tuple[list[int], list[Tensor]]]:
    seen = {}
    for name, (make, _) in RUNS.items():
        run = make()
        worker, _ = joined(run, ranks=Ranks.world())
        (share,) = worker._exchanges
        layout = share.replica.layout
        mine = [shard.take(theta) for shard, theta in zip(layout.held, run.theta, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(mine, share.replica.local(), strict=True))
        seen[name] = run.fetched
    assert dist.get_world_size() == 2
    return seen  # type: ignore[return-value]


def test_so_do_the_ranks_of_a_sharded_replica(tmp_path: Any) -> None:
    for seen in at_every_rank(at_a_rank, 2, tmp_path):
        assert seen == {name: lacking for name, (_, lacking) in RUNS.items()}


@pytest.mark.parametrize(
    ("outer_step", "run_outer_step", "strict", "lacking"),
    [(2, 0, False, []), (2, 2, False, []), (2, 3, False, ALL), (3, 0, False, ALL), (2, 3, True, []), (3, 0, True, [])],
)
def test_who_goes_on_exactly_from_its_checkpoint_fetches_nothing(
    outer_step: int, run_outer_step: int, strict: bool, lacking: list[int]
) -> None:
    theta = initial(seed=8)
    saved = saved_in(Sparing(theta, 2))
    further = theta if outer_step == 2 else initial(seed=9)
    run = Sparing(further, outer_step, run_outer_step)
    worker, model = joined(run, saved, strict=strict)
    assert run.fetched == lacking
    begins = further if lacking else theta
    assert worker.digest == digest(begins) and worker.outer_step == (outer_step if lacking else 2)
    if lacking:
        assert all(torch.equal(a, b) for a, b in zip(Replica(model).local(), further, strict=True))


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_fetched() -> None:
    saved = saved_in(Sparing(initial(seed=8), 2))
    run = Sparing(initial(seed=9), 2)
    with pytest.raises(ConfigError, match="it is of another run"):
        joined(run, saved)
    assert run.fetched == []
