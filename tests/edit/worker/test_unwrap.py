"""Models and optimizers as users have them from other libraries: the worker sees what is inside, with a plain peer's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from edit import ConfigError, EditWorker, RunConfig, WorkerConfig
from edit.codecs import decode
from edit.replica.replica import Replica
from tests.support.lone_peer import EVERY, parameters, run_of, same, theta
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.ranks import at_every_rank
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of
from tests.support.scripted_peer import BOTH_OK, flat
from tests.support.settings import worker_config

CONFIG = worker_config(every=EVERY, codec="fp32")


def contributes(model: nn.Module, optimizer: Any, inside: nn.Module) -> None:
    """Train in a run of one: the names are those of `inside`, which ends with the outer parameters."""
    run = run_of(lr=0.5)
    plain = Replica(small_mlp()).schema
    batches = regression_batches(0)
    with EditWorker(model, optimizer, run.collective("me"), CONFIG) as worker:
        for _ in range(EVERY + 1):
            train_step(model, optimizer, next(batches))
        assert worker.outer_step == 1 and worker.inner_steps == EVERY + 1
    assert run.state.schema == plain
    assert same(parameters(inside), theta(run))


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = small_mlp()
    contributes(*accelerate.Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02)), model)


def test_steps_that_accelerate_leaves_out_do_not_count() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = small_mlp()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    batches = regression_batches(0)
    with EditWorker(prepared, optimizer, run_of().collective("me"), CONFIG) as worker:
        for _ in range(6):
            with accelerator.accumulate(prepared):
                inputs, targets = next(batches)
                accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        assert worker.inner_steps == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fabric() -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    model = small_mlp()
    contributes(*fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02)), model)


class Pulled(torch.optim.Optimizer):
    """As Lookahead: steps another optimizer, then writes to the parameters, here half of the way back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in trained]
        self.optimizer.step()
        for parameter, then in zip(trained, before, strict=True):
            parameter.lerp_(then, 0.5)


class Accumulating(torch.optim.Optimizer):
    """Steps another optimizer at each fourth step, or, `alone`, writes to the parameters itself then."""

    def __init__(self, optimizer: torch.optim.Optimizer, alone: bool) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.alone, self.steps = optimizer, alone, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps % 4 == 0:
            if self.alone:
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.5)
            else:
                self.optimizer.step()


class Outside:
    """As apex's wrapper: no torch optimizer, but steps the one in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step


class Silent(torch.optim.Optimizer):
    """As Opacus's: a torch optimizer without hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original_optimizer, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.original_optimizer.step()


class Hookless(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer: it has a torch optimizer under a name of its own, and no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_that_a_wrapper_leaves_out_does_not_count(alone: bool) -> None:
    model, collective = small_mlp(), ScriptedCollective()
    optimizer, batches = Accumulating(torch.optim.SGD(model.parameters(), lr=0.1), alone), regression_batches(0)
    counted = []
    with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, collective, worker_config(every=9)) as worker:
        for _ in range(9):
            train_step(model, optimizer, next(batches))
            counted.append(worker.inner_steps)
        raise KeyboardInterrupt
    assert counted == [0, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("mode", ["blocking", "delayed"])
def test_what_a_wrapper_writes_after_its_inner_step_is_contributed(mode: str) -> None:
    model, collective = small_mlp(), ScriptedCollective()
    optimizer, before = Pulled(torch.optim.SGD(model.parameters(), lr=0.1)), flat(model)
    config = worker_config(every=1, codec="fp32", mode=mode)
    with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, collective, config) as worker:
        train_step(model, optimizer, next(regression_batches(0)))
        assert worker.inner_steps == 1
        sent = [decode(part.payload) for part in collective.rounds()[0]]
        assert all(map(torch.equal, sent, [then - now for then, now in zip(before, flat(model), strict=True)]))
        raise KeyboardInterrupt


@pytest.mark.parametrize("wrapper", [Outside, Silent])
def test_a_wrapper_without_hooks_of_its_own_is_taken_off(wrapper: Any) -> None:
    model = small_mlp()
    contributes(model, wrapper(torch.optim.AdamW(model.parameters(), lr=0.02)), model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_a_compiled_model() -> None:
    model = small_mlp()
    compiled = torch.compile(model, backend="eager")
    contributes(compiled, torch.optim.AdamW(compiled.parameters(), lr=0.02), model)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("form", ["the method", "a function"])
def test_a_compiled_step(form: str) -> None:
    model, run = small_mlp(), run_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()

    compiled = torch.compile(optimizer.step if form == "the method" else step, backend="eager")
    with EditWorker(model, optimizer, run.collective("me"), worker_config(every=EVERY, codec="fp32")) as worker:
        for _ in range(2 * EVERY):
            model(torch.ones(1, 4)).square().mean().backward()
            compiled()
        assert worker.inner_steps == 2 * EVERY
    assert run.state.outer_step == 2 and same(parameters(model), theta(run))


def replicated(compiled: bool) -> tuple[list[str], bool, int]:
    model = small_mlp()
    wrapped: Any = DistributedDataParallel(model)
    if compiled:
        wrapped = torch.compile(wrapped, backend="eager")
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02)
    theta = snapshot_of(0, Replica(small_mlp(seed=1)).local())
    answer, after = committed(theta, random_steps(theta), BOTH_OK)
    collective = ScriptedCollective(theta)
    batches = regression_batches(torch.distributed.get_rank())
    with EditWorker(wrapped, optimizer, collective, CONFIG) as worker:
        for _ in range(EVERY):
            train_step(wrapped, optimizer, next(batches))
        collective.answers[0].append(answer)
        train_step(wrapped, optimizer, next(batches))
        names = [tensor.name for fragment in worker.outer_of()[0].fragments for tensor in fragment.tensors]
        ranks = worker._ranks.size
    return names, all(map(torch.equal, flat(model), after.fragments)), ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_distributed_data_parallel_is_one_peer_of_all_its_ranks(tmp_path: Path, compiled: bool) -> None:
    plain = [tensor.name for fragment in Replica(small_mlp()).schema.fragments for tensor in fragment.tensors]
    assert at_every_rank(replicated, 2, tmp_path, compiled) == [(plain, True, 2)] * 2


class FullyShardedDataParallel(nn.Module):
    """As torch's first version is called; it needs a device that is not here."""


class TestRefused:
    @pytest.mark.parametrize(
        ("wrapper", "mend"), [(DataParallel, "DistributedDataParallel"), (FullyShardedDataParallel, "fully_shard")]
    )
    def test_wrappers_that_hide_the_parameters(self, wrapper: Any, mend: str) -> None:
        model = small_mlp()
        wrapped = wrapper(model) if wrapper is DataParallel else wrapper()
        with pytest.raises(ConfigError, match=rf"^model: {wrapper.__name__} cannot train with other peers: .*{mend}") as error:
            EditWorker(wrapped, torch.optim.SGD(model.parameters()), run_of().collective("me"), CONFIG)
        assert "\n" not in str(error.value)

    def test_what_is_no_optimizer(self) -> None:
        model = small_mlp()
        optimizer = torch.optim.SGD(model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for wrong, said in ((scheduler, "a ConstantLR"), (None, "a NoneType"), (object(), "an object"), ([scheduler], "a Con")):
            with pytest.raises(ConfigError, match=rf"^optimizer: must be a torch optimizer, or a list of them, not {said}"):
                EditWorker(model, wrong, run_of().collective("me"), CONFIG)  # type: ignore[arg-type]

    def test_an_optimizer_without_step_hooks(self) -> None:
        model = small_mlp()
        with pytest.raises(
            ConfigError, match=r"^optimizer: Hookless has no step hooks .*; give the torch optimizer that it has"
        ):
            EditWorker(model, Hookless(torch.optim.SGD(model.parameters())), run_of().collective("me"), CONFIG)

    def test_what_is_no_model(self) -> None:
        optimizer = torch.optim.SGD(small_mlp().parameters())
        with pytest.raises(ConfigError, match=r"^model: must be a torch.nn.Module, not an? \w+"):
            EditWorker(optimizer, optimizer, run_of().collective("me"), CONFIG)  # type: ignore[arg-type]

    def test_a_runs_configuration_in_place_of_a_workers(self) -> None:
        model, run = small_mlp(), RunConfig()
        with pytest.raises(
            ConfigError, match=r"^config: must be a WorkerConfig, not a RunConfig: write WorkerConfig.of\(run\)"
        ):
            EditWorker(model, torch.optim.SGD(model.parameters()), run_of().collective("me"), run)  # type: ignore[arg-type]
        assert WorkerConfig.of(run).sync == run.sync
