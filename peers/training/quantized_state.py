"""AdamW with moments in 8 or 4 bits, which torchao computes (the extra lowbit); what a checkpoint holds of them.

Moments of 4096 and more elements, in whole blocks, are codes of a dynamic quantile map with a scale for each block (Dettmers et
al. 2021, arXiv 2110.02861); others are fp32. torchao is imported only where a run's `inner.state` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from edit.config.run import InnerConfig
from edit.errors import ConfigError

__all__ = ["join", "quantized_adamw", "sizes", "split", "step"]

_CLASSES = {"int8": "AdamW8bit", "int4": "AdamW4bit"}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PARTS = ("codes", "scale")  # of a quantized moment; its map is a constant
_LEAST = 4096  # elements of a quantized moment


def quantized_adamw(groups: Sequence[dict[str, Any]], config: InnerConfig) -> Optimizer:
    """Return torchao's AdamW with moments in `config.state`.

    Raises ConfigError where torchao is not installed or cannot be imported, and for a sharded replica.
    """
    if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        raise ConfigError(f'inner.state = "{config.state}": a sharded replica has none; choose fp32, or do not shard')
    try:
        from torchao import optim
    except ImportError as error:
        needs = f"needs torchao ({error}): pip install 'edit-localsgd[lowbit]'"
        raise ConfigError(f'inner.state = "{config.state}" {needs}') from error
    made = getattr(optim, _CLASSES[config.state])(list(groups), lr=config.lr, betas=(config.beta1, config.beta2))
    assert isinstance(made, Optimizer)
    return made


def step(optimizer: Optimizer) -> None:
    """Take the optimizer's step. Raises ConfigError where it is to be compiled, and cannot be."""
    # With TORCH_COMPILE_DISABLE=1 a function that must be compiled as a whole, as torchao's, fails unless it is told not to be.
    disabled = torch._dynamo.config.disable
    try:
        with torch.compiler.set_stance("force_eager") if disabled else nullcontext():
            optimizer.step()
    except TorchDynamoException as error:
        line = str(error).strip().partition("\n")[0]
        mend = 'install a C++ compiler, or set TORCH_COMPILE_DISABLE=1 (slower), or choose inner.state = "fp32"'
        raise ConfigError(f"{type(optimizer).__name__} cannot be compiled here ({line}): {mend}") from error


def sizes(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, torch.Size] | None:
    """Return the size of each tensor that a checkpoint has of a parameter's state; None: its moments are not quantized."""
    if not _is_ours(optimizer):
        return None
    found = {"step": torch.Size()}
    for name in _MOMENTS:
        if _is_quantized(optimizer, parameter):
            moment = _zeros(optimizer, parameter, name)
            found |= {f"{name}.{part}": getattr(moment, part).shape for part in _PARTS}
        else:
            found[name] = parameter.shape
    return found


def split(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return a parameter's state with the codes and the scales of quantized moments as tensors of their own."""
    found: dict[str, Any] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        quantized = _is_ours(optimizer) and name in _MOMENTS and _is_quantized(optimizer, parameter)
        found |= {f"{name}.{part}": getattr(value, part) for part in _PARTS} if quantized else {name: value}
    return found


def join(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of which `split` made these tensors, as the optimizer keeps it."""
    if not _is_ours(optimizer) or "step" not in state:
        return dict(state)
    found = {"step": state["step"].cpu()}  # where torchao has it
    for name in _MOMENTS:
        if _is_quantized(optimizer, parameter):
            found[name] = _zeros(optimizer, parameter, name)
            for part in _PARTS:
                getattr(found[name], part).copy_(state[f"{name}.{part}"])
        else:
            found[name] = state[name]
    return found


def _is_ours(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torchao.optim") and type(optimizer).__name__ in _CLASSES.values()


def _is_quantized(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Whether torchao quantizes this parameter's moments."""
    block: int = optimizer.block_size  # type: ignore[attr-defined]
    return parameter.numel() >= _LEAST and parameter.numel() % block == 0


def _zeros(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> Tensor:
    """Return a quantized moment of zeros. The second one has no sign."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    kind = OptimState8bit if type(optimizer).__name__ == "AdamW8bit" else OptimState4bit
    block: int = optimizer.block_size  # type: ignore[attr-defined]
    made = kind.zeros(parameter.shape, name == "exp_avg", block, parameter.device, dtype=parameter.dtype)
    assert isinstance(made, Tensor)
    return made
