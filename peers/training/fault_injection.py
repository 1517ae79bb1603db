"""Faults for tests and the demo: `nan@K,huge@L` damages what this peer contributes at the outer steps K and L.

`flip@K+`, `reverse@K+` and `copy@K+` are attacks, in each exchange from outer step K on. What they contribute has the length of
an honest pseudo-gradient, so that its norm gives no attacker away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from edit.errors import ConfigError

__all__ = ["KINDS", "Fault", "FaultInjector", "parse_faults"]

KINDS = ("nan", "huge", "flip", "reverse", "copy")
HUGE = 1e4


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the contribution at one outer step, or at all from there on.

    nan: one element of one tensor. huge: the pseudo-gradient times 10,000. flip: its negative. reverse, copy: the last update
    of the outer parameters, backward or once more, with each tensor as long as in the pseudo-gradient; what an attacker knows
    of the other peers is in the update. Before there is one: flip, and no damage.
    """

    kind: str
    outer_step: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}@{self.outer_step}{'+' if self.lasting else ''}"


class _Worker(Protocol):
    @property
    def outer_step(self) -> int: ...
    @property
    def round_inner_steps(self) -> int: ...
    @property
    def pending(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse `nan@3,flip@5+`; an empty text gives no faults. Raises ConfigError."""
    faults = []
    for part in filter(None, text.split(",")):
        kind, _, step = part.partition("@")
        if kind not in KINDS or not step.removesuffix("+").isdecimal():
            raise ConfigError(
                f"--fault {part}: must be KIND@OUTER_STEP, or KIND@OUTER_STEP+ for all from there on; a KIND is "
                f"{', '.join(KINDS)}"
            )
        faults.append(Fault(kind, int(step.removesuffix("+")), step.endswith("+")))
    return tuple(faults)


class FaultInjector:
    """Damage the local parameters before an exchange, once for each fault that does not last.

    Register `damage` as a hook after the optimizer step, before the EditWorker's own hook. interval: inner steps of the
    advance from an outer step; announce: logs a line for each fault. In a sharded model each rank damages its own shards.
    """

    def __init__(
        self,
        model: nn.Module,
        worker: _Worker,
        interval: Callable[[int], int],
        faults: tuple[Fault, ...],
        announce: Callable[[str], None],
    ) -> None:
        self._model = model
        self._worker = worker
        self._interval = interval
        self._waiting = sorted(faults, key=lambda fault: fault.outer_step)
        self._announce = announce
        self._attack: Fault | None = None  # the lasting one that has begun
        self._before: dict[str, Tensor] = {}  # the outer parameters of the exchange before

    def damage(self, *_: object) -> None:
        """Damage the local parameters if the next fault is due at this step's exchange."""
        worker = self._worker
        due = not worker.pending and worker.round_inner_steps + 1 >= self._interval(worker.outer_step)
        if not due:
            return
        if self._waiting and worker.outer_step >= self._waiting[0].outer_step:
            fault = self._waiting.pop(0)
            self._announce(f"injected fault: {fault.kind} at outer step {worker.outer_step}")
            if fault.lasting:
                self._attack = fault
            self._inject(fault)
        elif self._attack is not None:
            self._inject(self._attack)

    @torch.no_grad()
    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case "nan":
                held = (_local(parameter) for parameter in self._model.parameters() if parameter.requires_grad)
                next(part for part in held if part.numel()).view(-1)[0] = torch.nan
            case "huge":
                self._scale(HUGE)
            case "flip":
                self._scale(-1.0)
            case _:
                self._repeat(1.0 if fault.kind == "copy" else -1.0)

    def _scale(self, factor: float) -> None:
        """local <- outer - factor (outer - local)"""
        for _, local, theta in self._held():
            local.copy_(theta - factor * (theta - local))

    def _repeat(self, sign: float) -> None:
        """local <- outer + sign (outer - outer before), as long as outer - local"""
        before, self._before = self._before, {}
        for name, local, theta in self._held():
            moved = theta - before[name] if name in before else torch.zeros_like(theta)
            drift = local - theta
            if float(moved.norm()) > 0.0:
                local.copy_(theta + sign * moved * (drift.norm() / moved.norm()))
            elif sign < 0.0:
                local.copy_(theta - drift)
            self._before[name] = theta.clone()

    def _held(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each exchanged parameter's name, what this rank holds of it, and of its outer value."""
        outer = self._worker.state_dict()["outer"]
        for name, parameter in self._model.named_parameters():
            if name in outer:
                local = _local(parameter)
                yield name, local, _local(outer[name]).to(local.device, local.dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
