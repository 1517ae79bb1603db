"""Muon of a sharded replica does what Muon of one rank does, to the bit; its arithmetic against torch's and an SVD."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from edit.config.run import InnerConfig, ModelConfig
from peers.models.gpt import GPT
from peers.training.inner_optimizers import matrices
from peers.training.muon import Muon, orthogonalized
from peers.training.sharding import ONE_RANK, RankLayout, shard_model
from peers.training.trainer import Trainer
from tests.support.world import spawn

SHAPES = ((12, 12), (5, 20), (20, 5), (12, 12), (1, 7), (12, 12))
MODEL = ModelConfig(layers=3, heads=2, width=16, context=8, vocabulary=16)
LAYOUTS: dict[str, tuple[object, tuple[str, ...]]] = {
    "2 ranks": ([0, 1], ("dp",)),
    "3 ranks": ([0, 1, 2], ("dp",)),  # no shape is even, one rank has no row of the first block's norms
    "2 x 2": ([[0, 1], [2, 3]], ("dp", "tp")),
    "1 x 2": ([[0, 1]], ("dp", "tp")),
    "4 x 1": ([[0], [1], [2], [3]], ("dp", "tp")),
}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(like: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(each.shape, generator=generator) for each in like]


def torchs(params: Sequence[nn.Parameter]) -> torch.optim.Muon:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")


def test_it_is_torchs_muon_but_for_the_rounding_of_bfloat16() -> None:
    ours, theirs = parameters(), parameters()
    start = [each.detach().clone() for each in ours]
    optimizers = (Muon(ours, lr=0.02, weight_decay=0.1, momentum=0.9), torchs(theirs))
    for step in range(3):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(params, gradients(params, step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    for own, other, first in zip(ours, theirs, start, strict=True):
        moved = (other - first).detach()
        torch.testing.assert_close((own - first).detach(), moved, rtol=0, atol=0.03 * float(moved.abs().max()))
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(optimizers[0].state[own]["momentum_buffer"], optimizers[1].state[other]["momentum_buffer"])
    assert optimizers[0].state_dict()["param_groups"] == optimizers[1].state_dict()["param_groups"]


@pytest.mark.parametrize("shape", [(2, 9, 9), (3, 4, 30), (3, 30, 4), (1, 1, 5)])
def test_the_iteration_changes_the_singular_values_only_and_by_the_polynomial(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before = matrix.clone()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalized(matrix), u @ torch.diag_embed(s) @ vh, rtol=0, atol=1e-9)
    assert torch.equal(matrix, before)


def test_singular_values_end_near_one() -> None:
    values = torch.cat([torch.logspace(-2.8, -1, 90), torch.full((1,), 0.9)]).double()
    assert 0.0015 < float((values / values.norm()).min()) < 0.0017
    found = orthogonalized(torch.diag(values)[None])[0].diag()
    assert float(found.min()) > 0.68 and float(found.max()) < 1.21
    assert not bool(orthogonalized(torch.zeros(1, 3, 4)).any())


def test_a_step_without_momentum_does_not_write_into_the_gradient() -> None:
    params = parameters()
    optimizer = Muon(params, lr=0.1, weight_decay=0.0, momentum=0.0)
    given = gradients(params, 0)
    for parameter, gradient in zip(params, given, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(params, given, strict=True))  # type: ignore[arg-type]


def test_what_has_no_gradient_is_left_alone_and_a_closure_is_called() -> None:
    params = parameters()
    before = [each.detach().clone() for each in params]
    params[3].grad = torch.ones(SHAPES[3])
    assert Muon(params, lr=0.1, weight_decay=0.5, momentum=0.9).step(lambda: 7.0) == 7.0
    assert [not torch.equal(each, old) for each, old in zip(params, before, strict=True)] == [
        i == 3 for i in range(len(SHAPES))
    ]


def placed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the shards of a whole tensor that every rank has, also where FSDP2 has sharded a tensor-parallel dimension."""
    order = sorted(range(mesh.ndim), key=lambda i: isinstance(placements[i], _StridedShard))  # tensor parallelism first
    local = whole
    for i in order:
        placement = placements[i]
        if isinstance(placement, Shard | _StridedShard):
            parts, rank = local.chunk(mesh.size(i), dim=placement.dim), mesh.get_local_rank(i)
            local = parts[rank] if rank < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def compare_steps(rank: int) -> None:
    for (what, (ranks, names)), at_once in product(LAYOUTS.items(), (1, 1 << 20)):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)  # type: ignore[arg-type]
        if mesh.get_coordinate() is None:
            continue
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("peers.training.muon.STACKED_ELEMENTS", at_once)
            alone = GPT(MODEL, seed=0)
            together = shard_model(GPT(MODEL, seed=0), RankLayout(mesh))
            pairs = list(zip(matrices(alone), matrices(together), strict=True))
            assert len(pairs) >= 12 and all(isinstance(shard, DTensor) for _, shard in pairs)
            optimizers = [Muon(list(each), lr=0.02, weight_decay=0.1, momentum=0.9) for each in zip(*pairs, strict=True)]
            for step in range(3):
                skipped = step % len(pairs)
                for i, ((whole, shard), gradient) in enumerate(
                    zip(pairs, gradients([whole for whole, _ in pairs], step), strict=True)
                ):
                    assert isinstance(shard, DTensor)
                    whole.grad = None if i == skipped else gradient
                    shard.grad = None if i == skipped else placed(gradient, shard.device_mesh, shard.placements)
                for optimizer in optimizers:
                    optimizer.step()
            for whole, shard in pairs:
                assert isinstance(shard, DTensor)
                assert torch.equal(shard.full_tensor(), whole), what
                buffers = [
                    optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (whole, shard), strict=True)
                ]
                assert buffers[1].placements == shard.placements and torch.equal(buffers[1].full_tensor(), buffers[0]), what


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_a_sharded_replica_makes_the_same_steps_to_the_bit(tmp_path: Path) -> None:
    spawn(compare_steps, 4, tmp_path)


def train(layout: RankLayout) -> tuple[list[float], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(16, (5, 9), generator=generator) for _ in range(4)]
    trainer = Trainer(
        shard_model(GPT(MODEL, seed=0), layout),
        iter([(each[:, :-1], each[:, 1:]) for each in rows]),
        InnerConfig(optimizer="muon", momentum=0.9, lr=0.01, warmup_steps=0, batch_size=5),
        total_steps=100,
        device=torch.device("cpu"),
        clock=lambda: 0.0,
        layout=layout,
    )
    losses = [trainer.step().loss for _ in rows]
    named = trainer.model.named_parameters()
    return losses, {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}


def compare_training(rank: int) -> None:
    losses, expected = train(ONE_RANK)
    for what, (ranks, names) in LAYOUTS.items():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)  # type: ignore[arg-type]
        if mesh.get_coordinate() is not None:
            found_losses, found = train(RankLayout(mesh))
            assert found_losses == pytest.approx(losses, abs=1e-5), what
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=f"{what}: {name}")


@pytest.mark.timeout(120)
def test_a_sharded_replica_trains_with_muon_as_one_rank_does(tmp_path: Path) -> None:
    spawn(compare_training, 4, tmp_path)
