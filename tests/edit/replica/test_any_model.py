"""Any PyTorch model: what is exchanged of it, and that its peculiarities survive an exchange."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RoundsConfig
from edit.errors import ConfigError, RefusedError
from edit.local import LocalRun
from edit.records import Commit
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import TinyTransformer, regression_batches, small_mlp, token_batches, train_step
from tests.support.settings import worker_config
from tests.support.trainee import config

MODES = ["blocking", "forward", "delayed"]


def peers_of(
    make: Callable[[], nn.Module],
    mode: str,
    rounds: int = 3,
    data: Callable[[int], Iterator[Any]] = regression_batches,
    **more: Any,
) -> tuple[LocalRun, list[nn.Module]]:
    """Two peers, each with a model of `make` and its own data, after so many rounds of two steps; every outcome is applied."""
    run_config = config(outer=OuterConfig(lr=0.7, momentum=0.3))
    run, models = LocalRun(run_config, ["a", "b"]), [make(), make()]
    settings: dict[str, Any] = {"every": 2, "codec": "fp32", "mode": mode} | more
    workers, optimizers = [], []
    for name, model in zip("ab", models, strict=True):
        optimizers.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        workers.append(EditWorker(model, optimizers[-1], run.collective(name), worker_config(**settings)))
        workers[-1].__enter__()
    streams = [data(seed) for seed in range(2)]
    for _ in range(2 * rounds):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            train_step(model, optimizer, next(stream))
    for worker in workers:
        worker.__exit__(None, None, None)
        assert worker.outer_step == rounds and worker.digest == run.state.digest
    return run, models


def exchanged(model: nn.Module) -> list[str]:
    return [tensor.name for fragment in Replica(model).schema.fragments for tensor in fragment.tensors]


def coincide(models: list[nn.Module]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


class Tied(TinyTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Adapter(nn.Module):
    """A frozen base with a low-rank way around it, as LoRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.high(self.low(inputs))


def adapted() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Adapter(nn.Linear(4, 6)), nn.Tanh(), Adapter(nn.Linear(6, 3)))


class Experts(nn.Module):
    """Three experts, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.experts = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[0](inputs) + self.experts[2](inputs)


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights_are_exchanged_once_and_stay_tied(mode: str) -> None:
    _, models = peers_of(Tied, mode, data=token_batches)
    assert "head.weight" not in exchanged(models[0]) and exchanged(models[0]).count("embed.weight") == 1
    assert all(model.head.weight is model.embed.weight for model in models)
    assert mode == "delayed" or coincide(models)


@pytest.mark.parametrize("mode", MODES)
def test_t14_a_frozen_root_with_adapters_exchanges_the_adapters_only(mode: str) -> None:
    run, models = peers_of(adapted, mode)
    assert exchanged(models[0]) == ["0.low.weight", "0.high.weight", "2.low.weight", "2.high.weight"]
    before = adapted()
    assert torch.equal(models[0][0].base.weight, before[0].base.weight)
    assert not torch.equal(models[0][0].low.weight, before[0].low.weight)
    assert run.state.outer_step == 3


@pytest.mark.parametrize("mode", MODES)
def test_t21_an_expert_that_is_never_used_keeps_its_place(mode: str) -> None:
    _, models = peers_of(Experts, mode)
    unused = Experts().experts[1].weight
    assert all(torch.allclose(model.experts[1].weight, unused, rtol=0.01) for model in models)  # weight decay may touch it
    assert not torch.allclose(models[0].experts[0].weight, Experts().experts[0].weight, rtol=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_t15_pure_bf16_has_fp32_outer_parameters_that_keep_small_steps(mode: str) -> None:
    run, models = peers_of(
        lambda: small_mlp(dtype=torch.bfloat16), mode, data=lambda seed: regression_batches(seed, torch.bfloat16)
    )
    assert all(parameter.dtype == torch.bfloat16 for model in models for parameter in model.parameters())
    assert all(part.dtype == torch.float32 for part in run.state.theta)
    assert any(not torch.equal(part, part.bfloat16().float()) for part in run.state.theta)


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
def test_t6_checkpoint_wrappers_change_neither_names_nor_bits(mode: str, kind: CheckpointImpl) -> None:
    def wrapped() -> nn.Module:
        model = TinyTransformer()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=kind)
        return model

    plain, _ = peers_of(TinyTransformer, mode, data=token_batches)
    run, models = peers_of(wrapped, mode, data=token_batches)
    assert exchanged(models[0]) == exchanged(TinyTransformer())
    assert run.state.digest == plain.state.digest


def test_peers_with_and_without_compiled_and_wrapped_blocks_train_together() -> None:
    made = itertools.count()

    def make() -> nn.Module:
        model = TinyTransformer()
        if next(made) == 1:
            model.blocks[0] = torch.compile(model.blocks[0], backend="eager", disable=True)
            model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        return model

    run, models = peers_of(make, "forward", data=token_batches)
    assert run.state.outer_step == 3 and coincide(models)


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_given_to_the_worker_trains_as_the_plain_one(mode: str, backend: str) -> None:
    plain, _ = peers_of(small_mlp, mode)
    run, models = peers_of(lambda: torch.compile(small_mlp(), backend=backend), mode)
    assert exchanged(models[0]) == exchanged(small_mlp())
    for a, b in zip(run.state.theta, plain.state.theta, strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        EditWorker(model, optimizer, LocalRun(config(), ["a"]).collective("a"), worker_config(codec="fp32")).__enter__()


# Buffers (T16).


def normed() -> nn.Module:
    """Persistent float buffers, an integer one, and one that is not persistent."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.register_buffer("cache", torch.zeros(5), persistent=False)
    return model


def test_buffers_stay_local_unless_asked_for() -> None:
    _, models = peers_of(normed, "blocking")
    assert not any("running" in name for name in exchanged(models[0]))
    assert coincide(models) and not torch.equal(models[0][1].running_mean, models[1][1].running_mean)


@pytest.mark.parametrize("mode", MODES)
def test_t16_averaged_buffers_are_a_fragment_of_their_own(mode: str) -> None:
    run, models = peers_of(normed, mode, buffers="average")
    last = run.state.schema.fragments[-1]
    assert last.name == "buffers" and [tensor.name for tensor in last.tensors] == ["1.running_mean", "1.running_var"]
    assert models[0][1].num_batches_tracked == 6
    if mode != "delayed":
        assert torch.equal(models[0][1].running_mean, models[1][1].running_mean)
        assert torch.equal(torch.cat([models[0][1].running_mean, models[0][1].running_var]), run.state.theta[-1])
    assert float(models[0][1].running_mean.abs().max()) > 0


def test_a_running_variance_never_goes_negative_at_the_first_outer_step_with_nesterov() -> None:
    """Both peers' variance falls from 1 to almost 0: momentum and a learning rate would take theta beyond the mean."""
    outer = OuterConfig(optimizer="nesterov", lr=0.8, momentum=0.85)
    run_config = config(outer=outer, codec=CodecConfig(up="int8", down="int8"), penalty=PenaltyConfig(clip=0.1))
    run = LocalRun(run_config, ["a", "b"])
    models = [normed() for _ in "ab"]
    with ExitStack() as stack:
        peers = []
        for name, model in zip("ab", models, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            worker = EditWorker(model, optimizer, run.collective(name), worker_config(every=2, buffers="average"))
            peers.append((model, optimizer, stack.enter_context(worker), regression_batches(0)))
        for step in range(2):
            for model, optimizer, _, stream in peers:
                train_step(model, optimizer, next(stream))
                if step == 0:
                    model[1].running_var.copy_(torch.tensor([1e-6, 1e-5, 1e-4, 0.5, 2.0, 100.0]))
        contributed = [torch.cat([model[1].running_mean, model[1].running_var]).clone() for model in models]
        for _, _, worker, _ in peers:
            worker.synchronize()
    mean = torch.stack(contributed).mean(dim=0)
    torch.testing.assert_close(run.state.theta[-1], mean, rtol=1e-6, atol=1e-6)
    assert all(bool((model[1].running_var >= 0).all()) for model in models)
    assert f"outer.{len(run.state.theta) - 1}.momentum" not in run.state.to_tensors()


def test_averaged_buffers_and_arrivals_do_not_go_together() -> None:
    rounds = RoundsConfig(merging="arrivals", max_staleness=4)
    with pytest.raises(ConfigError, match=r"buffers = 'average': must be \"local\" with rounds.merging"):
        WorkerConfig(rounds=rounds, buffers="average")


def test_averaging_the_buffers_of_a_model_without_any_is_refused() -> None:
    model = small_mlp()
    settings = worker_config(buffers="average", codec="fp32")
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), LocalRun(config(), ["a"]).collective("a"), settings)
    with pytest.raises(ConfigError, match='buffers = "average", but the model has no floating-point buffer'):
        worker.__enter__()


def test_peers_that_disagree_on_buffers_do_not_train_together() -> None:
    run = LocalRun(config(), ["a", "b"])
    for name, buffers, refused in (("a", "average", False), ("b", "local", True)):
        model = normed()
        settings = worker_config(buffers=buffers, codec="fp32")
        worker = EditWorker(model, torch.optim.SGD(model.parameters()), run.collective(name), settings)
        if refused:
            with pytest.raises(RefusedError, match=r"tensor 1\.running_mean of the run is missing at the peer"):
                worker.__enter__()
        else:
            worker.__enter__()
            worker.__exit__(KeyboardInterrupt, None, None)


# Memory.


def storages(root: object, without: list[Any]) -> dict[int, int]:
    """Bytes of every tensor storage, and every payload, that can be reached from `root` but not through `without`."""
    seen = {id(one) for one in without}
    found: dict[int, int] = {}
    stack: list[Any] = [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, (bytes, bytearray, memoryview)) and len(one) > 64:
            found[id(one)] = memoryview(one).nbytes
        else:
            stack.extend(one.values() if isinstance(one, dict) else gc.get_referents(one))
    return found


@pytest.mark.parametrize("mode", ["blocking", "forward"])
@pytest.mark.parametrize(("codec", "per_parameter"), [("fp32", 4), ("int8", 8)])
def test_between_rounds_a_worker_keeps_no_more_than_theta_and_the_residual(mode: str, codec: str, per_parameter: int) -> None:
    run_config = config(codec=CodecConfig(up=codec, down="bf16"), penalty=PenaltyConfig())
    run, model = LocalRun(run_config, ["a"]), TinyTransformer(width=32)
    optimizer, stream = torch.optim.AdamW(model.parameters(), lr=1e-3), token_batches(0)
    collective = run.collective("a")
    with EditWorker(model, optimizer, collective, worker_config(every=2, codec=codec, mode=mode)) as worker:
        for _ in range(5):  # two rounds, and into the third
            train_step(model, optimizer, next(stream))
        assert worker.outer_step == 2 and not worker.pending and isinstance(worker.last_commit, Commit)
        theirs = [model, optimizer, run, collective, *model.parameters(), *model.modules()]
        kept = sum(storages(vars(worker), theirs).values())
        numel = sum(parameter.numel() for parameter in model.parameters())
        assert per_parameter * numel <= kept <= 1.01 * per_parameter * numel
