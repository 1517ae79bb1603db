"""Faults for tests and the demo: `nan@K,huge@L` damages what this peer contributes at the outer steps K and L."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from edit.errors import ConfigError

__all__ = ["KINDS", "Fault", "FaultInjector", "parse_faults"]

KINDS = ("nan", "huge")
HUGE = 1e4


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the contribution at one outer step."""

    kind: str  # nan (one element of one tensor) or huge (the pseudo-gradient times 10,000)
    outer_step: int


class _Worker(Protocol):
    @property
    def outer_step(self) -> int: ...
    @property
    def round_inner_steps(self) -> int: ...
    @property
    def pending(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse `nan@3,huge@5`; an empty text gives no faults. Raises ConfigError."""
    faults = []
    for part in filter(None, text.split(",")):
        kind, _, step = part.partition("@")
        if kind not in KINDS or not step.isdigit():
            raise ConfigError(f"--fault {part}: must be {' or '.join(f'{kind}@OUTER_STEP' for kind in KINDS)}")
        faults.append(Fault(kind, int(step)))
    return tuple(faults)


class FaultInjector:
    """Damage the local parameters before an exchange, once for each fault.

    Register `damage` as a hook after the optimizer step, before the EditWorker's own hook. interval: inner steps between two
    exchanges; announce: logs a line for each fault. In a sharded model each rank damages its own shards.
    """

    def __init__(
        self, model: nn.Module, worker: _Worker, interval: int, faults: tuple[Fault, ...], announce: Callable[[str], None]
    ) -> None:
        self._model = model
        self._worker = worker
        self._interval = interval
        self._waiting = sorted(faults, key=lambda fault: fault.outer_step)
        self._announce = announce

    def damage(self, *_: object) -> None:
        """Damage the local parameters if the next fault is due at this step's exchange."""
        worker = self._worker
        due = not worker.pending and worker.round_inner_steps + 1 >= self._interval
        if not self._waiting or not due or worker.outer_step < self._waiting[0].outer_step:
            return
        fault = self._waiting.pop(0)
        self._announce(f"injected fault: {fault.kind} at outer step {worker.outer_step}")
        with torch.no_grad():
            if fault.kind == "nan":
                held = (_local(parameter) for parameter in self._model.parameters() if parameter.requires_grad)
                next(part for part in held if part.numel()).view(-1)[0] = torch.nan
            else:
                self._inflate()

    def _inflate(self) -> None:
        """local <- outer - 10,000 (outer - local)"""
        outer = self._worker.state_dict()["outer"]
        for name, parameter in self._model.named_parameters():
            if name in outer:
                local = _local(parameter)
                theta = _local(outer[name]).to(local.device, local.dtype)
                local.copy_(theta - HUGE * (theta - local))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
