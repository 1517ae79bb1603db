"""What the exchanging methods are compared with: data-parallel training, GPA and DeMo. None of them has a pseudo-gradient.

Bytes are those of the tensors that a peer would send to a hub and get back at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edit.lab.compare.corpus import Batch
from peers.training.trainer import Trainer

__all__ = ["DeMo", "PrimalAveraging", "Traffic", "data_parallel"]


@dataclass(slots=True)
class Traffic:
    """Bytes of one peer, of the whole run, and the most that had to be sent within one inner step."""

    sent: int = 0
    received: int = 0
    peak: float = 0.0

    def step(self, sent: int, received: int) -> None:
        """One inner step's exchange."""
        self.sent, self.received, self.peak = self.sent + sent, self.received + received, max(self.peak, float(sent))


def data_parallel(trainer: Trainer, steps: int, traffic: Traffic, after: Callable[[int], None] | None = None) -> None:
    """Take steps on the peers' joined batches: the gradient is the mean of theirs, in fp32, which have equal sizes."""
    gradient = 4 * sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    for step in range(1, steps + 1):
        trainer.step()
        traffic.step(gradient, gradient)
        if after is not None:
            after(step)


class PrimalAveraging:
    """GPA: the gradient is taken at y = mu_y x + (1 - mu_y) z, the optimizer moves z, then x <- mu_x x + (1 - mu_x) z.

    x is what is evaluated. Source: arXiv 2512.17131, algorithm 1. Hooks the trainer's optimizers; the model holds y while it
    trains.
    """

    def __init__(self, trainer: Trainer, mu_x: float, mu_y: float) -> None:
        self._mu_x, self._mu_y = mu_x, mu_y
        self._parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        self._x = [parameter.detach().clone() for parameter in self._parameters]
        self._z = [parameter.detach().clone() for parameter in self._parameters]
        # The first one's step begins an inner step, the last one's ends it.
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self._load(self._z))
        trainer.optimizers[-1].register_step_post_hook(lambda *_: self._average())

    @torch.no_grad()
    def _load(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def _average(self) -> None:
        for parameter, x, z in zip(self._parameters, self._x, self._z, strict=True):
            z.copy_(parameter)
            x.mul_(self._mu_x).add_(z, alpha=1 - self._mu_x)
            parameter.copy_(x * self._mu_y + z * (1 - self._mu_y))

    def averaged(self, model: nn.Module, into: nn.Module) -> nn.Module:
        """Return `into` with x in it. model: the one that is trained; into: another one like it."""
        into.load_state_dict(model.state_dict())
        with torch.no_grad():
            for parameter, x in zip((p for p in into.parameters() if p.requires_grad), self._x, strict=True):
                parameter.copy_(x)
        return into


class DeMo:
    """Decoupled momentum (arXiv 2411.19870, algorithm 1): each peer's momentum keeps what it has not sent.

    At every step m <- decay m + lr gradient; the `topk` largest DCT coefficients of each chunk x chunk block of m are sent and
    taken out of m; all peers' are averaged, coefficient by coefficient, over those who sent it; then
    theta <- theta - lr sign(decoded). As in the authors' code a block's sides are the largest divisors of a tensor's sides that
    do not exceed `chunk`. A coefficient is sent as an int16 place and a bfloat16 value.
    """

    def __init__(
        self,
        model: nn.Module,
        peers: int,
        *,
        topk: int,
        chunk: int,
        decay: float,
        weight_decay: float,
        clip_norm: float,
        accumulation: int = 1,
    ) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._momenta = [[torch.zeros_like(parameter) for parameter in self._parameters] for _ in range(peers)]
        self._topk, self._decay, self._weight_decay, self._clip_norm = topk, decay, weight_decay, clip_norm
        self._accumulation = accumulation
        self._bases = [
            [_dct(_side(size, chunk)).to(parameter.device) for size in parameter.shape] for parameter in self._parameters
        ]

    def step(self, batches: Sequence[Iterator[Batch]], lr: float, traffic: Traffic) -> float:
        """Take one step of all peers, each on the mean gradient of `accumulation` batches; return the mean of their losses."""
        total, sent = 0.0, [list[tuple[Tensor, Tensor]]() for _ in self._parameters]
        for batch, momenta in zip(batches, self._momenta, strict=True):
            self._model.zero_grad(set_to_none=True)
            for _ in range(self._accumulation):
                inputs, targets = (part.to(self._parameters[0].device) for part in next(batch))
                loss = self._model(inputs, targets) / self._accumulation
                loss.backward()
                total += float(loss.detach())
            if self._clip_norm > 0:
                nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            for i, (parameter, momentum) in enumerate(zip(self._parameters, momenta, strict=True)):
                assert parameter.grad is not None
                momentum.mul_(self._decay).add_(parameter.grad, alpha=lr)
                sent[i].append(self._extract(momentum, self._bases[i]))
        own = sum(place.nbytes + value.nbytes for parts in sent for place, value in parts[:1])
        traffic.step(own, own * len(batches))
        with torch.no_grad():
            for parameter, parts, bases in zip(self._parameters, sent, self._bases, strict=True):
                if self._weight_decay and parameter.ndim >= 2:
                    parameter.mul_(1 - lr * self._weight_decay)
                parameter.add_(_decoded(parts, parameter.shape, bases).sign_(), alpha=-lr)
        return total / len(batches)

    def _extract(self, momentum: Tensor, bases: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the places and values of the largest coefficients of each block, and take them out of the momentum."""
        blocks = _blocks(momentum, bases)
        coefficients = _transformed(blocks, bases).flatten(1)
        places = coefficients.abs().topk(min(self._topk, coefficients.shape[1]), dim=1, sorted=False).indices
        sent = places.to(torch.int16), coefficients.gather(1, places).to(torch.bfloat16)
        momentum.sub_(_decoded([sent], momentum.shape, bases))
        return sent


def _decoded(parts: Sequence[tuple[Tensor, Tensor]], shape: torch.Size, bases: Sequence[Tensor]) -> Tensor:
    """Return the tensor of this shape whose coefficients are the mean of those sent."""
    sides = [len(base) for base in bases]
    places = torch.cat([place for place, _ in parts], dim=1).long()
    values = torch.cat([value for _, value in parts], dim=1).float()
    coefficients = torch.zeros(places.shape[0], math.prod(sides), device=places.device)
    coefficients.scatter_reduce_(1, places, values, reduce="mean", include_self=False)
    blocks = _transformed(coefficients.view(-1, *sides), [base.T for base in bases])
    if len(shape) == 1:
        return blocks.flatten()
    rows, columns = shape[0] // sides[0], shape[1] // sides[1]
    return blocks.view(rows, columns, *sides).permute(0, 2, 1, 3).reshape(shape)


def _blocks(tensor: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return the tensor's blocks: (number, side) or (number, side, side)."""
    sides = [len(base) for base in bases]
    if tensor.ndim == 1:
        return tensor.view(-1, sides[0])
    rows, columns = tensor.shape[0] // sides[0], tensor.shape[1] // sides[1]
    return tensor.view(rows, sides[0], columns, sides[1]).permute(0, 2, 1, 3).reshape(-1, *sides)


def _transformed(blocks: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return the blocks in another basis, along each of their sides: with `_dct` to coefficients, with its transpose back."""
    blocks = blocks @ bases[-1].T
    return blocks if len(bases) == 1 else bases[0] @ blocks


def _dct(size: int) -> Tensor:
    """Return the orthonormal DCT-II matrix, (size, size): coefficients = matrix @ values."""
    k, n = torch.arange(size).unsqueeze(1), torch.arange(size).unsqueeze(0)
    matrix = torch.cos(math.pi * (n + 0.5) * k / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _side(size: int, most: int) -> int:
    """Return the largest divisor of a size that does not exceed `most`."""
    return max(side for side in range(1, min(size, most) + 1) if size % side == 0)
