"""Training with differential privacy: the gradients of a peer whose run has privacy.level = "example"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from edit.config.run import RunConfig
from edit.config.validation import require
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.training.data import Batches
from peers.training.data_source import DataSource
from peers.training.sharding import RankLayout

if TYPE_CHECKING:
    from edit.integrations.opacus import PrivateGradients

__all__ = ["LEDGER", "private_gradients"]

LEDGER = "privacy-ledger.jsonl"
"""The file of a peer's folder that counts the steps; not moved by --fresh."""


def private_gradients(
    batches: DataSource,
    config: RunConfig,
    ledger: Path,
    device: torch.device,
    layout: RankLayout,
    max_epsilon: float | None = None,
) -> Callable[[nn.Module], PrivateGradients[Any]]:
    """Return what makes the noised gradients of a model that is on `device`, of the examples of `batches`.

    max_epsilon: this peer's own bound, beside the run's.

    Raises ConfigError where the data, the replica or the installed packages do not go with it; so does the call, as
    `edit.integrations.opacus.PrivateGradients`.
    """
    privacy, bound = config.privacy, "privacy.epsilon_max"
    if max_epsilon is not None and max_epsilon < privacy.epsilon_max:
        privacy, bound = dataclasses.replace(privacy, epsilon_max=max_epsilon), "--max-epsilon"
    if not isinstance(batches, Batches):
        raise ConfigError(
            '--data entry: gives rows in an order of its own, and privacy.level = "example" draws them; give files'
        )
    rule = "must be sequence with edit-peer run: a document is cut into several, or several are in one"
    require(privacy.unit == "sequence", "privacy.unit", privacy.unit, rule)
    if layout.mesh is not None:
        raise ConfigError('privacy.level = "example": a replica of several ranks is not supported; start one process')
    try:
        from edit.integrations.opacus import PrivateGradients, lengths
    except ImportError as error:
        raise ConfigError(str(error)) from error
    found = batches

    def fetch(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens, targets = found.example(numbers)
        return tokens.to(device), targets.to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value: Tensor = model(*batch)
        return value

    def make(model: nn.Module) -> PrivateGradients[Any]:
        if isinstance(model, GPT):
            model.make_head_a_layer()
        model.train()
        tokens = config.model.context
        return PrivateGradients(
            model,
            found.examples,
            fetch,
            loss,
            privacy,
            ledger=ledger,
            tokens_of_example=tokens,
            bound=bound,
            **lengths(config),
        )

    return make
