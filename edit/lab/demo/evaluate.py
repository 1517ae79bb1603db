"""What parameters are worth on held-out text, and what they write.

Owns: the lab's own copy of the model and the held-out tokens; every loss of a report comes from here, from the same windows.
Must not know: where parameters come from, the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import plan_fragments
from peers.models.registry import build
from peers.training.data import evaluate, open_tokens
from peers.training.sample import generate

__all__ = ["Evaluator"]

_WINDOWS_PER_BATCH = 16


class Evaluator:
    """Losses in nats per byte. `batches` of 16 windows are spread evenly over the held-out text."""

    def __init__(self, config: RunConfig, held_out: Path) -> None:
        self._context = config.model.context
        self._tokens = open_tokens(held_out, context=config.model.context, vocabulary=config.model.vocabulary)
        self._model = build(config.model, config.seed, frozenset())
        self.schema = plan_fragments(self._model.named_parameters())
        self._initial = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    def windows(self, batches: int) -> int:
        """How many windows of held-out text `batches` are: fewer than 16 each where the text is short."""
        return min((len(self._tokens) - 1) // self._context, batches * _WINDOWS_PER_BATCH)

    def initial(self, batches: int) -> float:
        """Loss of the values that every peer starts from."""
        return self._loss(self._initial, batches)

    def of_fragments(self, fragments: Sequence[Tensor], batches: int) -> float:
        """Loss of outer parameters, flat fp32, in fragment order."""
        return self._loss(self.by_name(fragments), batches)

    def of_file(self, path: Path, batches: int) -> float:
        """Loss of a safetensors file with one tensor per parameter. Raises ConfigError when it is of another model."""
        return self._loss(load_file(path), batches)

    def by_name(self, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Flat fragments -> parameters by name, in full shape (views)."""
        named: dict[str, Tensor] = {}
        for flat, fragment in zip(fragments, self.schema.fragments, strict=True):
            parts = torch.split(flat, [tensor.numel for tensor in fragment.tensors])
            named.update((tensor.name, part.view(tensor.shape)) for tensor, part in zip(fragment.tensors, parts, strict=True))
        return named

    def save(self, fragments: Sequence[Tensor], path: Path) -> None:
        """Write outer parameters as safetensors, by tensor name."""
        save_file({name: tensor.contiguous() for name, tensor in self.by_name(fragments).items()}, path)

    def sample(self, fragments: Sequence[Tensor], length: int, seed: int) -> str:
        """Text that the outer parameters write by themselves, from the start of a file."""
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
