"""Training without any exchange: the baseline for the peers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.plain_text import json_text
from peers.training.data import Tokens, evaluate
from peers.training.trainer import StepResult, Trainer

__all__ = ["AlonePlan", "train_alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlonePlan:
    """What to train, for how long, and where the results go."""

    config: RunConfig
    batches: Iterable[tuple[Tensor, Tensor]]  # without end, see `peers.training.data_source`
    steps: int  # inner steps, also the length of the learning rate's schedule
    progress: Path  # a file of JSON lines
    parameters: Path  # a safetensors file of the final values by name
    report_every: int = 10  # inner steps between two lines
    validation: Tokens | None = None  # held-out text, measured every validate_every steps and at the end
    validate_every: int = 0  # 0: only at the end
    validation_batches: int = 16

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("report_every", 1), ("validate_every", 0), ("validation_batches", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {low}")


def train_alone(plan: AlonePlan, model: nn.Module, *, device: torch.device, clock: Callable[[], float]) -> float | None:
    """Train `model` (from `peers.models.registry.build`) and return the final validation loss, or None.

    Lines: {"kind": "alone", "step", "loss", "tokens_per_s", "lr", "t"}, loss the mean since the line before, t in seconds since
    the start; and {"kind": "alone", "step", "validation_loss"}. Each is flushed, so that an interrupted run loses none.

    Raises ConfigError when a result file cannot be written.
    """
    inner = replace(plan.config.inner, batch_growth=1)  # it grows after exchanges
    trainer = Trainer(model, plan.batches, inner, total_steps=plan.steps, device=device, clock=clock)
    try:
        plan.progress.parent.mkdir(parents=True, exist_ok=True)
        with plan.progress.open("w", encoding="utf-8") as lines:
            final = _loop(plan, trainer, clock, lines)
        _save(trainer.model, plan.parameters)
    except OSError as error:
        raise ConfigError(f"{error.filename or plan.parameters}: cannot be written ({error.strerror})") from error
    return final


def _loop(plan: AlonePlan, trainer: Trainer, clock: Callable[[], float], lines: TextIO) -> float | None:
    started = clock()
    recent: list[StepResult] = []
    final = None
    for step in range(1, plan.steps + 1):
        recent.append(trainer.step())
        last = step == plan.steps
        if last or step % plan.report_every == 0:
            rate = float(trainer.optimizer.param_groups[0]["lr"])
            _write(lines, {"step": step, **_summary(recent), "lr": rate, "t": round(clock() - started, 3)})
            recent.clear()
        if plan.validation and (last or (plan.validate_every and step % plan.validate_every == 0)):
            final = evaluate(trainer.model, plan.validation, plan.config.model.context, plan.validation_batches)
            _write(lines, {"step": step, "validation_loss": final})
    return final


def _summary(recent: list[StepResult]) -> dict[str, float]:
    seconds = sum(result.seconds for result in recent)
    tokens = sum(result.tokens for result in recent)
    return {
        "loss": sum(result.loss for result in recent) / len(recent),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
    }


def _write(lines: TextIO, values: dict[str, float]) -> None:
    lines.write(json_text({"kind": "alone", **values}) + "\n")
    lines.flush()


def _save(model: nn.Module, path: Path) -> None:
    """Write to a temporary file and rename it, so that a reader never sees half a file. Tied weights are written once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}, partial)
    except SafetensorError as error:
        raise ConfigError(f"{path}: cannot be written ({error})") from error
    partial.replace(path)
