"""One run's configuration, from `run.toml` on the coordinator; peers receive the same values as JSON on joining.

An unknown key, or a key that the rest of the configuration makes ineffective, is a ConfigError that names it (defect T11 of the
EDiT authors' code: settings silently ignored).
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit.config.algorithm import (
    GossipConfig,
    OuterConfig,
    PenaltyConfig,
    RoundsConfig,
    SyncConfig,
    check_together,
)
from edit.config.codec import CODECS, CodecConfig, CodecSpec, FragmentCodec
from edit.config.validation import build, one_of, positive, require, within
from edit.errors import ConfigError
from edit.plain_text import parse_json

__all__ = [
    "CODECS",
    "AggregatorsConfig",
    "CodecConfig",
    "CodecSpec",
    "FragmentCodec",
    "GossipConfig",
    "InnerConfig",
    "MembershipConfig",
    "ModelConfig",
    "OuterConfig",
    "PenaltyConfig",
    "RoundsConfig",
    "RunConfig",
    "ServerConfig",
    "StorageConfig",
    "SwarmConfig",
    "SyncConfig",
    "build",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The section [model]: which model a run trains."""

    # `builtin:gpt`; `hf:MODEL_TYPE`, a causal language model of the transformers package (`hf:llama`); or `entry:NAME`, an
    # entry point of group `edit.models` that each peer's operator has allowed, or any name for a model of the peers' own loops.
    # The coordinator refuses a peer whose model is not the builtin's; of the others the founder says names and shapes.
    name: str = "builtin:gpt"
    # Of builtin:gpt only: transformer blocks, attention heads, size of the residual stream.
    layers: int = 4
    heads: int = 4
    width: int = 128
    # Tokens in a sequence.
    context: int = 128
    # Different tokens; 256 for bytes.
    vocabulary: int = 256
    # Of the transformers configuration or for the entry point; an error for a builtin.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, _, rest = self.name.partition(":")
        require(
            (kind == "builtin" and rest == "gpt")
            or (kind == "hf" and rest.isascii() and rest.replace("-", "_").isidentifier())
            or (kind == "entry" and rest.isidentifier()),
            "model.name",
            self.name,
            "must be builtin:gpt, hf:MODEL_TYPE or entry:NAME",
        )
        for name, high in (("layers", 1024), ("heads", 1024), ("width", 65536), ("context", 1 << 20), ("vocabulary", 1 << 22)):
            within(f"model.{name}", getattr(self, name), 1, high)
        require(self.width % self.heads == 0, "model.width", self.width, f"must be a multiple of model.heads ({self.heads})")
        if kind == "builtin" and self.options:
            raise ConfigError("model.options has no effect with builtin:gpt; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The section [inner]: the inner optimizer (AdamW) of every peer, with linear warm-up and cosine decay."""

    # The learning rate after the warm-up.
    lr: float = 2e-3
    # The learning rate at the end of the run, as a share of lr.
    final_lr_ratio: float = 0.1
    # Inner steps of the warm-up.
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    # Sequences in a micro-batch.
    batch_size: int = 4
    # Micro-batches in an inner step.
    accumulation: int = 1
    # The largest global norm of the gradient; 0: no clipping.
    clip_norm: float = 1.0
    # Use bf16 autocast where the device has it.
    autocast: bool = True

    def __post_init__(self) -> None:
        positive("inner.lr", self.lr)
        within("inner.final_lr_ratio", self.final_lr_ratio, 0, 1)
        within("inner.warmup_steps", self.warmup_steps, 0, 1 << 40)
        within("inner.weight_decay", self.weight_decay, 0, 10)
        within("inner.beta1", self.beta1, 0, 0.9999)
        within("inner.beta2", self.beta2, 0, 0.99999)
        within("inner.batch_size", self.batch_size, 1, 1 << 20)
        within("inner.accumulation", self.accumulation, 1, 1 << 20)
        within("inner.clip_norm", self.clip_norm, 0, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """The section [membership]: how peers show that they are there."""

    # Seconds between two reports of a peer; by default 1 in a swarm.
    heartbeat_s: float = 2.0
    # Seconds of silence after which a peer is lost; at least twice heartbeat_s. By default 3 in a swarm, where the other bounds
    # are shorter, too: a round waits for a peer that was stopped until it is lost.
    lease_s: float = 6.0

    def __post_init__(self) -> None:
        within("membership.heartbeat_s", self.heartbeat_s, 0.05, 3600)
        require(
            self.lease_s >= 2 * self.heartbeat_s,
            "membership.lease_s",
            self.lease_s,
            "must be at least twice membership.heartbeat_s",
        )


MEMBERSHIP_IN_A_SWARM = {"heartbeat_s": 1.0, "lease_s": 3.0}  # the defaults there


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The section [storage]: what an aggregator keeps."""

    # Bytes of contributions in memory: three quarters hold them before they spill to disk, a quarter is for what is on its way.
    buffer_bytes: int = 256 << 20
    # Outer steps between two checkpoints.
    checkpoint_every: int = 20
    # How many checkpoints are kept.
    keep_checkpoints: int = 2
    # How many published updates are kept for peers that missed a commit, also over a restart; with sync.groups, of each group.
    keep_updates: int = 4

    def __post_init__(self) -> None:
        within("storage.buffer_bytes", self.buffer_bytes, 0, 1 << 50)
        within("storage.checkpoint_every", self.checkpoint_every, 1, 1 << 30)
        within("storage.keep_checkpoints", self.keep_checkpoints, 1, 1000)
        within("storage.keep_updates", self.keep_updates, 1, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The section [server]: the coordinator's own addresses; never sent to peers."""

    # HOST:PORT of control and data (mutual TLS).
    listen: str = "127.0.0.1:7700"
    # HOST:PORT where invitations are redeemed.
    enrol_listen: str = "127.0.0.1:7701"
    # Host names or addresses under which peers reach it; the server's certificate names them.
    advertise: tuple[str, ...] = ("127.0.0.1", "localhost")

    def __post_init__(self) -> None:
        for name in ("listen", "enrol_listen"):
            host, _, port = getattr(self, name).rpartition(":")
            require(
                bool(host) and port.isdigit() and int(port) < 65536, f"server.{name}", getattr(self, name), "must be HOST:PORT"
            )
        require(len(self.advertise) > 0, "server.advertise", self.advertise, "must name at least one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorsConfig:
    """The section [aggregators]: over which aggregators the model's fragments are spread.

    Aggregator 0 is the coordinator itself. All have about equal shares of the parameters, in order; the assignment is fixed
    once the run is founded. A further aggregator listens on the port of its address (on a loopback address only there) and has
    no use for the section [server].
    """

    # HOST:PORT of each further aggregator, as peers reach it and its certificate names it.
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            known = bool(host) and port.isdigit() and 0 < int(port) < 65536
            require(known, "aggregators.addresses", address, "must be HOST:PORT, and the port not 0")
        twice = next((each for each in self.addresses if self.addresses.count(each) > 1), None)
        require(twice is None, "aggregators.addresses", twice, "must not be named twice")
        within("aggregators.addresses (their number)", len(self.addresses), 0, 255)

    @property
    def count(self) -> int:
        """The number of aggregators, the coordinator included."""
        return 1 + len(self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """The section [swarm]: the run has no coordinator, but members that agree. It excludes [aggregators] and [server]."""

    # Into how many parts the model is cut, each of which one member owns at a time; fixed once the run is founded.
    parts: int = 4
    # Seconds between two messages of the member that leads.
    heartbeat_s: float = 0.25
    # Seconds of silence after which a member's parts go to another one; at least twice heartbeat_s.
    lease_s: float = 1.0
    # Seconds of silence after which a member has no vote any more.
    forget_s: float = 60.0
    # How members find each other beside the addresses that they know: "dht": by hivemind's DHT; "auto": where it is installed;
    # "addresses": not at all.
    discovery: str = "auto"

    def __post_init__(self) -> None:
        one_of("swarm.discovery", self.discovery, ("auto", "addresses", "dht"))
        within("swarm.parts", self.parts, 1, 1024)
        within("swarm.heartbeat_s", self.heartbeat_s, 0.01, 30)
        within("swarm.lease_s", self.lease_s, 0.02, 60)
        within("swarm.forget_s", self.forget_s, 1, 1e9)
        rule = "must be at least twice swarm.heartbeat_s"
        require(self.lease_s >= 2 * self.heartbeat_s, "swarm.lease_s", self.lease_s, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that all peers of one run share."""

    # Becomes part of the run_id.
    name: str = "run"
    # Of the initial parameters.
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    aggregators: AggregatorsConfig = field(default_factory=AggregatorsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    swarm: SwarmConfig | None = None  # None: the run has a coordinator

    def __post_init__(self) -> None:
        require(
            0 < len(self.name) <= 55 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.name),
            "name",
            self.name,
            "must be 1 to 55 letters (a to z), digits, '-', '_' or '.'",
        )
        within("seed", self.seed, 0, 2**63 - 1)
        check_together(self.sync, self.rounds, self.outer, self.codec)
        if self.aggregators.addresses:
            rule = "must be 0 with aggregators.addresses: each aggregator would count by itself"
            require(self.sync.tokens == 0, "sync.tokens", self.sync.tokens, rule)
            rule = 'must be empty with outer.algorithm = "gossip": there is no aggregator'
            require(self.outer.algorithm == "mean", "aggregators.addresses", self.aggregators.addresses, rule)
        groups, settle = self.sync.groups, self.gossip.settle_every
        rule = f"must be a multiple of sync.groups ({groups}), so that each group has moved as often"
        require(settle % groups == 0, "gossip.settle_every", settle, rule)
        if self.swarm is not None and self.swarm.parts > 1:
            rule = "must be 0 with swarm.parts above 1: each part would count by itself"
            require(self.sync.tokens == 0, "sync.tokens", self.sync.tokens, rule)

    @property
    def kept_updates(self) -> int:
        """The number of published updates that are kept in all: with groups, an update is of one group only."""
        return self.storage.keep_updates * self.sync.groups

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Build from nested mappings. Raises ConfigError for unknown keys, wrong types, bounds and ineffective keys."""
        for section in ("aggregators", "server") if "swarm" in mapping else ():
            if section in mapping:
                raise ConfigError(f"[{section}] has no effect with [swarm], which has no coordinator; remove one of them")
        values, written = dict(mapping), mapping.get("membership", {})
        if "swarm" in mapping and isinstance(written, Mapping):
            values["membership"] = {**MEMBERSHIP_IN_A_SWARM, **written}
        config = build(cls, values, "")
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
            config = cls.from_mapping(tomllib.loads(text))
            rule = "no command runs it yet; edit.local.LocalGossip does, within one process"
            require(config.outer.algorithm == "mean", "outer.algorithm", config.outer.algorithm, rule)
            return config
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: is not TOML: {error}") from error
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read what `to_json` returned. Every key is present there, so ineffective keys are not looked for."""
        try:
            mapping = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"configuration is not JSON: {error}") from error
        if not isinstance(mapping, dict):
            raise ConfigError("configuration must be a JSON object")
        return build(cls, mapping, "")

    def to_json(self) -> str:
        """Return the configuration as peers receive it: everything but the server's own section."""
        values = dataclasses.asdict(self)
        del values["server"]
        return json.dumps(values, sort_keys=True)


def _reject_ineffective(config: RunConfig, mapping: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that is written but has no effect in this combination (T11)."""
    for applies, section, keys, because in _ineffective(config):
        written = sorted(keys & set(mapping.get(section, {})))
        if applies and written:
            raise ConfigError(f"{section}.{written[0]} has no effect with {because}; remove it")


def _ineffective(config: RunConfig) -> Iterator[tuple[bool, str, set[str], str]]:
    """Yield (whether the rule applies, section, keys that then have no effect, because of what)."""
    sync, penalty, outer, rounds = config.sync, config.penalty, config.outer, config.rounds
    of_penalty = {f.name for f in dataclasses.fields(PenaltyConfig)} - {"enabled", "weighting", "staleness", "damping"}
    yield not penalty.enabled, "penalty", of_penalty, "penalty.enabled = false"
    yield penalty.enabled, "penalty", {"weighting"}, "penalty.enabled = true"
    of_level = {"step_power", "relearn", "max_ratio", "max_share"}
    yield penalty.detector == "edit", "penalty", of_level, 'penalty.detector = "edit"'
    yield rounds.merging == "arrivals", "penalty", {"max_share"}, 'rounds.merging = "arrivals"'
    yield rounds.max_staleness == 0, "penalty", {"staleness"}, "rounds.max_staleness = 0"
    yield rounds.merging == "arrivals", "penalty", {"staleness"}, 'rounds.merging = "arrivals" (penalty.damping has)'
    yield rounds.merging == "rounds", "penalty", {"damping"}, 'rounds.merging = "rounds"'
    yield sync.schedule == "steps", "sync", {"time_s"}, 'sync.schedule = "steps"'
    yield sync.groups == 1, "sync", {"pattern"}, "sync.groups = 1"
    yield sync.mode in ("blocking", "forward"), "sync", {"delay"}, f'sync.mode = "{sync.mode}"'
    yield sync.mode != "delayed", "sync", {"mix"}, f'sync.mode = "{sync.mode}"'
    yield sync.mode != "delayed" or sync.mix != "lerp", "sync", {"alpha"}, 'sync.mix other than "lerp"'
    of_gossip = {f.name for f in dataclasses.fields(GossipConfig)}
    yield outer.algorithm == "mean", "gossip", of_gossip, 'outer.algorithm = "mean"'
    of_outer = {f.name for f in dataclasses.fields(OuterConfig)} - {"algorithm"}
    alone = outer.algorithm == "gossip"
    yield alone, "outer", of_outer, 'outer.algorithm = "gossip" (the section [gossip] has)'
    of_downlink = {"down", "down_decay", "down_residual", "record"}
    yield alone, "codec", of_downlink, 'outer.algorithm = "gossip": no update is sent'
    of_optimizer = f'outer.optimizer = "{outer.optimizer}"'
    yield outer.optimizer not in ("nesterov", "delayed_nesterov"), "outer", {"momentum"}, of_optimizer
    yield outer.optimizer not in ("adam", "yogi"), "outer", {"beta1", "beta2", "eps"}, of_optimizer
    yield outer.optimizer != "delayed_nesterov", "outer", {"period", "c"}, of_optimizer
    of_rounds = {"start_peers", "quorum", "floor_s", "ceiling_s", "spread", "wait", "grace_s"}
    yield rounds.merging == "arrivals", "rounds", of_rounds, 'rounds.merging = "arrivals"'
    yield alone, "rounds", of_rounds, 'outer.algorithm = "gossip": there is no round of all peers'
    for direction, choice in (("up", config.codec.uplink), ("down", config.codec.downlink)):
        lossless = f'codec.{direction} = "fp32", which leaves nothing out'
        yield choice.names == {"fp32"}, "codec", {f"{direction}_decay"}, lossless
    up, down = config.codec.uplink, config.codec.downlink
    yield up.names == {"fp32"}, "codec", {"up_residual"}, 'codec.up = "fp32", which leaves nothing out'
    yield up.decay == 0, "codec", {"up_residual"}, "codec.up_decay = 0"
    if config.codec.record in ("", "fp32", "bf16"):  # they leave nothing that is kept
        yield down.names == {"fp32"}, "codec", {"down_residual"}, 'codec.down = "fp32", which leaves nothing out'
        yield down.decay == 0, "codec", {"down_residual"}, "codec.down_decay = 0"
    of_builtin = {"layers", "heads", "width"}
    yield not config.model.name.startswith("builtin:"), "model", of_builtin, f'model.name = "{config.model.name}"'
