"""A replica of several ranks trains as one rank does, whatever its layout; wrong layouts are named."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from edit.config.run import InnerConfig, ModelConfig
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.training.sharding import ONE_RANK, RankLayout, make_layout, process_group, rendezvous_prefix, shard_model
from peers.training.torchrun import ALONE, Launch, launched
from peers.training.trainer import Trainer
from tests.support.world import spawn

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=2, heads=2, width=16, context=8, vocabulary=16)
INNER = InnerConfig(lr=0.01, warmup_steps=0, clip_norm=0.1, batch_size=5, accumulation=2)  # 5 rows: no split is even
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        rows = torch.randint(16, (INNER.batch_size, 9), generator=generator)
        yield rows[:, :-1], rows[:, 1:]


@dataclass
class Trained:
    parameters: dict[str, Tensor]
    losses: list[float]
    tokens: int


class Experts(nn.Module):
    """No GPT: a list of unequal blocks, one of them used on no row, one parameter frozen, one shared, one outside the list."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(16, 6)
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)), nn.Linear(6, 6)])
            self.heads = nn.ModuleDict({"next": nn.Linear(6, 16, bias=False)})
            self.scale = nn.Parameter(torch.ones(6))
        self.heads["next"].weight = self.embedding.weight
        self.blocks[0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:2]:
            x = x + block(x).relu()
        return nn.functional.cross_entropy(self.heads["next"](x * self.scale).flatten(0, 1), targets.flatten())


def model(kind: str) -> nn.Module:
    return GPT(MODEL, seed=0) if kind == "gpt" else Experts()


def train(kind: str, layout: RankLayout) -> Trained:
    trainer = Trainer(
        shard_model(model(kind), layout), batches(), INNER, total_steps=100, device=CPU, clock=lambda: 0.0, layout=layout
    )
    results = [trainer.step() for _ in range(5)]
    named = trainer.model.named_parameters()
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
    return Trained({name: p.detach() for name, p in full.items()}, [r.loss for r in results], results[0].tokens)


LAYOUTS: dict[str, tuple[object, tuple[str, ...], str]] = {
    "2 ranks": ([0, 1], ("dp",), "gpt"),
    "3 ranks": ([0, 1, 2], ("dp",), "gpt"),
    "2 x 2": ([[0, 1], [2, 3]], ("dp", "tp"), "gpt"),
    "1 x 2": ([[0, 1]], ("dp", "tp"), "gpt"),
    "experts on 4": ([0, 1, 2, 3], ("dp",), "experts"),
}


def compare_layouts(rank: int) -> None:
    alone = {kind: train(kind, ONE_RANK) for kind in ("gpt", "experts")}
    for what, (ranks, names, kind) in LAYOUTS.items():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)  # type: ignore[arg-type]
        if mesh.get_coordinate() is None:
            continue
        together, expected = train(kind, RankLayout(mesh)), alone[kind]
        assert together.losses == pytest.approx(expected.losses, abs=1e-5), what
        assert together.tokens == expected.tokens == 5 * 2 * 8
        for name, tensor in expected.parameters.items():
            torch.testing.assert_close(together.parameters[name], tensor, rtol=0, atol=1e-4, msg=f"{what}: {name}")
    check_copies(rank)


def check_copies(rank: int) -> None:
    """What a tensor-parallel group holds twice stays equal to the bit, and every parameter lies on the replica's one mesh."""
    layout = RankLayout(DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")))
    trainer = Trainer(
        shard_model(GPT(MODEL, 0), layout), batches(), INNER, total_steps=100, device=CPU, clock=lambda: 0.0, layout=layout
    )
    for _ in range(3):
        trainer.step()
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("dp", "tp"), name
        if parameter.placements[1].is_replicate():
            copies = [torch.empty_like(parameter.to_local()) for _ in range(2)]
            dist.all_gather(copies, parameter.to_local().contiguous(), group=layout.mesh.get_group("tp"))  # type: ignore[union-attr]
            assert torch.equal(*copies), name


@pytest.mark.timeout(120)
def test_every_layout_trains_as_one_rank_does(tmp_path: Path) -> None:
    spawn(compare_layouts, 4, tmp_path)


class Planless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 4)


class Crooked(Planless):
    def tensor_parallel_plan(self, ranks: int) -> dict[str, ParallelStyle]:
        return {"first": ColwiseParallel()}


class Loose(Planless):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.ones(2))

    def tensor_parallel_plan(self, ranks: int) -> dict[str, ParallelStyle]:
        return {}


def refuse_plans(rank: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    cases = {
        "Planless has no tensor_parallel_plan": Planless(),
        r"does not divide first.weight \[3, 4\]": Crooked(),
        "Loose holds parameters and modules": Loose(),
        "does not divide the 3 heads": GPT(ModelConfig(layers=1, heads=3, width=12, context=8), seed=0),
    }
    for message, wrong in cases.items():
        with pytest.raises(ConfigError, match=message):
            shard_model(wrong, RankLayout(mesh))


def test_a_model_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    spawn(refuse_plans, 2, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "batch_size", "message"),
    [
        (4, 3, 8, "--tensor-parallel 3: does not divide the 4 ranks"),
        (4, 0, 8, "--tensor-parallel 0"),
        (1, 2, 8, "--tensor-parallel 2: does not divide the 1 ranks"),
        (8, 2, 3, "8 ranks split a batch in 4, but the run's inner.batch_size is 3; start 6 ranks or fewer"),
    ],
)
def test_ranks_that_do_not_fit_are_named(ranks: int, tensor_parallel: int, batch_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_layout(Launch(size=ranks), tensor_parallel, batch_size, CPU)


def test_one_rank_is_not_split() -> None:
    plain = GPT(MODEL, seed=0)
    with process_group(Launch(), CPU):
        assert not dist.is_initialized()
        layout = make_layout(Launch(), 1, 1, CPU)
    assert layout is ONE_RANK and shard_model(plain, layout) is plain
    assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())


@pytest.mark.parametrize(("device", "current"), [("cuda:1", [1]), ("cuda", [0]), ("cpu", [])])
def test_the_device_of_one_rank_is_the_current_one(device: str, current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random numbers are those that the model draws, and a checkpoint holds."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with process_group(ALONE, torch.device(device)):
        assert chosen == current


def test_ranks_started_again_meet_apart_from_what_the_dead_have_left() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    store.set("edit/here/1", "a dead one")  # and that one heard the word of its own rank 0
    store.set("edit/heard/dead word/1", "")
    store.set("edit/word/a dead one", "dead word")
    words = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            heard = {future.result() for future in [pool.submit(rendezvous_prefix, store, rank, 3) for rank in range(3)]}
            assert len(heard) == 1
            words += heard
    assert len({*words, "dead word"}) == 3


class TestEnvironment:
    def test_without_torchrun(self) -> None:
        assert launched({}) == Launch() and launched({}).leads

    def test_under_torchrun(self) -> None:
        place = launched(TORCHRUN)
        assert place == Launch(rank=1, size=4, local_rank=1, local_size=2)
        assert not place.leads

    @pytest.mark.parametrize("name", sorted(TORCHRUN))
    def test_a_missing_variable_is_named(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} is not set.*torchrun"):
            launched({key: value for key, value in TORCHRUN.items() if key != name})

    @pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "-1"), ("RANK", "4"), ("LOCAL_RANK", "2")])
    def test_a_wrong_variable_is_named(self, name: str, value: str) -> None:
        with pytest.raises(ConfigError, match=name):
            launched({**TORCHRUN, name: value})
