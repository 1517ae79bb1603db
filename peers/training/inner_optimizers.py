"""The inner optimizers by name: AdamW, Muon, SGD, others of torch.optim, plug-ins; and what of their state is saved.

A name from the wire is looked up in a fixed list, or among the plug-ins that this peer's operator allowed; nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it: half a second, that it takes better with the rest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from edit import plugins
from edit.config.plugins import is_entry
from edit.config.run import TORCH_OPTIMIZERS, InnerConfig
from edit.errors import ConfigError, PluginError, StorageError
from peers.training import quantized_state
from peers.training.muon import Muon

__all__ = [
    "group_values",
    "inner_optimizers",
    "is_state",
    "load_groups",
    "loaded_state",
    "matrices",
    "optimizers_of",
    "saved_groups",
    "saved_state",
    "state_names",
]

Groups = list[dict[str, Any]]
Number = int | float | None  # bool is an int
_SET = frozenset({"params", "lr"})  # of a group: what the trainer sets
_NOT_SHARDED = ("Adafactor", "Rprop")  # torch 2.13 cannot take their step on a DTensor that is sharded


def inner_optimizers(
    model: nn.Module, config: InnerConfig, device: torch.device, allowed: Collection[str] = ()
) -> tuple[Optimizer, ...]:
    """Return what trains the model's trainable parameters, each in one of them. Matrices have weight decay, others none.

    Raises ConfigError for a model without trainable parameters, for Muon where it has no matrices, for options that
    torch.optim's class does not have, for a plug-in that is not allowed, and as
    `peers.training.quantized_state.quantized_adamw`. Raises PluginError.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter")
    name = config.optimizer if is_entry(config.optimizer) else config.optimizer.partition(":")[0]
    plugin, make = plugins.resolve("optimizers", name, allowed)
    if plugin.built_in:
        own: tuple[Optimizer, ...] = make(model, trainable, config, device)
        return own
    return (_of_plugin(plugin, make, _groups(trainable, config), config),)


@plugins.built_in("optimizers", "adamw")
def _adamw_for_all(
    model: nn.Module, trainable: Sequence[nn.Parameter], config: InnerConfig, device: torch.device
) -> tuple[Optimizer, ...]:
    groups, quantized = _groups(trainable, config), config.state != "fp32"
    return (quantized_state.quantized_adamw(groups, config) if quantized else _adamw(groups, config, device),)


@plugins.built_in("optimizers", "sgd")
def _sgd(
    model: nn.Module, trainable: Sequence[nn.Parameter], config: InnerConfig, device: torch.device
) -> tuple[Optimizer, ...]:
    momentum = config.momentum
    return (torch.optim.SGD(_groups(trainable, config), lr=config.lr, momentum=momentum, nesterov=momentum > 0),)


@plugins.built_in("optimizers", "torch")
def _of_torch(
    model: nn.Module, trainable: Sequence[nn.Parameter], config: InnerConfig, device: torch.device
) -> tuple[Optimizer, ...]:
    """Another class of torch.optim, from a fixed list.

    Raises ConfigError also for what torch would refuse at the first step only.
    """
    name = config.optimizer.removeprefix("torch:")
    if name not in TORCH_OPTIMIZERS:
        raise ConfigError(f"inner.optimizer = {config.optimizer!r}: known are {', '.join(TORCH_OPTIMIZERS)}")
    if name in _NOT_SHARDED and any(isinstance(parameter, DTensor) for parameter in trainable):
        raise ConfigError(f"inner.optimizer = {config.optimizer!r}: a sharded replica has none; choose adamw, or do not shard")
    if config.options.get("capturable") and device.type == "cpu":
        raise ConfigError("inner.options.capturable: torch has it on GPUs only; leave it out, or train on one")
    try:
        return (getattr(torch.optim, name)(_groups(trainable, config), lr=config.lr, **config.options),)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"inner.options: torch.optim.{name} says: {error}") from error


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return what Muon trains: the weights of the linear layers, but not the head, which also ends in the vocabulary.

    Each matrix that a module holds itself and multiplies by; an embedding's rows are none, nor is what is tied to them. Outside
    the model's blocks (elements of an nn.ModuleList that hold modules), one that is as long as some embedding is taken for a
    head. In a block none is: there, as many rows mean that the model is as wide as its vocabulary, or as its longest context.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows, tied = {module.num_embeddings for module in embeddings}, {id(module.weight) for module in embeddings}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for each in lists for block in each if any(True for _ in block.children())]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    found = {
        id(parameter): parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
        and parameter.ndim == 2
        and id(parameter) not in tied
        and (id(parameter) in inside or parameter.shape[0] not in rows)
    }
    return list(found.values())


@plugins.built_in("optimizers", "muon")
def _muon(
    model: nn.Module, trainable: Sequence[nn.Parameter], config: InnerConfig, device: torch.device
) -> tuple[Optimizer, ...]:
    """Muon, scaled so that AdamW's learning rate fits (Liu et al. 2025, arXiv 2502.16982), and AdamW for the rest."""
    found = matrices(model)
    if not found:
        raise ConfigError('inner.optimizer = "muon": the model has no matrices beside embeddings and head; choose adamw')
    muon = Muon(found, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)
    of_muon = set(map(id, found))
    rest = [parameter for parameter in trainable if id(parameter) not in of_muon]
    return (muon, _adamw(_groups(rest, config), config, device)) if rest else (muon,)


def _groups(parameters: Sequence[nn.Parameter], config: InnerConfig) -> Groups:
    groups: Groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: Groups, config: InnerConfig, device: torch.device) -> Optimizer:
    """AdamW, fused where torch has a fused kernel (measured on one CPU thread: 1.1 ms, not 4.1)."""
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def _of_plugin(plugin: plugins.Plugin, make: Callable[..., Any], groups: Groups, config: InnerConfig) -> Optimizer:
    with plugins.blame(plugin):
        made = make(groups, {**config.options, "lr": config.lr})
    if not isinstance(made, Optimizer):
        raise PluginError(f"{plugin}: gave a {type(made).__name__}, not a torch.optim.Optimizer")
    given = {id(parameter) for group in groups for parameter in group["params"]}
    if {id(parameter) for group in made.param_groups for parameter in group["params"]} != given:
        raise PluginError(f"{plugin}: its optimizer must train the parameters that it was given, and no others")
    return made


def optimizers_of(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, Optimizer]:
    """Return the optimizer that trains each of these parameters, by name."""
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: owners[id(parameter)] for name, parameter in parameters.items()}


def saved_state(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    """Return what is to be saved of a parameter's state, by name; empty before the first step.

    Raises ConfigError for a state that is no plain tensor, which a checkpoint cannot keep.
    """
    state = quantized_state.split(optimizer, parameter)
    found = {key: value for key, value in state.items() if value is not None}
    for key, value in found.items():
        if not isinstance(value, Tensor) or (hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)):
            raise ConfigError(f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}: set --checkpoint-every 0")
    return found


def loaded_state(optimizer: Optimizer, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state as the optimizer keeps it, of what `saved_state` returned."""
    return quantized_state.join(optimizer, parameter, saved)


def group_values(optimizer: Optimizer) -> Groups:
    """Return what its parameter groups hold beside the parameters and their learning rate, as it is now."""
    return [{key: _copied(value) for key, value in group.items() if key not in _SET} for group in optimizer.param_groups]


def saved_groups(optimizer: Optimizer, made: Groups) -> list[dict[str, Number]]:
    """Return by group what is to be saved: what an optimizer that keeps state there has changed (schedule-free's k).

    made: `group_values` before the first step; the rest are settings, which the configuration has. Raises ConfigError for what
    is no number, which a checkpoint cannot keep.
    """
    found: list[dict[str, Number]] = []
    for group, before in zip(group_values(optimizer), made, strict=True):
        changed = {key: value for key, value in group.items() if key not in before or not _same(value, before[key])}
        for key, value in changed.items():
            if not isinstance(value, int | float | None):
                kept = f"{key} of its parameter groups as {type(value).__name__}"
                raise ConfigError(f"{type(optimizer).__name__} keeps {kept}: set --checkpoint-every 0")
        found.append(changed)
    return found


def load_groups(optimizer: Optimizer, saved: object) -> None:
    """Put back what `saved_groups` returned. Raises StorageError when it does not fit."""
    if not isinstance(saved, list) or len(saved) != len(optimizer.param_groups):
        raise StorageError("damaged (scalars.groups does not fit the optimizer's parameter groups)")
    for group, kept in zip(optimizer.param_groups, saved, strict=True):
        if not isinstance(kept, dict) or _SET & kept.keys():
            raise StorageError("damaged (scalars.groups is no state of parameter groups)")
        for key, value in kept.items():
            if not isinstance(value, int | float | None):
                raise StorageError(f"damaged (scalars.groups: {key} is no number)")
            group[key] = value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return isinstance(value, Tensor) and isinstance(before, Tensor) and torch.equal(value, before)
    try:
        return type(value) is type(before) and bool(value == before)
    except (ValueError, RuntimeError):  # arrays, in a list or not
        return False


def state_names(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of what a checkpoint has of a parameter's state after a step; (): not known."""
    if (sizes := quantized_state.sizes(optimizer, parameter)) is not None:
        return tuple(sizes)
    match optimizer:
        case torch.optim.AdamW():
            return ("exp_avg", "exp_avg_sq", "step")
        case Muon():
            return ("momentum_buffer",)
        case _:
            return ()


def is_state(optimizer: Optimizer, part: str, size: torch.Size, parameter: nn.Parameter) -> bool:
    """Return whether a checkpoint may have `part`, of this size, of this parameter's state."""
    if (sizes := quantized_state.sizes(optimizer, parameter)) is not None:
        return sizes.get(part) == size
    names, shape = state_names(optimizer, parameter), parameter.shape
    if names:
        return part in names and size in (shape, torch.Size())
    return part.isidentifier() and len(part) < 100 and size.numel() <= max(1, shape.numel())
