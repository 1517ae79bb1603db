"""What a training library has wrapped around a model and its optimizers, taken off again.

A wrapper changes the names of the parameters (`module.` of DistributedDataParallel), so a peer with it would not fit a run of
peers without; and a wrapper of an optimizer leaves out steps (gradient accumulation, an overflow) that then must not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from edit.errors import ConfigError

__all__ = ["innermost_model", "innermost_optimizer", "innermost_optimizers", "is_replicated"]

_REFUSED = {
    "FullyShardedDataParallel": "its parameters are flattened and lose their names; shard with torch's fully_shard (FSDP2)",
    "DeepSpeedEngine": "it keeps and steps the parameters itself; shard with torch's fully_shard (FSDP2)",
    "DataParallel": "it trains copies of the model; start one process per GPU, with DistributedDataParallel",
}


def innermost_model(model: nn.Module) -> nn.Module:
    """Return the module that DistributedDataParallel, accelerate's `prepare` or Fabric's `setup` have wrapped.

    A module that only torch.compile has wrapped is returned as it is: its names are known. Raises ConfigError for what is no
    module, and for a wrapper that hides the parameters.
    """
    inside: object = model
    while True:
        if not isinstance(inside, nn.Module):
            raise ConfigError(f"model: must be a torch.nn.Module, not {_the(inside)}")
        for kind in type(inside).__mro__:
            if why := _REFUSED.get(kind.__name__):
                raise ConfigError(f"model: {kind.__name__} cannot train with other peers: {why}")
        if (wrapped := _wrapped(inside)) is None:
            return inside
        inside = wrapped


def _wrapped(model: nn.Module) -> object:
    """Return what is inside of a wrapper; None when the module is none."""
    if isinstance(model, DistributedDataParallel) or _is_fabric(model):
        return model.module
    compiled = model._modules.get("_orig_mod")
    return compiled if compiled is not None and _wrapped(compiled) is not None else None


def _is_fabric(model: nn.Module) -> bool:
    kind = type(model)
    return kind.__name__ == "_FabricModule" and kind.__module__.partition(".")[0] in ("lightning", "lightning_fabric")


def is_replicated(model: nn.Module) -> bool:
    """Return whether DistributedDataParallel keeps copies of the model equal over several processes, inside of any wrapper."""
    inside: object = model
    while isinstance(inside, nn.Module):
        if isinstance(inside, DistributedDataParallel):
            return True
        inside = getattr(inside, "_forward_module", None) if _is_fabric(inside) else inside._modules.get("_orig_mod")
    return False


def innermost_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """Return the torch optimizers in their wrappers. Raises ConfigError where there is none, or one twice."""
    given = tuple(optimizers) if isinstance(optimizers, (list, tuple)) else (optimizers,)
    if not given:
        raise ConfigError("optimizer: at least one is needed")
    inner = tuple(map(innermost_optimizer, given))
    if len(set(map(id, inner))) < len(inner):
        raise ConfigError("optimizer: one is given twice")
    return inner


def innermost_optimizer(optimizer: object) -> Optimizer:
    """Return the torch optimizer that accelerate, Fabric or a Trainer has wrapped. Raises ConfigError, also without step hooks.

    One that wraps another but runs step hooks of its own is returned itself: it may write after the inner step, as Lookahead.
    """
    inner: object = optimizer
    while not (isinstance(inner, LRScheduler) or _runs_hooks(inner)) and (inside := wrapped(inner)) is not None:
        inner = inside
    if not isinstance(inner, Optimizer):
        raise ConfigError(f"optimizer: must be a torch optimizer, or a list of them, not {_the(optimizer)}")
    if "_optimizer_step_pre_hooks" not in vars(inner):
        raise ConfigError(
            f"optimizer: {type(inner).__name__} has no step hooks (it does not call Optimizer.__init__); "
            "give the torch optimizer that it has wrapped, and step that one"
        )
    return inner


def wrapped(optimizer: object) -> Optimizer | None:
    """Return the torch optimizer that this one has wrapped, as Opacus's does, too; None: it wraps none."""
    inside = (getattr(optimizer, name, None) for name in ("optimizer", "original_optimizer"))
    return next((each for each in inside if isinstance(each, Optimizer)), None)


def _runs_hooks(optimizer: object) -> bool:
    """Return whether the step of this class itself runs torch's hooks; that of accelerate's and Fabric's wrappers does not."""
    step = getattr(type(optimizer), "step", None)
    return isinstance(optimizer, Optimizer) and hasattr(step, "hooked") and "_optimizer_step_pre_hooks" in vars(optimizer)


def _the(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
