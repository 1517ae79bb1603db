"""A replica spread over ranks: what each holds and owns, and that together they are the one model, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.digest import combine, digest
from edit.fragments.shards import partition_fault
from edit.records import Here, RolledBack, Snapshot
from edit.replica.layout import Layout
from edit.replica.ranks import Ranks
from edit.replica.replica import Replica
from tests.support.encoded import cut, encode
from tests.support.models import TinyTransformer
from tests.support.ranks import at_every_rank

LAYOUTS = {"fsdp": 2, "uneven": 3, "hsdp": 4, "fsdp x tp": 4}


def sharded(layout: str) -> nn.Module:
    """A TinyTransformer, the same parameters at every rank, spread over this world as `layout` says."""
    model, size = TinyTransformer(seed=3), dist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "fsdp x tp":
        both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("shard", "tensor"))
        for block in model.blocks:
            parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_vectors(seed: int = 3) -> list[Tensor]:
    return Replica(TinyTransformer(seed=seed)).local()


def full(model: nn.Module) -> list[Tensor]:
    """Every parameter, put together."""
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def play(layout: str) -> dict[str, Any]:
    """One rank of a replica through start, commit, progress and swap; what it saw."""
    model, ranks = sharded(layout), Ranks.world()
    replica = Replica(model, ranks)
    seen: dict[str, Any] = {"held": [r.boxes for r in replica.layout.held], "owned": [r.boxes for r in replica.layout.owned]}
    seen["founding"] = replica.founding()
    theta = whole_vectors(seed=5)
    shards = replica.layout.held
    replica.start(Snapshot(4, digest(theta), tuple(r.take(t) for r, t in zip(shards, theta, strict=True))))
    seen["start"] = (replica.outer.digest, full(model))
    steps = [torch.full((fragment.numel,), 0.01 * (i + 1)) for i, fragment in enumerate(replica.schema.fragments)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    seen["delta"] = replica.layout.at_first_rank(replica.pseudo_gradient)
    coming: dict[int, Here | RolledBack] = {
        i: Here(cut(encode("int8", step), shards[i])) if i != 1 else RolledBack() for i, step in enumerate(steps)
    }
    applied(replica, 5, coming)
    seen["moved"] = (replica.outer.digest, full(model))
    state = replica.outer_state_dict()
    seen["state"] = state
    kept = replica.load_outer()
    seen["lent"] = full(model)
    replica.restore(kept)
    seen["back"] = full(model)
    mine = [torch.full((shard.numel,), float(ranks.rank)) for shard in replica.layout.owned]
    seen["disowned"] = [replica.layout.disown(i, part) for i, part in enumerate(mine)]
    if layout == "uneven":
        seen["few rows"] = few_rows()
    if layout == "fsdp":
        seen["wrong"] = wrong()
    return seen


def applied(replica: Replica, outer_step: int, steps: dict[int, Here | RolledBack]) -> None:
    """Apply the update as a worker does; what is told of it before and after is the same."""
    hashes = replica.hashes_after(steps)
    for i, step in steps.items():
        replica.apply_fragment(i, step, replica.progress, hashes[i])
    replica.applied(outer_step)
    assert replica.outer.digest == combine(hashes)
    assert replica.outer.hashes == replica.outer_of(outer_step, "", replica.outer.fragments).hashes


def alone() -> dict[str, Any]:
    """The same with the whole model in this process."""
    model = TinyTransformer(seed=3)
    replica, theta = Replica(model), whole_vectors(seed=5)
    replica.start(Snapshot(4, digest(theta), tuple(theta)))
    seen: dict[str, Any] = {"start": (replica.outer.digest, full(model))}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    seen["delta"] = [replica.pseudo_gradient(i) for i in range(len(theta))]
    steps = [torch.full((part.numel(),), 0.01 * (i + 1)) for i, part in enumerate(theta)]
    applied(replica, 5, {i: Here(encode("int8", step)) if i != 1 else RolledBack() for i, step in enumerate(steps)})
    seen["moved"] = (replica.outer.digest, full(model))
    seen["state"] = replica.outer_state_dict()
    return seen


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank saw, by layout; the processes run once."""

    @functools.cache
    def by_layout(layout: str) -> list[dict[str, Any]]:
        return at_every_rank(play, LAYOUTS[layout], tmp_path_factory.mktemp("ranks"), layout)

    return by_layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_are_the_one_model_to_the_bit(layout: str, played: Callable[[str], list[dict[str, Any]]]) -> None:
    seen, reference = played(layout), alone()
    schema = Replica(TinyTransformer()).schema
    for i, fragment in enumerate(schema.fragments):
        assert partition_fault(fragment, [one["owned"][i] for one in seen]) is None
    assert same(seen[0]["founding"], whole_vectors()) and all(one["founding"] == [] for one in seen[1:])
    assert same(seen[0]["delta"], reference["delta"])
    for one in seen:
        for what in ("start", "moved"):
            assert one[what][0] == reference[what][0] and same(one[what][1], reference[what][1]), what
        assert same(one["back"], one["moved"][1]) and not same(one["lent"], one["back"])
    assert seen[0]["state"].keys() == reference["state"].keys() and all(one["state"] == {} for one in seen[1:])
    assert same(seen[0]["state"].values(), reference["state"].values())
    assert same(seen[0]["lent"], list(reference["state"].values()))


@pytest.mark.parametrize("layout", ["hsdp", "fsdp x tp"])
def test_copies_are_held_by_all_and_owned_by_one(layout: str, played: Callable[[str], list[dict[str, Any]]]) -> None:
    seen = played(layout)
    schema = Replica(TinyTransformer()).schema
    held = [sum(box.numel for one in seen for box in one["held"][i]) for i in range(len(schema.fragments))]
    assert any(count > fragment.numel for count, fragment in zip(held, schema.fragments, strict=True))
    for rank, one in enumerate(seen):  # what each told the others is what they now have in that place
        for i, vector in enumerate(one["disowned"]):
            parts = torch.split(vector, [box.numel for box in one["held"][i]])
            for box, part in zip(one["held"][i], parts, strict=True):
                owner = next(r for r, other in enumerate(seen) if box in other["owned"][i])
                assert bool((part == owner).all()), (rank, i, box)


def test_a_rank_may_hold_nothing_of_a_tensor(played: Callable[[str], list[dict[str, Any]]]) -> None:
    seen = [one["few rows"] for one in played("uneven")]
    assert [held for held, _ in seen] == [1, 1, 0]
    assert {found for _, found in seen} == {digest([torch.arange(8.0)])}


def few_rows() -> tuple[int, str]:
    mesh = init_device_mesh("cpu", (3,))
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).view(2, 4))
    fully_shard(model, mesh=mesh)
    replica = Replica(model, Ranks.world())
    part = replica.layout.held[0].take(torch.arange(8.0))
    replica.start(Snapshot(1, digest([torch.arange(8.0)]), (part,)))
    return len(replica.layout.held[0].boxes), replica.outer.digest


KINDS = {
    "other model": "ConfigError: the ranks of this replica disagree on the model",
    "hole": "ConfigError: tensor 0.weight: rank 1 holds",
    "damaged": "RemoteProtocolError: the snapshot of outer step 1 does not fit",
    "other theta": "RemoteProtocolError: the snapshot of outer step 1 does not match its digest",
}


def wrong() -> dict[str, str]:
    """By kind, the error that this rank sees."""
    seen, ranks = {}, Ranks.world()
    for kind in KINDS:
        try:
            start_wrongly(kind, ranks)
        except (ConfigError, RemoteProtocolError) as error:
            seen[kind] = f"{type(error).__name__}: {error}"
    return seen


def start_wrongly(kind: str, ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    if kind == "other model" and ranks.rank == 1:
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    if kind == "hole":
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)])
        if ranks.rank == 1:
            weight = DTensor.from_local(weight.to_local()[:2], mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1))
        model[0].weight = nn.Parameter(weight)
    replica = Replica(model, ranks)
    theta = replica.local()
    if kind == "damaged" and ranks.rank == 1:
        theta[0] = theta[0][:-1]
    if kind == "other theta" and ranks.rank == 0:
        theta[0] = theta[0] + 1
    replica.start(Snapshot(1, "no digest", tuple(theta)))


def test_what_is_wrong_at_one_rank_is_said_at_every_rank(played: Callable[[str], list[dict[str, Any]]]) -> None:
    for seen in (one["wrong"] for one in played("fsdp")):
        assert {kind: seen[kind][: len(message)] for kind, message in KINDS.items()} == KINDS


def test_shards_that_do_not_cover_a_tensor_are_named() -> None:
    class Gap(Ranks):
        """Two ranks, of which one has lost its shard of the first tensor."""

        __slots__ = ()

        def collect(self, value: Any) -> list[Any]:
            return [[boxes[1:] for boxes in value]] if isinstance(value, list) else [value]

    with pytest.raises(ConfigError, match=r"do not share out the model exactly: tensor 0.weight: the shards cover 0 of 24"):
        Layout(nn.Sequential(nn.Linear(4, 6)), Gap())
