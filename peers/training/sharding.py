"""Sharding of one replica over its ranks: FSDP2, and tensor parallelism where the model has a plan for it.

With one rank nothing is sharded or communicated. All parameters are on the one mesh of the replica, so that norms, boxes and
checkpoints mean the same for all of them.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from edit.errors import ConfigError, TransportError
from peers.training.torchrun import Launch

__all__ = [
    "COLLECTIVE_TIMEOUT",
    "ONE_RANK",
    "RankLayout",
    "clip_gradients",
    "gradient_norm",
    "make_layout",
    "process_group",
    "rendezvous_prefix",
    "shard_model",
]

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""How long a rank waits in a collective call: rank 0 may be waiting for the coordinator. A dead rank is noticed at once."""
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""How long the ranks of a replica wait for each other at the start."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # without a forward of their own


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The device mesh of a replica, and this rank's position in it."""

    mesh: DeviceMesh | None = None  # (dp,) or (dp, tp); None: one rank

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of a batch."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("dp")

    @property
    def data_size(self) -> int:
        """The number of shares of a batch. Ranks of one tensor-parallel group have the same share."""
        return 1 if self.mesh is None else self.mesh["dp"].size()

    @property
    def tensor_parallel(self) -> int:
        """The number of ranks over which a matrix product is split."""
        return 1 if self.mesh is None or self.mesh.ndim == 1 else self.mesh["tp"].size()

    def rows(self, batch: Tensor) -> Tensor:
        """Return this rank's rows of a batch (B, ...): (B / data_size, ...), or one more at the first ranks."""
        return batch.tensor_split(self.data_size)[self.data_rank]

    def weight(self, rows: int, batch: int) -> float:
        """Return the factor for the mean loss of `rows` so that the mean of all ranks' gradients is the batch's gradient."""
        return rows * self.data_size / batch

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the shares, in place."""
        if self.mesh is not None and self.data_size > 1:
            dist.all_reduce(value, group=self.mesh.get_group("dp"))
            value /= self.data_size
        return value


ONE_RANK = RankLayout()


@contextlib.contextmanager
def process_group(launch: Launch, device: torch.device) -> Iterator[None]:
    """Context manager: initialize torch.distributed over the ranks of a replica, with gloo, and nccl on CUDA.

    For one rank it only makes `device` the current one, whose random numbers a checkpoint holds. Inside it, the loss of another
    rank raises TransportError.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    if launch.size == 1:
        yield
        return
    store, rank, size = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(rendezvous_prefix(store, rank, size), store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's errors have no type
            raise TransportError(f"another rank of this replica is gone: {str(error).splitlines()[0]}") from error
        raise
    dist.destroy_process_group()  # not after an error: the process ends, and the other ranks may be dead


def rendezvous_prefix(store: Store, rank: int, size: int) -> str:
    """Return a new key prefix that all living ranks agree on. Raises TransportError when a rank does not come.

    torchrun restarts a replica over the same store, which still has the addresses of the dead ranks (torch 2.13: gloo then
    connects to those). Under a new prefix there are none. Each rank writes a random id of its process; rank 0 answers every new
    id with the prefix, until all ranks have confirmed it.
    """
    own = uuid.uuid4().hex  # at rank 0 the prefix
    if rank:
        store.set(f"edit/here/{rank}", own)
        prefix = str(store.get(f"edit/prefix/{own}").decode())
        store.set(f"edit/confirmed/{prefix}/{rank}", "")
        return prefix
    missing = dict.fromkeys(range(1, size), "")  # rank -> the id that was answered last
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise TransportError(f"rank {min(missing)} of this replica did not come within {RENDEZVOUS_TIMEOUT}")
        for other, answered in list(missing.items()):
            if store.check([f"edit/confirmed/{own}/{other}"]):
                del missing[other]
            elif store.check([f"edit/here/{other}"]) and (theirs := str(store.get(f"edit/here/{other}").decode())) != answered:
                store.set(f"edit/prefix/{theirs}", own)
                missing[other] = theirs
        time.sleep(0.02)
    return own


def make_layout(launch: Launch, tensor_parallel: int, batch_size: int, device: torch.device) -> RankLayout:
    """Return the mesh of a replica, inside its process group. Raises ConfigError when the ranks do not fit the run."""
    if tensor_parallel < 1 or launch.size % tensor_parallel:
        raise ConfigError(f"--tensor-parallel {tensor_parallel}: does not divide the {launch.size} ranks of this replica")
    shares = launch.size // tensor_parallel
    if shares > batch_size:
        raise ConfigError(
            f"{launch.size} ranks split a batch in {shares}, but the run's inner.batch_size is {batch_size}; "
            f"start {batch_size * tensor_parallel} ranks or fewer"
        )
    if launch.size == 1:
        return ONE_RANK
    if tensor_parallel == 1:
        return RankLayout(init_device_mesh(device.type, (shares,), mesh_dim_names=("dp",)))
    return RankLayout(init_device_mesh(device.type, (shares, tensor_parallel), mesh_dim_names=("dp", "tp")))


def shard_model(model: nn.Module, layout: RankLayout) -> nn.Module:
    """Shard the parameters of `model`, which are equal at all ranks, in place: they become DTensors. With one rank do nothing.

    Tensor parallelism follows the model's own `tensor_parallel_plan(ranks)`: module names (with *) to ParallelStyles; what it
    leaves out is whole at every rank of the group. Raises ConfigError when there is no such plan or it does not fit.
    """
    if layout.mesh is None:
        return model
    if layout.tensor_parallel > 1:
        _apply_tensor_parallelism(model, layout.mesh["tp"])
    for block in _blocks(model):
        fully_shard(block, mesh=layout.mesh["dp"])
    fully_shard(model, mesh=layout.mesh["dp"])
    return model


def clip_gradients(parameters: Iterable[nn.Parameter], layout: RankLayout, clip_norm: float) -> None:
    """Scale the gradients to a norm of at most `clip_norm` over the whole replica, with the same factor at all ranks."""
    parameters = list(parameters)
    if layout.mesh is None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
        return
    factor = (clip_norm / (gradient_norm(parameters, layout) + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for parameter in parameters:
        if parameter.grad is not None:
            cast(DTensor, parameter.grad).to_local().mul_(factor)


def gradient_norm(parameters: Iterable[nn.Parameter], layout: RankLayout) -> Tensor:
    """Return the norm of all gradients over the whole replica, the same at all ranks; 0 where there is none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if layout.mesh is None:
        return nn.utils.get_total_norm(gradients)
    shards = cast(list[DTensor], gradients)
    owned = [gradient.to_local() for gradient in shards if _owns(gradient)]
    norm = nn.utils.get_total_norm(owned).to(shards[0].to_local().device) if shards else torch.zeros(())
    total = norm.square()
    for name in layout.mesh.mesh_dim_names or ():  # dp first: then all ranks of a tensor-parallel group end with the same bits
        dist.all_reduce(total, group=layout.mesh.get_group(name))
    return total.sqrt()


def _owns(tensor: DTensor) -> bool:
    """Return whether this rank counts its shard: of the ranks with the same shard, the first does."""
    mesh = tensor.device_mesh
    return all(mesh.get_local_rank(i) == 0 for i, placement in enumerate(tensor.placements) if placement.is_replicate())


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks to shard: the elements of the outermost lists with at least half the parameters of the largest."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [
        module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists if other != name)
    ]
    numels = [sum(parameter.numel() for parameter in module.parameters()) for module in outermost]
    seen: set[nn.Module] = set()
    for module, numel in zip(outermost, numels, strict=True):
        for block in module if 2 * numel >= max(numels) else ():
            if block not in seen and not isinstance(block, _CONTAINERS) and any(True for _ in block.parameters()):
                seen.add(block)
                yield block


def _apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    make = cast("Callable[[int], Mapping[str, ParallelStyle]] | None", getattr(model, "tensor_parallel_plan", None))
    if make is None:
        raise ConfigError(
            f"--tensor-parallel {mesh.size()}: {type(model).__name__} has no tensor_parallel_plan(ranks); leave it at 1"
        )
    parallelize_module(model, mesh, dict(make(mesh.size())))
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for parameter_name, parameter in own.items():
            _check_even(f"{name}.{parameter_name}", parameter, mesh)
        if own and not any(isinstance(parameter, DTensor) for parameter in own.values()):
            if any(True for _ in module.children()):
                raise ConfigError(f"--tensor-parallel: {name or type(model).__name__} holds parameters and modules; plan it")
            _Replicated()._apply(module, mesh)


def _check_even(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    for placement in parameter.placements if isinstance(parameter, DTensor) else ():
        if placement.is_shard() and parameter.shape[cast(Any, placement).dim] % mesh.size():
            raise ConfigError(f"--tensor-parallel {mesh.size()}: does not divide {name} {list(parameter.shape)} evenly")


class _Replicated(ParallelStyle):
    """A module that every rank of a tensor-parallel group computes whole, on plain tensors; its parameters are DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(value, mesh, [Replicate()], run_check=False)
            if isinstance(value, Tensor) and not isinstance(value, DTensor)
            else value
            for value in inputs
        )

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output
