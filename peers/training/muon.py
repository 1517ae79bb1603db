"""Muon for whole matrices, on one rank or sharded over the ranks of a replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["Muon", "orthogonalized"]

STACKED_ELEMENTS = 1 << 22
"""The elements of the matrices of one shape that a rank orthogonalizes at once: small ones fill no device alone."""


class Muon(torch.optim.Muon):
    """Muon with AdamW's step size (0.2 sqrt(max(m, n)), Liu et al. 2025, arXiv 2502.16982), and with decoupled weight decay.

    State and arguments are those of torch.optim.Muon. It differs in two ways. torch's Newton-Schulz iteration is in bfloat16 on
    every device. This one is in float32 on a CPU: without instructions for bfloat16 the products take 10 to 30 times as long.
    And matrices may be DTensors: as each rank has a shard of every matrix, the ranks exchange shards of the updates
    (all-to-all), so that each rank orthogonalizes some of the matrices whole, and exchange the results. So no rank repeats the
    work of another one. All ranks of the mesh must call `step` together.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for alike in _alike([parameter for parameter in group["params"] if parameter.grad is not None]):
                self._step(alike, group)
        return loss

    def _step(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        updates = [self._update(parameter, group) for parameter in parameters]
        size = 0.2 * math.sqrt(max(parameters[0].shape))
        for parameter, update in zip(parameters, _orthogonalized_shards(updates, group), strict=True):
            local = _local(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * size)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return the gradient with (Nesterov) momentum: as `parameter`, sharded or not."""
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315), steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return about U V^T of each matrix U S V^T, by Newton-Schulz iterations (Jordan 2024, kellerjordan.github.io/posts/muon).

    matrices: (k, m, n), floating point, unchanged. coefficients: of the quintic polynomial that is applied `steps` times to the
    singular values; with the default ones those of at least 0.0015 of the matrix's Frobenius norm end between 0.68 and 1.21.
    eps: what a norm is at least taken for. Returns (k, m, n), of the same dtype.
    """
    a, b, c = coefficients
    wide = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    x: Tensor = wide / norms.clamp(min=eps)  # so no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if wide is not matrices else x


def _alike(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in groups that are orthogonalized at once: of one shape, dtype, device and sharding."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        sharding = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        kinds.setdefault((parameter.shape, parameter.dtype, parameter.device, sharding), []).append(parameter)
    for found in kinds.values():
        ranks = found[0].device_mesh.size() if isinstance(found[0], DTensor) else 1
        size = ranks * max(1, STACKED_ELEMENTS // found[0].numel())
        yield from (found[i : i + size] for i in range(0, len(found), size))


def _orthogonalized_shards(updates: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Return the orthogonalized updates, stacked: this rank's shards of them where they are sharded."""
    first = updates[0]
    dtype = torch.float32 if first.device.type == "cpu" else torch.bfloat16
    stack = torch.stack([_local(update).to(dtype) for update in updates])
    exchanges: list[_Exchange] = []
    for mesh, placement, shape in _shardings(first) if isinstance(first, DTensor) else ():
        exchanges.append(_Exchange(mesh, placement, torch.Size((stack.size(0), *shape))))
        stack = exchanges[-1].whole(stack)
    stack = orthogonalized(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
    for exchange in reversed(exchanges):
        stack = exchange.shards(stack)
    return stack


def _shardings(tensor: DTensor) -> Iterator[tuple[DeviceMesh, Placement, torch.Size]]:
    """Yield for each mesh dimension, in the order in which shards are put together: how they were split, what is whole then.

    The last dimension has split the tensor first (tensor parallelism, evenly), then the first one each of these shards (FSDP2).
    """
    mesh, shape, found = tensor.device_mesh, list(tensor.shape), []
    for i in reversed(range(mesh.ndim)):
        placement, line = tensor.placements[i], mesh if mesh.ndim == 1 else mesh[cast(Any, mesh.mesh_dim_names)[i]]
        placement = Shard(placement.dim + 1) if isinstance(placement, Shard | _StridedShard) else placement
        found.append((line, placement, torch.Size(shape)))
        if isinstance(placement, Shard):
            shape[placement.dim - 1] //= line.size()
    yield from reversed(found)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Between the ranks of one mesh dimension: each has shards of all stacked matrices, or some of the matrices whole."""

    mesh: DeviceMesh  # one-dimensional
    placement: Placement  # of the shards, in `shape`
    shape: torch.Size  # (k, m, n): the matrices of all ranks

    def whole(self, shards: Tensor) -> Tensor:
        """shards: a shard of (k, m, n). Returns this rank's matrices: (about k / ranks, m, n)."""
        return self._moved(shards, self.placement, Shard(0))

    def shards(self, whole: Tensor) -> Tensor:
        """Invert `whole`."""
        return self._moved(whole.contiguous(), Shard(0), self.placement)

    def _moved(self, tensor: Tensor, source: Placement, target: Placement) -> Tensor:
        _, m, n = self.shape
        stack = DTensor.from_local(tensor, self.mesh, [source], run_check=False, shape=self.shape, stride=(m * n, n, 1))
        if tensor.device.type == "cpu":  # gloo has no all-to-all; torch would do this, too, and warn
            stack = stack.redistribute(placements=[Replicate()])
        return stack.redistribute(placements=[target]).to_local()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
