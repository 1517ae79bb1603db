"""`hf:` models: a causal language model of transformers that takes (tokens, targets) and returns the mean loss.

The operator's model folder (`--model-folder`) must agree with the run; a peer that founds the run starts from its weights.
Parameter names are those of transformers, so that a daemon and a user's own loop can train the same model together.
"""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edit.config.run import ModelConfig
from edit.errors import ConfigError
from edit.integrations.huggingface import PREFIX, configuration, first_difference, last_line
from edit.integrations.huggingface import build as build_hf
from edit.plain_text import parse_json, printable

__all__ = ["build"]

_log = logging.getLogger(__name__)
_NOT_READ = (".bin", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".gguf")  # weights in other formats, some of them code


def build(model: ModelConfig, seed: int, folder: Path | None) -> nn.Module:
    """Return the run's `hf:` model on the CPU; forward(tokens, targets), both (B, T) int64, is the mean loss in nats per token.

    folder: config.json and, if there, weights as .safetensors, which then replace those that follow from `seed`.

    Raises ConfigError when the folder does not fit the run, has weights in another format only, or some that are not finite.
    """
    config = configuration(model)
    if folder is not None:
        _check_folder(folder, model, config)
    built = _load(folder, config) if folder is not None and _has_weights(folder) else build_hf(config, seed)
    _refuse_foresight(built, model)
    return _with_loss(built)


def _refuse_foresight(module: nn.Module, model: ModelConfig) -> None:
    """Raise ConfigError for a model whose prediction depends on later tokens: it would learn to copy what it is to predict."""
    half = min(model.context // 2, 8)
    if half == 0:
        return
    tokens = torch.arange(2 * half).remainder(model.vocabulary).repeat(2, 1)
    tokens[1, half:] = (tokens[1, half:] + model.vocabulary // 2).remainder(model.vocabulary)
    # RWKV writes into its parameters at a change between training and evaluation.
    probed = copy.deepcopy(module) if hasattr(module.config, "rescale_every") else module
    training = module.training
    probed.eval()
    try:
        with torch.no_grad():
            logits: Tensor = probed(input_ids=tokens, use_cache=False).logits.float()
    except Exception as error:  # more experts per token than experts, head sizes that do not divide, ...
        raise ConfigError(f"model.options: {model.name} cannot compute with these: {last_line(error)}") from error
    finally:
        probed.train(training)
    change, largest = (logits[0, :half] - logits[1, :half]).abs().max(), logits.abs().max()
    exact = next(module.parameters()).dtype == torch.float32  # else a mixture of experts may round in another order
    if float(change) > (1e-4 if exact else 2e-2) * float(largest):
        why = "its predictions depend on later tokens, so it cannot learn to predict the next one"
        raise ConfigError(f"model.name = {model.name!r}: {why}")


def _with_loss(module: nn.Module) -> nn.Module:
    """Return `module` with another forward. A wrapper module would change the name of every parameter."""
    module.forward = types.MethodType(_mean_loss, module)
    return module


def _mean_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    output: Any = type(module).forward(module, input_ids=tokens, use_cache=False)
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())
    balance: Tensor | None = getattr(output, "aux_loss", None)  # of a mixture of experts, with output_router_logits
    if balance is not None:
        coefficient: Any = getattr(module.config, "router_aux_loss_coef", 0.0)
        loss = loss + coefficient * balance
    return loss


def _check_folder(folder: Path, model: ModelConfig, config: Any) -> None:
    path = folder / "config.json"
    try:
        written = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--model-folder {folder}: {path.name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"--model-folder {folder}: {path.name} is not JSON ({error})") from error
    found = written.get("model_type") if isinstance(written, dict) else None
    if found != config.model_type:
        raise ConfigError(f"--model-folder {folder}: holds a model of type {found}, the run trains {model.name}")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"--model-folder {folder}: holds an adapter; give the folder of a whole model")
    try:
        theirs = type(config).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a library's validation raises many kinds
        raise ConfigError(f"--model-folder {folder}: {path.name} is not valid: {str(error).splitlines()[-1]}") from error
    if (difference := first_difference(config, theirs)) is not None:
        name, ours, others = difference
        key = "model.vocabulary" if name == "vocab_size" else f"model.options.{name}"
        raise ConfigError(
            f"--model-folder {folder}: {name} is {others!r} there and {ours!r} in the run; "
            f"give another folder, or set {key} in run.toml"
        )


def _has_weights(folder: Path) -> bool:
    """Whether there are weights to read. Raises ConfigError where all that are there are in other formats."""
    if any(folder.glob("*.safetensors")):
        return True
    if other := sorted(path.name for path in folder.iterdir() if path.name.endswith(_NOT_READ)):
        raise ConfigError(
            f"--model-folder {folder}: {printable(other[0])} is not read; convert the weights to .safetensors "
            "(transformers: save_pretrained), or remove them to begin with those that follow from the run's seed"
        )
    _log.info("no weights in %s: they follow from the run's seed", folder)
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and reports of what it loads: an error says it in one line."""
    from transformers.utils import logging as theirs

    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


def _load(folder: Path, config: Any) -> nn.Module:
    import transformers

    try:
        with _quiet():
            module, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=config.dtype or torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, by name
            )
    except Exception as error:  # truncated files and others: many kinds
        raise ConfigError(f"--model-folder {folder}: the weights cannot be loaded: {last_line(error)}") from error
    fits = f"--model-folder {folder}: weights do not fit {PREFIX}{config.model_type}"
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise ConfigError(f"{fits}: {printable(name)} is {list(found)} there and {list(expected)} in the run")
    for what in ("missing_keys", "unexpected_keys"):
        if report[what]:
            raise ConfigError(f"{fits}: {what[:-5]} {printable(min(report[what]))}")
    for name, tensor in module.named_parameters():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"--model-folder {folder}: {name} is not finite (NaN or Inf); give weights that are")
    result: nn.Module = module.train()
    return result
