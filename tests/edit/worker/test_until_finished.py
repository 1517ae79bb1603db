"""What a loop ends with: the batches until the run is over, and the parameters that the model holds then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from edit import ConfigError, EditWorker, LocalRun, OuterConfig, RunConfig, WorkerConfig
from edit.config.run import PenaltyConfig, SyncConfig
from edit.records import Finished
from edit.replica.ranks import ALONE
from edit.replica.replica import Replica
from edit.worker.batches import epochs
from tests.support.lone_peer import EVERY, parameters, run_of, same, theta
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.ranks import at_every_rank
from tests.support.scripted import ScriptedCollective, snapshot_of
from tests.support.settings import worker_config

STEPS = 3
MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "delayed": {"mode": "delayed", "delay": 2},
    "eager": {"mode": "eager", "delay": 2},
    "streaming": {"mode": "delayed", "delay": 1, "groups": 2},
}


def in_a_run(
    model: nn.Module, mode: str = "blocking", outer_steps: int = STEPS, **named: Any
) -> tuple[LocalRun, torch.optim.Optimizer, EditWorker]:
    sync = SyncConfig(every=EVERY, outer_steps=outer_steps, **MODES[mode])
    config = RunConfig(sync=sync, outer=OuterConfig(optimizer="sgd", lr=0.5), penalty=PenaltyConfig(enabled=False))
    run, optimizer = LocalRun(config, ["me"]), torch.optim.AdamW(model.parameters(), lr=0.02)
    return run, optimizer, EditWorker(model, optimizer, run.collective("me"), WorkerConfig.of(config), **named)


class TestLeaving:
    @pytest.mark.parametrize("mode", MODES)
    def test_the_model_holds_the_outer_parameters(self, mode: str) -> None:
        model = small_mlp()
        run, optimizer, worker = in_a_run(model, mode, outer_steps=100)
        with worker:
            for batch in list(zip(range(EVERY * 2 + 1), regression_batches(0), strict=False)):
                train_step(model, optimizer, batch[1])
            assert not same(parameters(model), theta(run))
        assert run.state.outer_step > 0
        assert same(parameters(model), theta(run))

    def test_or_the_local_ones_where_they_are_wanted(self) -> None:
        model = small_mlp()
        run, optimizer, worker = in_a_run(model, outer_steps=100, leave="local")
        batches = regression_batches(0)
        with worker:
            for _ in range(EVERY + 1):
                train_step(model, optimizer, next(batches))
            mine = parameters(model)
        assert same(parameters(model), mine) and not same(mine, theta(run))

    def test_an_exception_leaves_them_as_they_were(self) -> None:
        model = small_mlp()
        _, optimizer, worker = in_a_run(model)
        with pytest.raises(KeyboardInterrupt), worker:
            train_step(model, optimizer, next(regression_batches(0)))
            mine = parameters(model)
            raise KeyboardInterrupt
        assert same(parameters(model), mine)

    def test_it_is_one_of_two_words(self) -> None:
        model = small_mlp()
        with pytest.raises(ConfigError, match="leave = 'both': must be one of outer, local"):
            in_a_run(model, leave="both")


class TestTheRunsEnd:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_loop_that_asks_whether_it_is_over_finds_the_outer_parameters(self, mode: str) -> None:
        model, batches = small_mlp(), regression_batches(0)
        run, optimizer, worker = in_a_run(model, mode)
        with worker:
            while not worker.finished:
                train_step(model, optimizer, next(batches))
            assert same(parameters(model), theta(run))

    @pytest.mark.parametrize("mode", MODES)
    def test_the_loop_ends_with_the_run_and_no_batch_is_for_nothing(self, mode: str) -> None:
        model, outer_steps = small_mlp(), STEPS * MODES[mode].get("groups", 1)
        run, optimizer, worker = in_a_run(model, mode, outer_steps)
        with worker:
            for batch in worker.until_finished(regression_batches(0)):
                train_step(model, optimizer, batch)
            assert run.state.outer_step == worker.outer_step == outer_steps
            assert same(parameters(model), theta(run)) and not worker.pending
            steps = worker.inner_steps
        in_phase = EVERY // MODES[mode].get("groups", 1)
        assert steps == in_phase * outer_steps

    def test_the_peers_own_parameters_stay_where_they_are_wanted(self) -> None:
        """Delayed: the peer has trained on when it learns that the run is over."""
        model, batches = small_mlp(), regression_batches(0)
        run, optimizer, worker = in_a_run(model, "delayed", leave="local")
        with worker:
            while not worker.finished:
                train_step(model, optimizer, next(batches))
            mine = parameters(model)
            assert not same(mine, theta(run))
        assert same(parameters(model), mine)

    @pytest.mark.parametrize("steps", [1, EVERY], ids=["nothing is pending", "a contribution is pending"])
    def test_a_loop_whose_steps_no_longer_count_ends_too(self, steps: int) -> None:
        model, theirs, batches = small_mlp(), ScriptedCollective(), regression_batches(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with EditWorker(model, optimizer, theirs, worker_config(every=EVERY, mode="delayed", delay=2)) as worker:
            for _ in range(steps):
                train_step(model, optimizer, next(batches))
            assert worker.pending is (steps == EVERY)
            theirs.answers[0].append(Finished(0))
            assert sum(1 for _ in worker.until_finished(iter([0] * 15_000))) == 10_000

    def test_an_evicted_peer_hears_of_it(self) -> None:
        from edit import EvictedError

        model = small_mlp()
        run, optimizer, worker = in_a_run(model)
        with pytest.raises(EvictedError, match="for the test"), worker:
            for step, batch in enumerate(worker.until_finished(regression_batches(0))):
                train_step(model, optimizer, batch)
                if step == EVERY:
                    run.evict("me", "for the test")


class Shuffled(list[Any]):
    """A list that is told the number of each pass."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.passes = list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.passes.append(epoch)


class Told(Sampler[list[int]]):
    """A batch sampler around another that is told the number of each pass."""

    def __init__(self, inner: BatchSampler) -> None:
        self.batch_sampler, self.passes = inner, list[int]()
        self.batch_size, self.drop_last = inner.batch_size, inner.drop_last

    def set_epoch(self, epoch: int) -> None:
        self.passes.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


class TestTheData:
    def test_is_begun_again_after_its_end(self) -> None:
        model, batches = small_mlp(), regression_batches(0)
        data = Shuffled(*(next(batches) for _ in range(5)))
        _, optimizer, worker = in_a_run(model)
        with worker:
            for batch in worker.until_finished(data):
                train_step(model, optimizer, batch)
            assert worker.inner_steps == EVERY * STEPS
        assert data.passes == [0, 1, 2]

    def test_the_sampler_of_a_loader_is_told_the_pass(self) -> None:
        rows: Dataset[Any] = [torch.randn(4) for _ in range(8)]  # type: ignore[assignment]
        sampler = DistributedSampler(rows, num_replicas=1, rank=0)
        loader = DataLoader(rows, batch_size=4, sampler=sampler)
        model = small_mlp()
        _, optimizer, worker = in_a_run(model)
        with worker:
            for inputs in worker.until_finished(loader):
                train_step(model, optimizer, (inputs, torch.zeros(4, 3)))
        assert sampler.epoch == EVERY * STEPS // 2

    def test_the_dataset_of_a_loader_and_the_sampler_of_its_batch_sampler_are_told_the_pass(self) -> None:
        rows = Shuffled(*range(8))
        sampler: Any = DistributedSampler(rows, num_replicas=1, rank=0)  # type: ignore[arg-type]
        loader = DataLoader(rows, batch_sampler=BatchSampler(sampler, 4, drop_last=False))  # type: ignore[arg-type]
        resumed = taken(loader, epoch=3)
        assert rows.passes == [3, 4, 5, 6, 7, 8, 9] and sampler.epoch == 9
        assert taken(loader) != resumed and taken(loader, epoch=3) == resumed

    def test_the_parts_of_a_loader_that_is_told_itself_are_told_the_pass_too(self) -> None:
        class Told(DataLoader[Any]):
            def set_epoch(self, epoch: int) -> None:
                pass

        rows = Shuffled(*range(8))
        sampler: Any = DistributedSampler(rows, num_replicas=1, rank=0)  # type: ignore[arg-type]
        taken(Told(rows, batch_sampler=BatchSampler(sampler, 4, drop_last=False)), epoch=3)  # type: ignore[arg-type]
        assert rows.passes[:2] == [3, 4] and sampler.epoch == rows.passes[-1]

    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_parts_of_a_loader_of_accelerate_are_told_the_pass(self, processes: int) -> None:
        rows = Shuffled(*range(8 * processes))
        sampler: Any = DistributedSampler(rows, num_replicas=1, rank=0)  # type: ignore[arg-type]
        batches = Told(BatchSampler(sampler, 4, drop_last=False))
        loader = DataLoader(rows, batch_sampler=batches)  # type: ignore[arg-type]
        accelerate = pytest.importorskip("accelerate")
        prepared = accelerate.data_loader.prepare_data_loader(loader, num_processes=processes, process_index=0)
        taken(prepared, epoch=3)
        last = rows.passes[-1]
        assert {*rows.passes} == {*batches.passes} == {*range(3, last + 1)} and sampler.epoch == last > 3

    def test_batches_that_are_their_own_batch_sampler_are_no_endless_loop(self) -> None:
        class Own(list[Any]):
            @property
            def batch_sampler(self) -> object:
                return self

        assert next(epochs(Own([1, 2]))) == 1

    def test_an_iterator_ends_the_loop_with_its_last_batch(self) -> None:
        model, batches = small_mlp(), regression_batches(0)
        run, optimizer, worker = in_a_run(model)
        with worker:
            for batch in worker.until_finished(iter([next(batches) for _ in range(EVERY + 2)])):
                train_step(model, optimizer, batch)
            assert worker.inner_steps == EVERY + 2 and not worker.finished
        assert run.state.outer_step == 1 and same(parameters(model), theta(run))

    def test_none_at_all_is_an_error(self) -> None:
        _, _, worker = in_a_run(small_mlp())
        with worker, pytest.raises(ConfigError, match="data: has no batches"):
            next(worker.until_finished([]))


def two_ranks(rank_has: list[int]) -> tuple[int, bool]:
    """Train a model that two ranks have copies of, each with an iterator of so many batches."""
    model = DistributedDataParallel(small_mlp())
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), regression_batches(0)
    theirs = ScriptedCollective(snapshot_of(0, Replica(small_mlp()).local()))
    with EditWorker(model, optimizer, theirs, worker_config(every=100)) as worker:
        for batch in worker.until_finished(next(batches) for _ in range(rank_has[torch.distributed.get_rank()])):
            train_step(model, optimizer, batch)
        return worker.inner_steps, worker.finished


def taken(data: Any, **where: int) -> list[int]:
    """What a run of 12 inner steps trains on."""
    model = small_mlp()
    _, optimizer, worker = in_a_run(model, outer_steps=12 // EVERY)
    seen, batches = [], regression_batches(1)
    with worker:
        for batch in worker.until_finished(data, **where):
            seen += batch.tolist()
            train_step(model, optimizer, next(batches))
    return seen


def test_a_loop_that_goes_on_leaves_out_batches_of_its_first_pass_only() -> None:
    data = DataLoader(torch.arange(6), batch_size=1)
    assert taken(data, skip=4) == [4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert taken(data, skip=6)[:6] == [0, 1, 2, 3, 4, 5], "the pass was over"


def test_a_loop_that_goes_on_shuffles_as_one_that_was_not_stopped() -> None:
    data = DataLoader(torch.arange(6), batch_size=1, sampler=DistributedSampler(range(6), 1, 0))
    assert taken(data, epoch=1) == [*taken(data)[6:], *taken(data, epoch=2)[:6]]


def test_a_loader_that_leaves_out_batches_in_every_pass_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    data = DataLoader(torch.arange(6), batch_size=1)
    prepared = accelerate.Accelerator(cpu=True).prepare(data)
    of_two = accelerate.data_loader.prepare_data_loader(
        accelerate.skip_first_batches(data, 4), num_processes=2, process_index=0
    )
    for loader in (accelerate.skip_first_batches(data, 4), accelerate.skip_first_batches(prepared, 4), of_two):
        with pytest.raises(ConfigError, match=r"leaves out its first 4 batches in every pass; .*skip=4"):
            taken(loader)
    data.skip_batches = 4  # type: ignore[attr-defined]  # of a loader of the user's own, whatever it means there
    assert len(taken(data)) == 12
    with pytest.raises(ConfigError, match="skip = 7: data has 6 batches"):
        taken(data, skip=7)
    with pytest.raises(ConfigError, match="must be at least 0"):
        taken(data, epoch=-1)


def test_all_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    """One has fewer batches: the others would wait for it for ever."""
    assert at_every_rank(two_ranks, 2, tmp_path, [9, 7]) == [(7, False)] * 2


class TestSeveralOptimizers:
    @pytest.fixture
    def two(self) -> Iterator[tuple[nn.Module, Callable[[], None], EditWorker, LocalRun]]:
        model, run, batches = small_mlp(), run_of(lr=0.5), regression_batches(0)
        first, *others = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.02)]

        def step() -> None:
            inputs, targets = next(batches)
            nn.functional.mse_loss(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        config = worker_config(every=EVERY, codec="fp32")
        with EditWorker(model, optimizers, run.collective("me"), config, leave="local") as worker:
            yield model, step, worker, run

    def test_the_last_ends_an_inner_step(self, two: tuple[nn.Module, Callable[[], None], EditWorker, LocalRun]) -> None:
        model, step, worker, run = two
        before = parameters(model)
        for _ in range(EVERY):
            step()
        assert worker.inner_steps == EVERY and worker.pending
        mine = parameters(model)
        assert worker.synchronize()
        expected = {name: before[name] - 0.5 * (before[name] - mine[name]) for name in before}
        for name, parameter in theta(run).items():
            torch.testing.assert_close(parameter, expected[name])

    def test_the_first_takes_the_outcome_before_it_moves_anything(
        self, two: tuple[nn.Module, Callable[[], None], EditWorker, LocalRun]
    ) -> None:
        model, step, worker, run = two
        for _ in range(EVERY):
            step()
        model.eval()
        for parameter in model.parameters():  # no forward: the gradients are the user's own
            parameter.grad = torch.zeros_like(parameter)
        assert worker.pending
        worker._optimizers[0].step()
        assert not worker.pending and run.state.outer_step == worker.outer_step == 1

    def test_none_and_one_twice_are_refused(self) -> None:
        model = small_mlp()
        optimizer = torch.optim.SGD(model.parameters())
        for given, message in (([], "at least one"), ([optimizer, optimizer], "given twice")):
            with pytest.raises(ConfigError, match=message):
                EditWorker(model, given, run_of().collective("me"), worker_config(), ALONE)
