"""Held-out losses: of any parameters (`Evaluator`), and when the demo measures them (`Measurer`).

Every loss of a report is measured on the same windows of held-out text, with the lab's own copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema, plan_fragments
from edit.lab.demo.recorder import LONE, Recorder
from edit.lab.demo.results import Losses
from edit.records import Snapshot
from peers.models.registry import build
from peers.training.data import evaluate, open_tokens
from peers.training.sample import generate

__all__ = ["FINAL_BATCHES", "TRACK_BATCHES", "Evaluator", "Measurer", "SnapshotSource"]

TRACK_BATCHES = 6  # for a point of the curve
FINAL_BATCHES = 48  # for the results

_WINDOWS_PER_BATCH = 16


class Evaluator:
    """Measure losses in nats per byte, on `batches` of 16 windows that are spread evenly over the held-out text."""

    def __init__(self, config: RunConfig, held_out: Path) -> None:
        self._context = config.model.context
        self._tokens = open_tokens(held_out, context=config.model.context, vocabulary=config.model.vocabulary)
        self._model = build(config.model, config.seed, frozenset())
        self.schema = plan_fragments(self._model.named_parameters())
        self._initial = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    def windows(self, batches: int) -> int:
        """Return the number of windows in `batches`: fewer than 16 each where the text is short."""
        return min((len(self._tokens) - 1) // self._context, batches * _WINDOWS_PER_BATCH)

    def initial(self, batches: int) -> float:
        """Return the loss of the initial parameters, which every peer starts from."""
        return self._loss(self._initial, batches)

    def of_fragments(self, fragments: Sequence[Tensor], batches: int) -> float:
        """Return the loss of outer parameters: flat fp32, in fragment order."""
        return self._loss(self.by_name(fragments), batches)

    def of_file(self, path: Path, batches: int) -> float:
        """Return the loss of a safetensors file by parameter name. Raises ConfigError when it is of another model."""
        return self._loss(load_file(path), batches)

    def by_name(self, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the flat fragments as views by parameter name, in full shape."""
        named: dict[str, Tensor] = {}
        for flat, fragment in zip(fragments, self.schema.fragments, strict=True):
            parts = torch.split(flat, [tensor.numel for tensor in fragment.tensors])
            named.update((tensor.name, part.view(tensor.shape)) for tensor, part in zip(fragment.tensors, parts, strict=True))
        return named

    def save(self, fragments: Sequence[Tensor], path: Path) -> None:
        """Write outer parameters as safetensors, by tensor name."""
        save_file({name: tensor.contiguous() for name, tensor in self.by_name(fragments).items()}, path)

    def sample(self, fragments: Sequence[Tensor], length: int, seed: int) -> str:
        """Generate `length` bytes of text with the outer parameters, from an empty prompt."""
        self._load(self.by_name(fragments))
        text = generate(self._model, b"", length, context=self._context, seed=seed)
        return text.decode(errors="replace").replace("\x00", "\n")

    def _loss(self, named: Mapping[str, Tensor], batches: int) -> float:
        self._load(named)
        return evaluate(self._model, self._tokens, self._context, batches, _WINDOWS_PER_BATCH)

    @torch.no_grad()
    def _load(self, named: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            if name not in named or named[name].shape != parameter.shape:
                raise ConfigError(f"tensor {name} is missing or has another shape: these are parameters of another model")
            parameter.copy_(named[name])


class SnapshotSource(Protocol):
    """The run, which gives the newest outer parameters, or None when it does not answer."""

    def snapshot(self, schema: Schema) -> Snapshot | None: ...


@dataclass(slots=True)
class Measurer:
    """Measure the loss curve of the outer parameters, about `points` times in a run, and the final losses."""

    evaluator: Evaluator
    recorder: Recorder
    points: int = 12
    next_step: int = 0
    measured: int = 0  # the outer step of the last point

    def initial(self) -> None:
        """Measure the first point of the curve."""
        self.recorder.validation("outer", 0, self.evaluator.initial(TRACK_BATCHES))
        self.next_step = 1

    def track(self, source: SnapshotSource) -> None:
        """Measure the newest outer parameters, if enough outer steps were committed since the last point. Call it often."""
        state = self.recorder.state
        if not self.next_step <= state.outer_step < state.outer_steps:
            return
        snapshot = source.snapshot(self.evaluator.schema)
        if snapshot is not None and snapshot.outer_step >= self.next_step:  # a swarm shares an older one with other readers
            self._point(snapshot)
            self.next_step = snapshot.outer_step + max(1, state.outer_steps // self.points)

    def _point(self, snapshot: Snapshot) -> None:
        if snapshot.outer_step <= self.measured:  # the run had come further than was heard of
            return
        self.measured = snapshot.outer_step
        loss = self.evaluator.of_fragments(snapshot.fragments, TRACK_BATCHES)
        self.recorder.validation("outer", snapshot.outer_step * self.recorder.state.sync_every, loss)

    def final(self, snapshot: Snapshot, lone: Path, batches: int) -> Losses:
        """Measure the initial, lone and outer parameters, on more windows than the curve. snapshot: of the last outer step."""
        self._point(snapshot)
        if lone.exists():
            steps = max((point.step for point in self.recorder.state.lone), default=0)
            self.recorder.validation(LONE, steps, self.evaluator.of_file(lone, TRACK_BATCHES))
        return Losses(
            outer_step=snapshot.outer_step,
            initial=self.evaluator.initial(batches),
            outer=self.evaluator.of_fragments(snapshot.fragments, batches),
            lone=self.evaluator.of_file(lone, batches) if lone.exists() else None,
            windows=self.evaluator.windows(batches),
        )
