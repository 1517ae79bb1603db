"""Models of the transformers package: from a run's `[model]` to a configuration, a model, and a folder for `from_pretrained`.

What `hf:MODEL_TYPE` and its options mean, for peers and coordinator alike. Only classes inside transformers are ever used: no
code from a model folder, nothing from a hub, no pickle. transformers is imported by the first call that needs it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edit.config.run import ModelConfig
from edit.errors import ConfigError
from edit.plain_text import parse_json

__all__ = ["PREFIX", "build", "configuration", "first_difference", "last_line", "save"]

PREFIX = "hf:"
INSTALL = "pip install 'edit-localsgd[hf]'"
DTYPES = ("float32", "bfloat16")
LENGTHS = ("max_position_embeddings", "max_seq_len")
DECODER = "is_decoder"  # without it BERT and its kin see later tokens
AFTER_PADDING = frozenset(  # their positions count from the one after the padding token's number
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
IDLE = frozenset(  # fields that change nothing in training a causal language model
    {"architectures", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "output_hidden_states"}
    | {"problem_type", "return_dict", "transformers_version", "use_cache"}
)
UNCOMPARED = IDLE | {"dtype", "initializer_range", "bos_token_id", "eos_token_id", DECODER}


def configuration(model: ModelConfig) -> Any:
    """Return the transformers configuration that the run's `[model]` means; `context` and `vocabulary` are set on it.

    Options are fields of that configuration: plain values, or a table or a list as JSON text. Raises ConfigError for an unknown
    model type, an unknown or ineffective option, and a value that the architecture refuses.
    """
    model_type = model.name.removeprefix(PREFIX)
    cls = _configuration_class(model_type)
    options = _canonical(cls, model_type, model.options)
    values = {**_sizes(cls, model_type, model, options), **options}
    if DECODER in _names(cls):
        values = {DECODER: True, **values}
        if values[DECODER] is not True:
            raise ConfigError(f"model.options.{DECODER}: must be true: else hf:{model_type} sees the tokens that it predicts")
    values |= {name: None for name in TOKEN_IDS if _outside(cls, name, model.vocabulary) and name not in options}
    try:
        return cls(**values)
    except Exception as error:  # a library's validation raises many kinds
        raise ConfigError(f"model.options: not a configuration of hf:{model_type}: {last_line(error)}") from error


def build(config: Any, seed: int) -> nn.Module:
    """Return a causal language model of this configuration, on the CPU; its initial values follow from `seed`.

    The global random state is as before. Raises ConfigError when transformers cannot build it.
    """
    transformers = _transformers()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # head counts that do not divide, a missing kernel package, ...
        raise ConfigError(f"model.options: hf:{config.model_type} cannot be built: {last_line(error)}") from error
    return model


def first_difference(mine: Any, theirs: Any) -> tuple[str, Any, Any] | None:
    """Return (name, mine, theirs) of the first field that matters to training and differs, or None.

    mine, theirs: configurations of one class of transformers.
    """
    ours, others = mine.to_dict(), theirs.to_dict()
    for name in _fields(type(mine)):
        if name not in UNCOMPARED and ours.get(name) != others.get(name):
            return name, ours.get(name), others.get(name)
    return None


def save(model: ModelConfig, parameters: Mapping[str, Tensor], out: Path) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads: the configuration, and these weights in fp32.

    Args:
        model: the run's `[model]`.
        parameters: every trainable tensor, whole, by its name in the transformers model; buffers too if they were exchanged.
        out: the folder; it is created.

    Raises ConfigError when the run's model is not an `hf:` one, or the tensors are not its weights (a run of adapters, say);
    OSError and SafetensorError when the folder cannot be written.
    """
    if not model.name.startswith(PREFIX):
        raise ConfigError(f'--format hf: only for runs whose model.name is hf:MODEL_TYPE; this one trains "{model.name}"')
    config = configuration(model)
    config.dtype = torch.float32
    built = build(config, 0)
    own: dict[str, Tensor] = {**dict(built.named_buffers()), **dict(built.named_parameters())}
    if (odd := _misfit(own, [name for name, _ in built.named_parameters()], parameters)) is not None:
        raise ConfigError(
            f"--format hf: the run's parameters are not the weights of {model.name}: see {odd}; a run that exchanges only "
            "adapters, or freezes weights, is exported with --format safetensors"
        )
    with torch.no_grad():
        for name, tensor in parameters.items():
            own[name].copy_(tensor)
    built.save_pretrained(out)  # type: ignore[operator]


def _misfit(own: Mapping[str, Tensor], needed: Sequence[str], given: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that is missing, unknown, or of another shape, or None."""
    odd = (name for name in [*given, *needed] if name not in own or name not in given or own[name].shape != given[name].shape)
    return next(odd, None)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"hf: models need transformers ({error}): {INSTALL}") from error


def _configuration_class(model_type: str) -> Any:
    _transformers()
    names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in names:
        near = difflib.get_close_matches(model_type, names, n=1)
        known = f"did you mean hf:{near[0]}?" if near else "see the model types of transformers' AutoModelForCausalLM"
        raise ConfigError(f"model.name = 'hf:{model_type}': no causal language model of transformers; {known}")
    cls = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[model_type]
    if not cls.__module__.startswith("transformers."):
        raise ConfigError(f"model.name = 'hf:{model_type}': {cls.__module__} is not part of transformers")
    if "vocab_size" not in _names(cls):
        raise ConfigError(
            f"model.name = 'hf:{model_type}': is made of several models; name the text model alone, often hf:{model_type}_text"
        )
    return cls


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _names(cls: Any) -> dict[str, str]:
    """Return every name that an option may have, with the field it stands for."""
    names = {name: name for name in _fields(cls) if not name.startswith("_")}
    names |= {alias: field for alias, field in cls.attribute_map.items() if field in names}
    if "rope_parameters" in names:
        names["rope_theta"] = "rope_theta"  # transformers puts it into rope_parameters
    return names


def _canonical(cls: Any, model_type: str, options: Mapping[str, str | int | float | bool]) -> dict[str, Any]:
    names, given = _names(cls), dict[str, Any]()
    for key, value in options.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise ConfigError(
                f"model.options.{key}: no field of hf:{model_type}" + (f"; did you mean {near[0]}?" if near else "")
            )
        field = names[key]
        if field == "vocab_size":
            raise ConfigError(f"model.options.{key} has no effect; set model.vocabulary")
        if field in IDLE:
            raise ConfigError(f"model.options.{key} has no effect on training; remove it")
        if field in given:
            raise ConfigError(f"model.options.{key} is given twice, under another name of {field}")
        if field == "dtype" and value not in DTYPES:
            raise ConfigError(f"model.options.dtype = {value!r}: must be one of {', '.join(DTYPES)}")
        given[field] = _parsed(key, value)
    return given


def _parsed(key: str, value: str | int | float | bool) -> Any:
    """Return a table or a list that is written as JSON text; any other value as it is. Raises ConfigError."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise ConfigError(f"model.options.{key}: not JSON ({error})") from error
    _check_plain(key, parsed)
    return parsed


def _check_plain(key: str, value: Any) -> None:
    """Raise ConfigError where a nested table names code, or a place to fetch it from."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name.startswith("_") or name in ("auto_map", "attn_implementation", "experts_implementation"):
                raise ConfigError(f"model.options.{key}: {name} is not allowed in it")
            _check_plain(key, inner)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(key, inner)


def _sizes(cls: Any, model_type: str, model: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(cls)
    values: dict[str, Any] = {names["vocab_size"]: model.vocabulary}
    field = next((names[name] for name in LENGTHS if name in names), None)
    if field is None:  # no position table: any length
        return values
    least, why = model.context, f"model.context ({model.context})"
    if model_type in AFTER_PADDING:
        padding = options.get("pad_token_id", cls.pad_token_id)
        least, why = model.context + padding + 1, f"model.context + {padding + 1}, the position of the first token"
    if (length := options.get(field, least)) < least:
        raise ConfigError(f"model.options.{field} = {length}: must be at least {why}")
    return {**values, field: length}


def _outside(cls: Any, name: str, vocabulary: int) -> bool:
    """Return whether the architecture's default for a special token is no token of this vocabulary."""
    default = getattr(cls, name, None)
    return isinstance(default, int) and not 0 <= default < vocabulary


def last_line(error: Exception) -> str:
    """Return the last line of what a library's error says: the one that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
