"""A run of one peer in this process, and what its outer parameters are, for tests of training frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from edit import LocalRun, OuterConfig, RunConfig
from edit.config.run import CodecConfig, PenaltyConfig, SyncConfig
from edit.records import Contribution

EVERY = 4


def run_of(lr: float = 1.0, outer_steps: int = 100) -> LocalRun:
    """Penalty off, nothing rounded: with lr 1 the outer parameters of a lone peer are its local ones."""
    config = RunConfig(
        outer=OuterConfig(optimizer="sgd", lr=lr),
        penalty=PenaltyConfig(enabled=False),
        codec=CodecConfig(up="fp32", down="fp32"),
        sync=SyncConfig(every=EVERY, outer_steps=outer_steps),
    )
    return LocalRun(config, ["me"])


class Spy:
    """The collective of a lone peer that keeps what is contributed."""

    def __init__(self, run: LocalRun) -> None:
        self._inner = run.collective("me")
        self.contributions: list[Contribution] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def contribute(self, contribution: Contribution) -> None:
        self.contributions.append(contribution)
        self._inner.contribute(contribution)


class Counting(Spy):
    """A collective that counts bytes, as a carrier does."""

    traffic = SimpleNamespace(sent=3_000_000, received=1_500_000)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def theta(run: LocalRun) -> dict[str, Tensor]:
    """The outer parameters by name."""
    named: dict[str, Tensor] = {}
    for fragment, flat in zip(run.state.schema.fragments, run.state.theta, strict=True):
        parts = torch.split(flat, [tensor.numel for tensor in fragment.tensors])
        named |= {tensor.name: part.view(tensor.shape) for tensor, part in zip(fragment.tensors, parts, strict=True)}
    return named


def same(mine: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether `mine` has every tensor of `others`, to the bit."""
    return all(torch.equal(mine[name], others[name]) for name in others)
