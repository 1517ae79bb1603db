"""One run's configuration: frozen, keyword-only, validated values, and their TOML form.

Owns: every setting of a run, its default, its bounds, and the messages for wrong ones. `run.toml` on the coordinator is the
single source; peers receive the same values as JSON on joining. Must not know: files other than the one it is given, the
environment, the network. An unknown key, or a key that the rest of the configuration would make ineffective, is a ConfigError
that names it (defect T11 of the EDiT authors' code: settings silently ignored).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit.errors import ConfigError

__all__ = [
    "CODECS",
    "CodecConfig",
    "InnerConfig",
    "MembershipConfig",
    "ModelConfig",
    "OuterConfig",
    "PenaltyConfig",
    "RoundsConfig",
    "RunConfig",
    "ServerConfig",
    "StorageConfig",
    "SyncConfig",
    "build",
]

CODECS = ("fp32", "bf16", "fp16", "int8")  # those of `edit.codecs`, whose import needs torch; a test holds them together
_T = typing.TypeVar("_T")


def _require(ok: bool, field_name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{field_name} = {value!r}: {rule}")


def _positive(field_name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, field_name, value, "must be a finite number above 0")


def _within(field_name: str, value: float, low: float, high: float) -> None:
    _require(low <= value <= high, field_name, value, f"must be between {low:g} and {high:g}")


def _one_of(field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, field_name, value, f"must be one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model a run trains.

    name: `builtin:gpt`; `hf:MODEL_TYPE`, a causal language model of the transformers package (`hf:llama`); or `entry:NAME`, an
    entry point of group `edit.models` that each peer's operator has allowed. layers, heads and width belong to `builtin:gpt`.
    options: of the transformers configuration or for the entry point; an error for a builtin.
    """

    name: str = "builtin:gpt"
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    vocabulary: int = 256
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, _, rest = self.name.partition(":")
        _require(
            (kind == "builtin" and rest == "gpt")
            or (kind == "hf" and rest.isascii() and rest.replace("-", "_").isidentifier())
            or (kind == "entry" and rest.isidentifier()),
            "model.name",
            self.name,
            "must be builtin:gpt, hf:MODEL_TYPE or entry:NAME",
        )
        for name, high in (("layers", 1024), ("heads", 1024), ("width", 65536), ("context", 1 << 20), ("vocabulary", 1 << 22)):
            _within(f"model.{name}", getattr(self, name), 1, high)
        _require(self.width % self.heads == 0, "model.width", self.width, f"must be a multiple of model.heads ({self.heads})")
        if kind == "builtin" and self.options:
            raise ConfigError("model.options has no effect with builtin:gpt; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The inner optimizer (AdamW) of every peer: its schedule (linear warm-up, then cosine to `lr * final_lr_ratio`).

    batch_size: sequences per micro-batch; accumulation: micro-batches per inner step; clip_norm: global gradient norm, 0 turns
    clipping off; autocast: bf16 autocast where the device has it.
    """

    lr: float = 2e-3
    final_lr_ratio: float = 0.1
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    batch_size: int = 4
    accumulation: int = 1
    clip_norm: float = 1.0
    autocast: bool = True

    def __post_init__(self) -> None:
        _positive("inner.lr", self.lr)
        _within("inner.final_lr_ratio", self.final_lr_ratio, 0, 1)
        _within("inner.warmup_steps", self.warmup_steps, 0, 1 << 40)
        _within("inner.weight_decay", self.weight_decay, 0, 10)
        _within("inner.beta1", self.beta1, 0, 0.9999)
        _within("inner.beta2", self.beta2, 0, 0.99999)
        _within("inner.batch_size", self.batch_size, 1, 1 << 20)
        _within("inner.accumulation", self.accumulation, 1, 1 << 20)
        _within("inner.clip_norm", self.clip_norm, 0, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """When fragments are exchanged and how an update is applied.

    every: H, the inner steps between two exchanges of the same fragment. outer_steps: the run ends after so many outer steps.
    groups: P of Streaming DiLoCo: an outer step exchanges one of P groups of fragments, every H / P inner steps; pattern:
    `sequential` (neighbours) or `strided` (every P-th).
    mode: `blocking`: training waits for the update; `forward`: for the update of a layer, just before that layer's forward;
    `delayed`: the update is applied `delay` inner steps after the contribution; `eager`: training goes on at once from an
    estimate of the update, which is replaced by the update `delay` inner steps later.
    mix: with `delayed`, what becomes of the progress made meanwhile: `replay` puts it onto the new outer parameters, `replace`
    drops it, `lerp` keeps alpha of the local parameters (alpha * local + (1 - alpha) * outer).
    strict: never train on without an outcome, even when the coordinator is away: slower after faults, but an interrupted
    run is the same as one that was not, to the bit.
    """

    every: int = 128
    outer_steps: int = 1000
    groups: int = 1
    pattern: str = "strided"
    mode: str = "blocking"
    delay: int = 1
    mix: str = "replay"
    alpha: float = 0.5
    strict: bool = False

    def __post_init__(self) -> None:
        _within("sync.every", self.every, 1, 1 << 32)
        _within("sync.outer_steps", self.outer_steps, 1, 1 << 40)
        _within("sync.groups", self.groups, 1, 1 << 20)
        _require(self.every % self.groups == 0, "sync.groups", self.groups, f"must divide sync.every ({self.every})")
        _one_of("sync.pattern", self.pattern, ("sequential", "strided"))
        _one_of("sync.mode", self.mode, ("blocking", "forward", "delayed", "eager"))
        _one_of("sync.mix", self.mix, ("replay", "replace", "lerp"))
        _within("sync.alpha", self.alpha, 0, 1)
        _within("sync.delay", self.delay, 1, 1 << 32)
        _require(self.mode != "eager" or self.groups == 1, "sync.groups", self.groups, 'must be 1 with sync.mode = "eager"')
        if self.mode in ("delayed", "eager"):
            _require(
                self.delay <= self.interval,
                "sync.delay",
                self.delay,
                f"must not exceed sync.every / sync.groups ({self.interval}): one contribution is on its way at a time",
            )

    @property
    def interval(self) -> int:
        """Inner steps between two outer steps: H / P."""
        return self.every // self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """The EDiT pseudo-gradient penalty (arXiv 2412.07210, section 3.3); `enabled = false` gives DiLoCo's mean.

    alpha: EMA rate of the norm statistics; delta: z-score above which a norm is anomalous; observations: W, norms to see before
    the detector judges; temperature: T of the softmax over -G/T; clip: phi, the largest norm of a merged fragment, 0 turns it
    off; norm: what enters the softmax (`raw` G, `per_sqrt_step` G/sqrt(inner steps), `relative` G / median of the round);
    idle_ratio: a norm below this share of the round's median is a free rider, weight 0 (0 turns it off);
    weighting: with the penalty off, `uniform` or `tokens`.
    """

    enabled: bool = True
    alpha: float = 0.02
    delta: float = 3.0
    observations: int = 10
    temperature: float = 1.0
    clip: float = 10.0
    norm: str = "relative"
    idle_ratio: float = 0.01
    weighting: str = "uniform"

    def __post_init__(self) -> None:
        _within("penalty.alpha", self.alpha, 1e-6, 1)
        _positive("penalty.delta", self.delta)
        _within("penalty.observations", self.observations, 1, 1 << 30)
        _positive("penalty.temperature", self.temperature)
        _within("penalty.clip", self.clip, 0, 1e12)
        _one_of("penalty.norm", self.norm, ("raw", "per_sqrt_step", "relative"))
        _within("penalty.idle_ratio", self.idle_ratio, 0, 0.5)
        _one_of("penalty.weighting", self.weighting, ("uniform", "tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer optimizer. optimizer: sgd | nesterov | adam | yogi; momentum for nesterov; beta1, beta2, eps for adam, yogi.

    Short runs want a small or no momentum (see docs); EDiT's paper uses 0.8 / 0.85, DiLoCo's 0.7 / 0.9.
    """

    optimizer: str = "nesterov"
    lr: float = 0.8
    momentum: float = 0.85
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _one_of("outer.optimizer", self.optimizer, ("sgd", "nesterov", "adam", "yogi"))
        _positive("outer.lr", self.lr)
        _within("outer.momentum", self.momentum, 0, 0.9999)
        _within("outer.beta1", self.beta1, 0, 0.9999)
        _within("outer.beta2", self.beta2, 0, 0.99999)
        _positive("outer.eps", self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """up, down: codec of the contributions and of the published update, by name (see `edit.codecs`)."""

    up: str = "int8"
    down: str = "bf16"

    def __post_init__(self) -> None:
        _one_of("codec.up", self.up, CODECS)
        _one_of("codec.down", self.down, CODECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """When a round opens and closes.

    start_peers: live peers before the first round opens; quorum: contributors without which a round never commits;
    floor_s, ceiling_s: bounds of the deadline; spread: k in median + k * MAD of each peer's measured times;
    grace_s: with the quorum in and every peer that is still missing overdue, how much longer to wait.
    """

    start_peers: int = 1
    quorum: int = 1
    floor_s: float = 5.0
    ceiling_s: float = 600.0
    spread: float = 6.0
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        _within("rounds.start_peers", self.start_peers, 1, 1 << 20)
        _within("rounds.quorum", self.quorum, 1, 1 << 20)
        _positive("rounds.floor_s", self.floor_s)
        _positive("rounds.ceiling_s", self.ceiling_s)
        _require(
            self.floor_s <= self.ceiling_s,
            "rounds.floor_s",
            self.floor_s,
            f"must not exceed rounds.ceiling_s ({self.ceiling_s})",
        )
        _within("rounds.spread", self.spread, 0, 1000)
        _within("rounds.grace_s", self.grace_s, 0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """heartbeat_s: how often a peer reports; lease_s: silence after which it is lost."""

    heartbeat_s: float = 2.0
    lease_s: float = 6.0

    def __post_init__(self) -> None:
        _within("membership.heartbeat_s", self.heartbeat_s, 0.05, 3600)
        _require(
            self.lease_s >= 2 * self.heartbeat_s,
            "membership.lease_s",
            self.lease_s,
            "must be at least twice membership.heartbeat_s",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """What the aggregator keeps, where.

    buffer_bytes: contributions held in memory before they spill to disk; checkpoint_every: outer steps between checkpoints;
    keep_checkpoints: how many; keep_updates: published updates kept for peers that missed a commit.
    """

    buffer_bytes: int = 256 << 20
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    keep_updates: int = 4

    def __post_init__(self) -> None:
        _within("storage.buffer_bytes", self.buffer_bytes, 0, 1 << 50)
        _within("storage.checkpoint_every", self.checkpoint_every, 1, 1 << 30)
        _within("storage.keep_checkpoints", self.keep_checkpoints, 1, 1000)
        _within("storage.keep_updates", self.keep_updates, 1, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The coordinator's own addresses; never sent to peers.

    listen: HOST:PORT of control and data (mutual TLS); enrol_listen: HOST:PORT where invitations are redeemed;
    advertise: host names or addresses that peers dial and that the server's certificate names.
    """

    listen: str = "127.0.0.1:7700"
    enrol_listen: str = "127.0.0.1:7701"
    advertise: tuple[str, ...] = ("127.0.0.1", "localhost")

    def __post_init__(self) -> None:
        for name in ("listen", "enrol_listen"):
            host, _, port = getattr(self, name).rpartition(":")
            _require(
                bool(host) and port.isdigit() and int(port) < 65536, f"server.{name}", getattr(self, name), "must be HOST:PORT"
            )
        _require(len(self.advertise) > 0, "server.advertise", self.advertise, "must name at least one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that all peers of one run share. `name` becomes part of the run_id; `seed` seeds the initial parameters."""

    name: str = "run"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        _require(
            0 < len(self.name) <= 55 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.name),
            "name",
            self.name,
            "must be 1 to 55 letters (a to z), digits, '-', '_' or '.'",
        )
        _within("seed", self.seed, 0, 2**63 - 1)
        if self.sync.mode == "eager":  # which foresees an outer step, so it must be linear in the pseudo-gradient
            rule = 'must be one of sgd, nesterov with sync.mode = "eager"'
            _require(self.outer.optimizer in ("sgd", "nesterov"), "outer.optimizer", self.outer.optimizer, rule)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Build from nested mappings. Raises ConfigError for unknown keys, wrong types, bounds and ineffective keys."""
        config = build(cls, mapping, "")
        _reject_ineffective(config, mapping)
        return config

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """Read `run.toml`. Raises ConfigError that names the file and the field."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); `edit-coordinator init` writes one") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not UTF-8 text") from error
        try:
            return cls.from_mapping(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: is not TOML: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Parse what `to_json` wrote. Every key is present there, so ineffective keys are not looked for."""
        try:
            mapping = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"configuration is not JSON: {error}") from error
        if not isinstance(mapping, dict):
            raise ConfigError("configuration must be a JSON object")
        return build(cls, mapping, "")

    def to_json(self) -> str:
        """The configuration as peers receive it: everything but the server's own section."""
        values = dataclasses.asdict(self)
        del values["server"]
        return json.dumps(values, sort_keys=True)


def build(cls: type[_T], mapping: Mapping[str, Any], prefix: str) -> _T:
    """A configuration dataclass from nested tables; prefix: stands before its fields in messages, as `sync.`.

    Raises ConfigError for unknown keys and wrong types, and whatever the class itself raises.
    """
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            known = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{prefix}{key}: unknown key; {known}")
    return cls(**{key: _convert(value, hints[key], f"{prefix}{key}") for key, value in mapping.items()})


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: must be a table ([{name}]), not {type(value).__name__}")
        return build(typing.cast(type[Any], hint), value, f"{name}.")
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name}: must be a list of strings")
        return tuple(value)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float, bool)) for v in value.values()):
            raise ConfigError(f"{name}: must be a table of plain values")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: must be {hint.__name__}, not {type(value).__name__} ({value!r})")
    return value


def _reject_ineffective(config: RunConfig, mapping: Mapping[str, Any]) -> None:
    """T11: a key that was written but can have no effect in this combination is an error."""
    momentum_keys, moment_keys = {"momentum"}, {"beta1", "beta2", "eps"}
    ineffective: list[tuple[bool, str, set[str], str]] = [
        (
            not config.penalty.enabled,
            "penalty",
            {f.name for f in dataclasses.fields(PenaltyConfig)} - {"enabled", "weighting"},
            "penalty.enabled = false",
        ),
        (config.penalty.enabled, "penalty", {"weighting"}, "penalty.enabled = true"),
        (config.sync.groups == 1, "sync", {"pattern"}, "sync.groups = 1"),
        (config.sync.mode in ("blocking", "forward"), "sync", {"delay"}, f'sync.mode = "{config.sync.mode}"'),
        (config.sync.mode != "delayed", "sync", {"mix"}, f'sync.mode = "{config.sync.mode}"'),
        (config.sync.mode != "delayed" or config.sync.mix != "lerp", "sync", {"alpha"}, 'sync.mix other than "lerp"'),
        (config.outer.optimizer != "nesterov", "outer", momentum_keys, f'outer.optimizer = "{config.outer.optimizer}"'),
        (config.outer.optimizer in ("sgd", "nesterov"), "outer", moment_keys, f'outer.optimizer = "{config.outer.optimizer}"'),
        (
            not config.model.name.startswith("builtin:"),
            "model",
            {"layers", "heads", "width"},
            f'model.name = "{config.model.name}"',
        ),
    ]
    for applies, section, keys, because in ineffective:
        written = sorted(keys & set(mapping.get(section, {})))
        if applies and written:
            raise ConfigError(f"{section}.{written[0]} has no effect with {because}; remove it")
