"""Builds the model that a run's `[model]` section names: built-in, `hf:`, or an entry point.

Model code never comes over the network. A run can only name a class of transformers, or an entry point of the group
`edit.models` that this peer's operator has installed and allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import torch
from torch import nn

from edit import plugins
from edit.config.plugins import is_entry
from edit.config.run import ModelConfig
from edit.errors import ConfigError, PluginError
from peers.models import huggingface
from peers.models.gpt import GPT

__all__ = ["build"]


def build(
    config: ModelConfig,
    seed: int,
    allowed_entry_points: frozenset[str],
    installed: Iterable[EntryPoint] | None = None,
    *,
    folder: Path | None = None,
    replaced: bool = False,
) -> nn.Module:
    """Return the run's model on the CPU, with initial values that follow from `seed`.

    replaced: the caller replaces the values of all trainable parameters, so the built-in model need not draw any.

    An entry point (see `edit.plugins`) is called with one mapping: `model.options`, and `context` and `vocabulary` of the run.
    It returns an nn.Module whose forward(tokens, targets), both (B, T) int64, gives the mean loss as a scalar. installed: the
    entry points to choose from; None: those of this environment, looked up only if the run names one. folder: of an `hf:`
    model, see `peers.models.huggingface`.

    Raises ConfigError when the entry point is not allowed, not installed, ambiguous, cannot be loaded, or returns no model; and
    for an `hf:` model that transformers does not have, whose options are wrong, or that does not fit `folder`.
    """
    kind = config.name.partition(":")[0]
    if folder is not None and kind != "hf":
        raise ConfigError(f'--model-folder has no effect: the run trains "{config.name}", not hf:MODEL_TYPE')
    name = config.name if is_entry(config.name) else kind
    plugin, make = plugins.resolve("models", name, allowed_entry_points, installed)
    if plugin.built_in:
        own: nn.Module = make(config, None if replaced else seed, folder)
        return own
    arguments = _arguments(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with plugins.blame(plugin):
            model = make(arguments)
    if not isinstance(model, nn.Module):
        raise PluginError(f"{plugin}: gave a {type(model).__name__}, not an nn.Module")
    return model


@plugins.built_in("models", "builtin")
def _gpt(config: ModelConfig, seed: int | None, folder: None) -> nn.Module:
    return GPT(config, seed)


@plugins.built_in("models", "hf")
def _huggingface(config: ModelConfig, seed: int | None, folder: Path | None) -> nn.Module:
    return huggingface.build(config, seed or 0, folder)


def _arguments(config: ModelConfig) -> Mapping[str, str | int | float | bool]:
    for key in ("context", "vocabulary"):
        if key in config.options:
            raise ConfigError(f"model.options.{key} has no effect; set model.{key}")
    return {**config.options, "context": config.context, "vocabulary": config.vocabulary}
