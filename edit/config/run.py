"""One run's configuration, from `run.toml` on the coordinator; peers receive the same values as JSON on joining.

An unknown key, or a key that the rest of the configuration makes ineffective, is a ConfigError that names it (defect T11 of the
EDiT authors' code: settings silently ignored).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from edit.config.algorithm import (
    GossipConfig,
    OuterConfig,
    PenaltyConfig,
    RoundsConfig,
    SyncConfig,
    check_together,
)
from edit.config.audit import AuditConfig
from edit.config.auto import choose_outer
from edit.config.average import AverageConfig
from edit.config.codec import CODECS, CodecConfig, CodecSpec, FragmentCodec
from edit.config.gaussian import gaussian_epsilon, gaussian_multiplier
from edit.config.governance import GovernanceConfig
from edit.config.overrides import with_settings
from edit.config.plugins import check_pins, is_entry
from edit.config.privacy import PrivacyConfig
from edit.config.robust import RULES, RobustConfig
from edit.config.secagg import SecaggConfig
from edit.config.validation import Between, Matches, OneOf, Positive, build, check_bounds, require, within
from edit.errors import ConfigError
from edit.plain_text import parse_json, parse_toml

__all__ = [
    "CODECS",
    "TORCH_OPTIMIZERS",
    "AggregatorsConfig",
    "AuditConfig",
    "AverageConfig",
    "CodecConfig",
    "CodecSpec",
    "FragmentCodec",
    "GossipConfig",
    "GovernanceConfig",
    "InnerConfig",
    "MembershipConfig",
    "ModelConfig",
    "OuterConfig",
    "PenaltyConfig",
    "PrivacyConfig",
    "RobustConfig",
    "RoundsConfig",
    "RunConfig",
    "SecaggConfig",
    "ServerConfig",
    "StorageConfig",
    "SwarmConfig",
    "SyncConfig",
    "build",
    "ineffective",
    "is_address",
    "is_host",
]


def _names_a_model(text: str) -> bool:
    kind, _, rest = text.partition(":")
    return (
        (kind == "builtin" and rest == "gpt")
        or (kind == "hf" and rest.isascii() and rest.replace("-", "_").isidentifier())
        or (kind == "entry" and rest.isidentifier())
    )


TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim that a configuration may name; no other name from the wire is looked up there."""
_LEAST_TEMPERATURE = 0.5  # of the penalty with masks
_AN_OPTIMIZER = f"must be adamw, muon, sgd, torch:NAME with one of {', '.join(TORCH_OPTIMIZERS)}, or entry:NAME"


def _names_an_optimizer(text: str) -> bool:
    kind, _, name = text.partition(":")
    return text in ("adamw", "muon", "sgd") or (kind == "torch" and name in TORCH_OPTIMIZERS) or is_entry(text)


_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_PORT = re.compile(r"[0-9]{1,5}")
_MOST_HOSTS = 16  # as many addresses as an invitation has
_AN_ADDRESS = "must be HOST:PORT, with an IPv6 address in brackets"
_ADVERTISED = f"must be 1 to {_MOST_HOSTS} host names or addresses, each without http:// and without a port"


def is_host(text: str) -> bool:
    """Return whether a text is a host name, or an address, an IPv6 one in brackets or not; a certificate can name each."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return len(text) <= 253 and _HOST_NAME.fullmatch(text) is not None
    return True


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    return is_host(host) and bracketed == (":" in host) and _PORT.fullmatch(port) is not None and int(port) < 65536


def _are_hosts(texts: tuple[str, ...]) -> bool:
    return 0 < len(texts) <= _MOST_HOSTS and all(map(is_host, texts))


def _is_address_if_any(text: str) -> bool:
    return not text or is_address(text)


def _names_a_run(text: str) -> bool:
    return 0 < len(text) <= 55 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The section [model]: which model a run trains."""

    # `builtin:gpt`; `hf:MODEL_TYPE`, a causal language model of the transformers package (`hf:llama`); or `entry:NAME`, an
    # entry point of group `edit.models` that each peer's operator has allowed, or any name for loops of your own.
    # With builtin:gpt the coordinator refuses a peer with another model; else the founder's names and shapes count.
    name: Annotated[str, Matches(_names_a_model, "must be builtin:gpt, hf:MODEL_TYPE or entry:NAME")] = "builtin:gpt"
    # Transformer blocks of builtin:gpt.
    layers: Annotated[int, Between(1, 1024)] = 4
    # Attention heads of builtin:gpt; must divide width.
    heads: Annotated[int, Between(1, 1024)] = 4
    # Size of the residual stream of builtin:gpt.
    width: Annotated[int, Between(1, 65536)] = 128
    # Tokens in a sequence.
    context: Annotated[int, Between(1, 1 << 20)] = 128
    # Number of different tokens; 256 for bytes.
    vocabulary: Annotated[int, Between(1, 1 << 22)] = 256
    # Fields of the transformers configuration, or options for the entry point; an error for builtin:gpt.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds("model.", self)
        require(self.width % self.heads == 0, "model.width", self.width, f"must be a multiple of model.heads ({self.heads})")
        if self.name.startswith("builtin:") and self.options:
            raise ConfigError("model.options has no effect with builtin:gpt; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The section [inner]: the inner optimizer of every peer, with linear warm-up and cosine decay."""

    # `adamw`; `muon`: Muon for the matrices, AdamW for embeddings, norms and the head (MuLoCo, arXiv 2505.23725); `sgd`, with
    # Nesterov momentum; `torch:NAME`, another class of torch.optim; `entry:NAME`, a plug-in that each peer's operator allows.
    optimizer: Annotated[str, Matches(_names_an_optimizer, _AN_OPTIMIZER)] = "adamw"
    # The format of adamw's two moments: `fp32`, 8 bytes per parameter; `int8`, about 2, or `int4`, about 1, by torchao (the
    # extra lowbit, docs/operating.md).
    state: Annotated[str, OneOf("fp32", "int8", "int4")] = "fp32"
    # Further arguments of torch:NAME or entry:NAME.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    # Momentum of muon and sgd.
    momentum: Annotated[float, Between(0, 0.9999)] = 0.95
    # The learning rate after the warm-up.
    lr: Annotated[float, Positive()] = 2e-3
    # The learning rate at the end of the run, as a share of lr.
    final_lr_ratio: Annotated[float, Between(0, 1)] = 0.1
    # Inner steps of the warm-up.
    warmup_steps: Annotated[int, Between(0, 1 << 40)] = 50
    # Weight decay of matrices.
    weight_decay: Annotated[float, Between(0, 10)] = 0.1
    # AdamW's first beta.
    beta1: Annotated[float, Between(0, 0.9999)] = 0.9
    # AdamW's second beta.
    beta2: Annotated[float, Between(0, 0.99999)] = 0.95
    # Sequences in a micro-batch.
    batch_size: Annotated[int, Between(1, 1 << 20)] = 4
    # Micro-batches in an inner step.
    accumulation: Annotated[int, Between(1, 1 << 20)] = 1
    # A peer's batch may grow to this many times batch_size x accumulation: after an exchange the peer doubles it, by taking
    # more micro-batches, if its gradients fail the norm test. 1: it does not grow. Above 1, accumulation must be at least 2.
    batch_growth: Annotated[int, Between(1, 1024)] = 1
    # eta of the norm test (arXiv 2406.13936): it fails where the variance of an inner step's gradient, measured between its
    # micro-batches, exceeds eta^2 times the gradient's square.
    norm_test: Annotated[float, Between(0.01, 1)] = 0.8
    # The largest global norm of the gradient; 0: no clipping.
    clip_norm: Annotated[float, Between(0, 1e9)] = 1.0
    # Use bf16 autocast where the device has it.
    autocast: bool = True

    def __post_init__(self) -> None:
        check_bounds("inner.", self)
        rule = f"must be at least 2 with inner.batch_growth = {self.batch_growth}: variance is measured between micro-batches"
        require(self.batch_growth == 1 or self.accumulation > 1, "inner.accumulation", self.accumulation, rule)
        for name in ("lr", "weight_decay") if self.optimizer.startswith("torch:") else ("lr",):
            if name in self.options:
                raise ConfigError(f"inner.options.{name} has no effect; set inner.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """The section [membership]: how peers show that they are there."""

    # Seconds between two reports of a peer; by default 1 in a swarm.
    heartbeat_s: Annotated[float, Between(0.05, 3600)] = 2.0
    # Seconds of silence after which a peer is lost; at least twice heartbeat_s. By default 3 in a swarm. A
    # round waits for a peer that was stopped until it is lost.
    lease_s: float = 6.0
    # Whether observers and other peers see a peer's training loss and metrics. The operator always sees them; nobody sees those
    # that a peer hides with --hide-loss.
    share_losses: bool = False
    # Whether a peer takes part only once its site has consented to this configuration (`edit-peer consent`).
    consent: bool = False

    def __post_init__(self) -> None:
        check_bounds("membership.", self)
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
    buffer_bytes: Annotated[int, Between(0, 1 << 50)] = 256 << 20
    # Outer steps between two checkpoints.
    checkpoint_every: Annotated[int, Between(1, 1 << 30)] = 20
    # Number of checkpoints that are kept. With audit.keep_contributions also older ones, as far as a replay of those outer
    # steps needs them: each stop and the end of a run add a checkpoint.
    keep_checkpoints: Annotated[int, Between(1, 1000)] = 2
    # Number of published updates that are kept for peers that missed a commit, also after a restart; with sync.groups, of each
    # group.
    keep_updates: Annotated[int, Between(1, 1000)] = 4

    def __post_init__(self) -> None:
        check_bounds("storage.", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The section [server]: the coordinator's own addresses; never sent to peers."""

    # HOST:PORT of control and data (mutual TLS).
    listen: Annotated[str, Matches(is_address, _AN_ADDRESS)] = "127.0.0.1:7700"
    # HOST:PORT where invitations are redeemed.
    enrol_listen: Annotated[str, Matches(is_address, _AN_ADDRESS)] = "127.0.0.1:7701"
    # Host names or addresses under which peers reach it; the server's certificate names them.
    advertise: Annotated[tuple[str, ...], Matches(_are_hosts, _ADVERTISED)] = ("127.0.0.1", "localhost")
    # HOST:PORT of /metrics (for Prometheus), /healthz and /readyz, as plain HTTP without a password; empty: none.
    # Losses are included only with membership.share_losses.
    metrics_listen: Annotated[str, Matches(_is_address_if_any, f"{_AN_ADDRESS}, or empty")] = ""

    def __post_init__(self) -> None:
        check_bounds("server.", self)


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
            known = is_address(address) and int(address.rpartition(":")[2]) > 0
            require(known, "aggregators.addresses", address, f"{_AN_ADDRESS}, and the port not 0")
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

    # Number of parts that the model is cut into, each owned by one member at a time; fixed once the run is founded.
    parts: Annotated[int, Between(1, 1024)] = 4
    # Seconds between two messages of the leader.
    heartbeat_s: Annotated[float, Between(0.01, 30)] = 0.25
    # Seconds of silence after which a member's parts go to another one; at least twice heartbeat_s.
    lease_s: Annotated[float, Between(0.02, 60)] = 1.0
    # Seconds of silence after which a member has no vote any more.
    forget_s: Annotated[float, Between(1, 1e9)] = 60.0
    # How members find each other in addition to the addresses that they know: "dht": by hivemind's DHT; "auto": by the DHT if
    # hivemind is installed; "addresses": in no other way.
    discovery: Annotated[str, OneOf("auto", "addresses", "dht")] = "auto"
    # Number of members, beside the owner of a part, that compute each of its updates themselves from the signed contributions:
    # it counts only if all get the same bits. In a smaller swarm, all other members. 0: owners are believed.
    verify: Annotated[int, Between(0, 6)] = 0
    # With verify: how many seconds the verifying members have once a quorum holds an update; then other members verify it.
    verify_s: Annotated[float, Between(0.1, 3600)] = 60.0

    def __post_init__(self) -> None:
        check_bounds("swarm.", self)
        rule = "must be at least twice swarm.heartbeat_s"
        require(self.lease_s >= 2 * self.heartbeat_s, "swarm.lease_s", self.lease_s, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that all peers of one run share."""

    # The beginning of the run's id.
    name: Annotated[str, Matches(_names_a_run, "must be 1 to 55 letters (a to z), digits, '-', '_' or '.'")] = "run"
    # Seeds the initial parameters, and each peer's order of its data.
    seed: Annotated[int, Between(0, 2**63 - 1)] = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    robust: RobustConfig = field(default_factory=RobustConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    governance: GovernanceConfig = field(default_factory=GovernanceConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secagg: SecaggConfig = field(default_factory=SecaggConfig)
    aggregators: AggregatorsConfig = field(default_factory=AggregatorsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    swarm: SwarmConfig | None = None  # None: the run has a coordinator
    # The plug-ins that these settings name, as "KIND:NAME" = "VERSION sha256:HASH"; `--allow` writes it.
    plugins: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds("", self)
        check_pins(self.plugins)
        check_together(self.sync, self.rounds, self.outer, self.codec)
        self._check_robust()
        rule = 'must be none with outer.algorithm = "gossip": there are no outer parameters that all peers share'
        require(self.outer.algorithm == "mean" or self.average.kind == "none", "average.kind", self.average.kind, rule)
        self._check_audit()
        self._check_governance()
        self._check_secagg()
        self._check_privacy()
        rule = f'must be 1 with privacy.level = "{self.privacy.level}": the noise is for the batch that was accounted for'
        require(
            not self.privacy.of_examples or self.inner.batch_growth == 1, "inner.batch_growth", self.inner.batch_growth, rule
        )
        rule = 'must be false with outer.algorithm = "gossip": partners ask for none; policy.toml of each site may'
        gossips = self.outer.algorithm == "gossip"
        require(not gossips or not self.membership.consent, "membership.consent", True, rule)
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
        if self.swarm is not None and self.swarm.verify:
            self._check_verified(self.swarm.verify)

    def _check_verified(self, verify: int) -> None:
        rule = 'must be 0 with outer.algorithm = "gossip": nobody owns a part of the model'
        require(self.outer.algorithm == "mean", "swarm.verify", verify, rule)
        rule = f"must be 0 with swarm.verify = {verify}: a signature is of one round"
        require(self.rounds.max_staleness == 0, "rounds.max_staleness", self.rounds.max_staleness, rule)

    def _check_audit(self) -> None:
        """Raise ConfigError where no log can be kept."""
        if not self.audit.enabled:
            return
        if self.swarm is not None:
            rule = 'must be false with outer.algorithm = "gossip": there are no outer steps that all members take'
            require(self.outer.algorithm == "mean", "audit.enabled", True, rule)
            rule = "must be 0 with audit.enabled in a swarm: a signature is of one round"
            require(self.rounds.max_staleness == 0, "rounds.max_staleness", self.rounds.max_staleness, rule)
        if kept := self.audit.keep_contributions:
            rule = "must be 0 with secagg.enabled: a masked contribution is nothing that can be merged once more"
            require(not self.secagg.enabled, "audit.keep_contributions", kept, rule)
            rule = (
                'must be 0 with privacy.level = "organisation": who merges once more would need the noise, which nobody keeps'
            )
            require(not self.privacy.of_organisations, "audit.keep_contributions", kept, rule)
            most = self.storage.checkpoint_every * (self.storage.keep_checkpoints - 1)
            product = "storage.checkpoint_every x (storage.keep_checkpoints - 1)"
            rule = f"must be at most {most} ({product}): a replay begins at a checkpoint"
            require(kept <= most, "audit.keep_contributions", kept, rule)

    def _check_governance(self) -> None:
        """Raise ConfigError where nobody keeps the approvals."""
        if not self.governance.enabled:
            return
        who = self.governance.approvers
        rule = "must be empty with [swarm]: its configuration is fixed when it is founded"
        require(self.swarm is None, "governance.approvers", who, rule)
        rule = "must be empty with aggregators.addresses: each aggregator keeps a log, and approvals stand in one"
        require(not self.aggregators.addresses, "governance.approvers", who, rule)
        rule = "needs audit.enabled = true: approvals are entries of the audit log"
        require(self.audit.enabled, "governance.approvers", who, rule)

    def _check_secagg(self) -> None:
        """Raise ConfigError where contributions cannot be masked."""
        if not self.secagg.enabled:
            return
        least, on = self.secagg.min_peers, "with secagg.enabled"
        rule = f"must be none {on}: a robust rule compares contributions, which nobody sees"
        require(self.robust.rule == "none", "robust.rule", self.robust.rule, rule)
        compared = "cannot be compared with those of the anchors" if self.robust.anchored else "cannot be scored"
        rule = f"must be none {on}: a contribution that nobody sees {compared}"
        require(self.robust.trust == "none", "robust.trust", self.robust.trust, rule)
        for key, value, wanted, why in (
            ("swarm", "" if self.swarm is None else "[swarm]", "", "there is no coordinator that opens the sum"),
            ("aggregators.addresses", self.aggregators.addresses, (), "one set of peers is opened, by one aggregator"),
            ("outer.algorithm", self.outer.algorithm, "mean", "a swap shows each partner the other's parameters"),
            ("outer.direction", self.outer.direction, "mean", "only a sum can be opened"),
            ("outer.correct", self.outer.correct, "none", "a corrected contribution is another one"),
            ("outer.merger", self.outer.merger, "mean", "only a sum can be opened"),
            ("rounds.merging", self.rounds.merging, "rounds", "an arrival is no sum of several"),
            ("rounds.max_staleness", self.rounds.max_staleness, 0, "a mask belongs to one round"),
            ("penalty.weighting", self.penalty.weighting, "uniform", "nobody can check what a peer multiplies itself by"),
            ("sync.strict", self.sync.strict, False, "a peer that starts again has no keys of its round"),
        ):
            shown = f"must be {toml_value(wanted) if isinstance(wanted, str | int) and wanted != '' else 'absent'}"
            require(value == wanted, key, value, f"{shown} {on}: {why}")
        require(self.sync.mode != "eager", "sync.mode", self.sync.mode, f"must not be eager {on}: a step depends on all peers")
        chosen = sorted(pattern for pattern, each in self.codec.fragments.items() if each.up)
        rule = f"must not choose up {on}, which has a grid of its own"
        require(not chosen, f'codec.fragments."{"".join(chosen[:1])}"', "up", rule)
        rule = f"must be relative or raw {on}: norms are relative to those of the outer step before"
        require(self.penalty.norm != "per_sqrt_step", "penalty.norm", self.penalty.norm, rule)
        rule = f"must be at least {_LEAST_TEMPERATURE} {on}: who says a norm of 0 would weigh more than 7.4 times as much"
        weighted = self.penalty.enabled and self.penalty.temperature < _LEAST_TEMPERATURE
        require(not weighted, "penalty.temperature", self.penalty.temperature, rule)
        plugin = f"must not be a plug-in {on}: it is asked before the sum is open, and for all fragments at once"
        require(not is_entry(self.penalty.detector), "penalty.detector", self.penalty.detector, plugin)
        fewest = f"must be at least secagg.min_peers ({least}) {on}"
        require(self.rounds.quorum >= least, "rounds.quorum", self.rounds.quorum, fewest)
        most = f"must not exceed secagg.max_peers ({self.secagg.max_peers})"
        require(self.rounds.quorum <= self.secagg.max_peers, "rounds.quorum", self.rounds.quorum, most)

    def _check_privacy(self) -> None:
        """Raise ConfigError where organisations cannot be protected: all that leaves must follow from the noisy sum."""
        privacy = self.privacy
        if not privacy.of_organisations:
            return
        on = 'with privacy.level = "organisation"'
        for key, value, wanted, why in (
            ("swarm", "" if self.swarm is None else "[swarm]", "", "there is no coordinator that is trusted to add the noise"),
            ("aggregators.addresses", self.aggregators.addresses, (), "the norm of a contribution is of all its fragments"),
            ("secagg.enabled", self.secagg.enabled, False, "nobody can clip a masked contribution"),
            ("robust.rule", self.robust.rule, "none", "its coefficients depend on all contributions, without a bound"),
            ("robust.trust", self.robust.trust, "none", "the weights of all depend on other contributions, without a bound"),
            ("penalty.enabled", self.penalty.enabled, False, "verdicts and weights depend on the others' contributions"),
            ("penalty.weighting", self.penalty.weighting, "uniform", "no contribution may count for more than the clip"),
            ("outer.algorithm", self.outer.algorithm, "mean", "a swap shows each partner the other's parameters"),
            ("outer.direction", self.outer.direction, "mean", "only a sum has a bounded change"),
            ("outer.correct", self.outer.correct, "none", "a corrected contribution is another one"),
            ("outer.merger", self.outer.merger, "mean", "only a sum has a bounded change"),
            ("rounds.merging", self.rounds.merging, "rounds", "an arrival would need all the noise for itself"),
            ("rounds.max_staleness", self.rounds.max_staleness, 0, "each organisation counts once in an outer step"),
            ("membership.share_losses", self.membership.share_losses, False, "losses have no noise"),
            ("inner.batch_growth", self.inner.batch_growth, 1, "a batch that grows tells of the data without noise"),
        ):
            shown = f"must be {toml_value(wanted) if isinstance(wanted, str | int) and wanted != '' else 'absent'}"
            require(value == wanted, key, value, f"{shown} {on}: {why}")
        require(self.sync.mode != "eager", "sync.mode", self.sync.mode, f"must not be eager {on}: a step depends on all peers")
        n0, which = self.denominator, "privacy.denominator" if privacy.denominator else "rounds.start_peers"
        rule = f"must be below {n0**-1.1:.3g} = {n0} ** -1.1 ({which} = {n0}) {on}: else it may give one of them away entirely"
        require(privacy.delta < n0**-1.1, "privacy.delta", privacy.delta, rule)
        if not privacy.noise_multiplier:
            steps = self.sync.outer_steps
            fits = gaussian_multiplier(privacy.epsilon_max, privacy.delta, steps)
            rule = (
                f"must be given {on}: {max(math.ceil(fits * 100) / 100, 0.3):g} fits sync.outer_steps = {steps} and "
                f"privacy.epsilon_max = {privacy.epsilon_max:g}; an attempt that is aborted counts, too"
            )
            raise ConfigError(f"privacy.noise_multiplier = 0: {rule}")
        once = gaussian_epsilon(privacy.delta, 1, privacy.noise_multiplier)
        rule = f"is below {once:.4g}, which one outer step costs with privacy.noise_multiplier = {privacy.noise_multiplier:g}"
        require(once <= privacy.epsilon_max, "privacy.epsilon_max", privacy.epsilon_max, rule)

    @property
    def denominator(self) -> int:
        """n0: by what the noisy sum of organisations' contributions is divided."""
        return self.privacy.denominator or self.rounds.start_peers

    def _check_robust(self) -> None:
        """Raise ConfigError where a robust rule cannot be kept with the other settings."""
        robust = self.robust
        if not robust.enabled:
            return
        of_trust = robust.rule == "none"
        with_rule = f'with robust.trust = "{robust.trust}"' if of_trust else f'with robust.rule = "{robust.rule}"'
        for key, value, wanted, why in (
            ("outer.algorithm", self.outer.algorithm, "mean", "a gossiping peer sees one other only"),
            ("outer.direction", self.outer.direction, "mean", "lengths and directions are the rule's"),
            ("outer.correct", self.outer.correct, "none", "a corrected contribution is another one"),
            ("outer.merger", self.outer.merger, "mean", "there is one way to combine"),
            ("rounds.merging", self.rounds.merging, "rounds", "an arrival has nothing to be compared with"),
        ):
            require(value == wanted, key, value, f"must be {wanted} {with_rule}: {why}")
        require(self.sync.mode != "eager", "sync.mode", self.sync.mode, f"must not be eager {with_rule}: no estimate is near")
        if robust.of_model:
            rule = 'must be empty with robust.scope = "model": each aggregator would see its own fragments only'
            require(not self.aggregators.addresses, "aggregators.addresses", self.aggregators.addresses, rule)
            rule = "must be fragment with [swarm]: the owner of a part sees its own fragments only"
            require(self.swarm is None, "robust.scope", "model", rule)
        fewest = f"must be at least {robust.least} {with_rule} and robust.hostile = {robust.hostile}, or rounds are rolled back"
        require(self.rounds.quorum >= robust.least, "rounds.quorum", self.rounds.quorum, fewest)
        if robust.scored:
            self._check_scored()

    def _check_scored(self) -> None:
        """Raise ConfigError where contributions cannot be scored."""
        rule = "must not be loss with [swarm]: there is no coordinator that keeps contributions for a scorer, and its scores"
        require(self.swarm is None, "robust.trust", "loss", rule)
        rule = "must not be loss with aggregators.addresses: each aggregator has a part of a contribution, and a loss is of all"
        require(not self.aggregators.addresses, "robust.trust", "loss", rule)

    def check_swaps(self) -> None:
        """Raise ConfigError where hosts of a swarm cannot run these settings with outer.algorithm = "gossip"."""
        with_gossip = 'with outer.algorithm = "gossip"'
        rule = "needs the section [swarm]: it has no coordinator"
        require(self.swarm is not None, "outer.algorithm", self.outer.algorithm, rule)
        assert self.swarm is not None
        rule = f"must be 1 {with_gossip}: a swap is of the whole model, and nobody owns a part of it"
        require(self.swarm.parts == 1, "swarm.parts", self.swarm.parts, rule)
        rule = f"must be 1 {with_gossip} in a swarm: a settling is an outer step of all fragments"
        require(self.sync.groups == 1, "sync.groups", self.sync.groups, rule)
        rule = f"must be blocking {with_gossip} in a swarm: what was computed before a settling has no use after it"
        require(self.sync.mode == "blocking", "sync.mode", self.sync.mode, rule)
        rule = f"must be uniform {with_gossip} in a swarm: a partner would say itself how much it weighs"
        require(self.penalty.enabled or self.penalty.weighting == "uniform", "penalty.weighting", self.penalty.weighting, rule)

    @property
    def kept_updates(self) -> int:
        """The number of published updates that are kept in all: with groups, an update is of one group only."""
        return self.storage.keep_updates * self.sync.groups

    @property
    def derived(self) -> Sequence[tuple[str, str]]:
        """What follows from the settings and a user should know who begins the run: names and texts."""
        said, sync = [], self.sync
        if sync.milestones:
            planned = ", ".join(f"{outer_steps} with H {every}" for outer_steps, every in sync.stretches)
            inner_steps = sync.inner_steps_before(sync.outer_steps)
            said.append(("steps", f"{sync.outer_steps} outer steps: {planned}; {inner_steps} inner steps"))
        if self.outer.chosen:
            said.append(("outer", self.outer.chosen))
        return said

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Build from nested mappings. Raises ConfigError for unknown keys, wrong types, bounds and ineffective keys."""
        for section in ("aggregators", "server") if "swarm" in mapping else ():
            if section in mapping:
                raise ConfigError(f"[{section}] has no effect with [swarm], which has no coordinator; remove one of them")
        values, written = dict(mapping), mapping.get("membership", {})
        if "swarm" in mapping and isinstance(written, Mapping):
            values["membership"] = {**MEMBERSHIP_IN_A_SWARM, **written}
        if _leaves_outer_to_auto(mapping):
            values["outer"] = {**mapping.get("outer", {}), "preset": "auto"}
        config = build(cls, values, "")
        auto, rule = config.outer.preset == "auto", 'is written by outer.preset = "auto"; remove it'
        require((auto and config.swarm is not None) or not config.outer.chosen, "outer.chosen", config.outer.chosen, rule)
        _reject_ineffective(config, mapping)
        return config._with_outer_chosen() if auto and not config.outer.chosen else config

    def _with_outer_chosen(self) -> RunConfig:
        """Return the configuration with what `outer.preset = "auto"` chooses: so it is in the digest, and never changes."""
        sync = self.sync
        choice = choose_outer(
            outer_steps=sync.outer_steps,
            groups=sync.groups,
            every=sync.usual_every(self.outer.mean_steps),
            peers=self.rounds.start_peers,
        )
        outer = dataclasses.replace(
            self.outer, optimizer=choice.optimizer, lr=choice.lr, momentum=choice.momentum, chosen=choice.why
        )
        return dataclasses.replace(self, outer=outer)

    @classmethod
    def from_toml(cls, path: Path, settings: Sequence[str] = ()) -> RunConfig:
        """Read `run.toml` with these settings, `SECTION.KEY=VALUE`, in it. Raises ConfigError that names file and field."""
        return cls.from_text(cls.bytes_of(path), path, settings)

    @staticmethod
    def bytes_of(path: Path) -> bytes:
        """Return what `from_text` takes of a `run.toml`. Raises ConfigError that names the file."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); `edit-coordinator init` writes one") from error

    @classmethod
    def from_text(cls, data: bytes, name: object, settings: Sequence[str] = ()) -> RunConfig:
        """Read the bytes of a `run.toml`, with these settings in it. Raises ConfigError that begins with `name`."""
        try:
            config = cls.from_mapping(parse_toml(with_settings(data.decode(), settings)))
            if config.outer.algorithm == "gossip":
                config.check_swaps()
            start = config.rounds.start_peers
            rule = f"must not exceed rounds.start_peers ({start}), or the first round opens and never commits"
            require(config.rounds.quorum <= start, "rounds.quorum", config.rounds.quorum, rule)
            return config
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: is not UTF-8 text") from error
        except ValueError as error:
            raise ConfigError(f"{name}: is not TOML: {error}") from error
        except RecursionError:
            raise ConfigError(f"{name}: is nested too deeply") from None
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

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
        for section, key, default in _LATER:  # where they are not used, it is what it was before there were any
            table = values.get(section, {}) if section else values
            if key in table and table[key] == default:
                del table[key]
        return json.dumps(values, sort_keys=True)


_OF_ANY_OPTIMIZER = {"algorithm", "direction", "merger", "merger_options"}


def _leaves_outer_to_auto(mapping: Mapping[str, Any]) -> bool:
    """Whether `outer.preset` is "auto" by default: of the outer optimizer nothing is written, and contributions have rounds."""
    outer, rounds = mapping.get("outer", {}), mapping.get("rounds", {})
    if not isinstance(outer, Mapping) or not isinstance(rounds, Mapping):
        return False  # `build` says so
    mean = outer.get("algorithm", "mean") == "mean" and rounds.get("merging", "rounds") == "rounds"
    return mean and outer.keys() <= _OF_ANY_OPTIMIZER


_LATER: tuple[tuple[str, str, object], ...] = (
    ("membership", "share_losses", False),
    ("membership", "consent", False),
    ("", "plugins", {}),
    ("inner", "optimizer", "adamw"),
    ("inner", "state", "fp32"),
    ("inner", "options", {}),
    ("inner", "momentum", 0.95),
    ("inner", "batch_growth", 1),
    ("inner", "norm_test", 0.8),
    ("", "robust", dataclasses.asdict(RobustConfig())),
    ("robust", "trust", "none"),
    ("robust", "anchors", ()),
    ("robust", "scope", "fragment"),
    ("", "average", dataclasses.asdict(AverageConfig())),
    ("", "audit", dataclasses.asdict(AuditConfig())),
    ("audit", "keep_contributions", 0),
    ("audit", "cosign", True),
    ("", "governance", dataclasses.asdict(GovernanceConfig())),
    ("", "privacy", dataclasses.asdict(PrivacyConfig())),
    ("", "secagg", dataclasses.asdict(SecaggConfig())),
    ("outer", "options", {}),
    ("outer", "preset", "manual"),
    ("outer", "chosen", ""),
    ("outer", "momentum_warmup", 0),
    ("outer", "momentum_restarts", ()),
    ("outer", "mean_steps", 0),
    ("outer", "correlation", 0.0),
    ("sync", "milestones", ()),
    ("outer", "gap_penalty", 1.0),
    ("outer", "momentum_clip", 0.0),
    ("outer", "merger", "mean"),
    ("outer", "merger_options", {}),
    ("penalty", "options", {}),
    ("privacy", "denominator", 0),
    ("privacy", "accept_noise", False),
)


def ineffective(config: RunConfig, mapping: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (section, key) of every key that is written but has no effect in this combination."""
    for rule, written in _ineffective(config, mapping):
        yield from ((rule.section, key) for key in written)


def _ineffective(config: RunConfig, mapping: Mapping[str, Any]) -> Iterator[tuple[NoEffect, list[str]]]:
    for rule in NO_EFFECT:
        written = sorted(set(rule.keys) & set(mapping.get(rule.section, {})))
        if written and rule.applies(config):
            yield rule, written


def _reject_ineffective(config: RunConfig, mapping: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that is written but has no effect in this combination (T11)."""
    for rule, written in _ineffective(config, mapping):
        raise ConfigError(f"{rule.section}.{written[0]} has no effect with {rule.because(config)}; remove it")


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Keys of a section that mean nothing while another setting has one of some values."""

    section: str
    keys: Collection[str]
    # The other setting, as `sync.mode`, and those values; None: any.
    setting: str
    values: tuple[str | int | bool, ...] | None
    # What the message says behind the setting and its value.
    note: str = ""
    # What it says instead of the setting and its value.
    instead: str = ""
    # What must hold beside; `beside` says it in words.
    also: Callable[[RunConfig], bool] = lambda config: True
    beside: str = ""

    def _value(self, config: RunConfig) -> Any:
        section, _, key = self.setting.partition(".")
        return getattr(getattr(config, section), key)

    def applies(self, config: RunConfig) -> bool:
        """Return whether the keys mean nothing in this configuration."""
        return (self.values is None or self._value(config) in self.values) and self.also(config)

    def because(self, config: RunConfig) -> str:
        """Return what makes them so, as run.toml has it: `sync.mode = "blocking"`."""
        return self.instead or f"{self.setting} = {toml_value(self._value(config))}{self.note}"


def toml_value(value: str | float | bool) -> str:
    """Return a plain value as run.toml has it."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _keys(section: type[Any], *others: str) -> frozenset[str]:
    """All settings of a section but these."""
    return frozenset(each.name for each in dataclasses.fields(section)) - set(others)


def _nothing_left_out(direction: str) -> Callable[[RunConfig], bool]:
    """The condition that all fragments are sent in fp32."""
    return lambda config: getattr(config.codec, f"{direction}link").names == {"fp32"}


def _keeps_no_record(config: RunConfig) -> bool:
    """Whether `codec.record` leaves nothing that is kept."""
    return config.codec.record in ("", "fp32", "bf16")


_OF_ROUNDS = ("start_peers", "quorum", "floor_s", "ceiling_s", "spread", "wait", "grace_s")
_NOT_LERP = 'sync.mix other than "lerp"'
_LOSSLESS = ", which leaves nothing out"
_ALL_FP32 = "for all fragments"
_RECORD = "unless `codec.record` has scales"

NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect("audit", ("keep_contributions",), "audit.enabled", (False,)),
    NoEffect("inner", {"options"}, "inner.optimizer", ("adamw", "muon", "sgd")),
    NoEffect("inner", {"momentum"}, "inner.optimizer", ("adamw",)),
    NoEffect("inner", {"state"}, "inner.optimizer", ("muon", "sgd")),
    NoEffect("inner", {"beta1", "beta2"}, "inner.optimizer", ("sgd",)),
    NoEffect("inner", {"norm_test"}, "inner.batch_growth", (1,)),
    NoEffect("inner", {"weight_decay"}, "inner.optimizer", ("torch:Rprop",)),
    NoEffect(
        "inner",
        {"momentum", "beta1", "beta2", "state"},
        "inner.optimizer",
        None,
        also=lambda config: ":" in config.inner.optimizer,
        beside="of torch: and entry:",
    ),
    NoEffect("penalty", _keys(PenaltyConfig, "enabled", "weighting", "staleness", "damping"), "penalty.enabled", (False,)),
    NoEffect("penalty", {"weighting"}, "penalty.enabled", (True,)),
    NoEffect("penalty", {"step_power", "relearn", "max_ratio", "max_share"}, "penalty.detector", ("edit",)),
    NoEffect("penalty", {"max_share"}, "rounds.merging", ("arrivals",)),
    NoEffect("penalty", {"temperature", "norm", "max_share", "weighting"}, "robust.rule", RULES[1:]),
    NoEffect("penalty", {"temperature", "norm", "max_share", "weighting"}, "robust.trust", ("anchors", "loss")),
    NoEffect("robust", _keys(RobustConfig, "rule", "trust", "anchors", "scope"), "robust.rule", ("none",)),
    NoEffect(
        "robust",
        {"scope"},
        "robust.rule",
        ("none",),
        also=lambda config: config.robust.trust == "none",
        beside="unless `robust.trust` is anchors or loss",
    ),
    NoEffect("robust", {"anchors"}, "robust.trust", ("none", "loss")),
    NoEffect("robust", {"hostile", "mixing", "equalise"}, "robust.rule", ("clip",)),
    NoEffect("robust", {"mixing", "equalise"}, "robust.rule", ("median", "trimmed_mean")),
    NoEffect("robust", {"scope"}, "robust.rule", ("median", "trimmed_mean"), note=", which goes element by element"),
    NoEffect("robust", {"radius"}, "robust.rule", tuple(rule for rule in RULES[1:] if rule != "centered_clip")),
    NoEffect("audit", {"cosign"}, "audit.enabled", (False,)),
    NoEffect(
        "audit",
        {"cosign"},
        "audit.enabled",
        (True,),
        instead="[swarm]: each entry is signed, and every member keeps the log",
        also=lambda config: config.swarm is not None,
        beside="with `[swarm]`",
    ),
    NoEffect("privacy", _keys(PrivacyConfig, "level"), "privacy.level", ("none",)),
    NoEffect("privacy", {"denominator", "accept_noise"}, "privacy.level", ("example",)),
    NoEffect("privacy", {"sampling", "unit"}, "privacy.level", ("organisation",)),
    NoEffect("secagg", _keys(SecaggConfig, "enabled"), "secagg.enabled", (False,)),
    NoEffect("codec", {"up"}, "secagg.enabled", (True,), note=", which has a grid of its own"),
    NoEffect("average", {"decay"}, "average.kind", ("none", "last")),
    NoEffect("average", {"last"}, "average.kind", ("none", "ema")),
    NoEffect("penalty", {"staleness"}, "rounds.max_staleness", (0,)),
    NoEffect("penalty", {"staleness"}, "rounds.merging", ("arrivals",), note=" (penalty.damping has)"),
    NoEffect("penalty", {"damping"}, "rounds.merging", ("rounds",)),
    NoEffect("sync", {"time_s"}, "sync.schedule", ("steps",)),
    NoEffect("sync", {"pattern"}, "sync.groups", (1,)),
    NoEffect("sync", {"delay"}, "sync.mode", ("blocking", "forward")),
    NoEffect("sync", {"mix"}, "sync.mode", ("blocking", "forward", "eager")),
    NoEffect("sync", {"alpha"}, "sync.mode", ("blocking", "forward", "eager"), instead=_NOT_LERP),
    NoEffect("sync", {"alpha"}, "sync.mix", ("replay", "replace"), instead=_NOT_LERP),
    NoEffect("gossip", _keys(GossipConfig), "outer.algorithm", ("mean",)),
    NoEffect("outer", _keys(OuterConfig, "algorithm"), "outer.algorithm", ("gossip",), note=" (the section [gossip] has)"),
    NoEffect(
        "codec",
        {"down", "down_decay", "down_residual", "record"},
        "outer.algorithm",
        ("gossip",),
        note=": no update is sent",
    ),
    NoEffect(
        "outer",
        {"optimizer", "lr", "momentum"},
        "outer.preset",
        ("auto",),
        note=", which chooses them",
        also=lambda config: not config.outer.chosen,
    ),
    NoEffect("outer", {"momentum"}, "outer.optimizer", ("sgd", "adam", "yogi")),
    NoEffect(
        "outer",
        {"momentum_warmup", "momentum_restarts"},
        "outer.optimizer",
        ("sgd", "adam", "yogi", "delayed_nesterov"),
    ),
    NoEffect("outer", {"mean_steps"}, "outer.optimizer", ("co2", "adam", "yogi", "delayed_nesterov")),
    NoEffect("outer", {"correlation"}, "outer.optimizer", ("sgd", "co2", "adam", "yogi", "delayed_nesterov")),
    NoEffect("outer", {"beta1", "beta2", "eps"}, "outer.optimizer", ("sgd", "nesterov", "co2", "delayed_nesterov")),
    NoEffect("outer", {"period", "c"}, "outer.optimizer", ("sgd", "nesterov", "co2", "adam", "yogi")),
    NoEffect(
        "outer",
        {"gap_penalty", "momentum_clip"},
        "outer.optimizer",
        ("sgd", "nesterov", "adam", "yogi", "delayed_nesterov"),
    ),
    NoEffect(
        "outer",
        {
            "momentum",
            "momentum_warmup",
            "momentum_restarts",
            "mean_steps",
            "correlation",
            "beta1",
            "beta2",
            "eps",
            "period",
            "c",
            "gap_penalty",
            "momentum_clip",
        },
        "outer.optimizer",
        None,
        also=lambda config: is_entry(config.outer.optimizer),
        beside="of entry:",
    ),
    NoEffect("outer", {"options"}, "outer.optimizer", ("sgd", "nesterov", "co2", "adam", "yogi", "delayed_nesterov")),
    NoEffect("outer", {"merger_options"}, "outer.merger", ("mean",)),
    NoEffect(
        "outer",
        {"direction", "correct"},
        "outer.merger",
        None,
        also=lambda config: is_entry(config.outer.merger),
        beside="of entry:",
    ),
    NoEffect("penalty", {"options"}, "penalty.detector", ("level", "edit")),
    NoEffect("swarm", {"verify_s"}, "swarm.verify", (0,)),
    NoEffect("rounds", _OF_ROUNDS, "rounds.merging", ("arrivals",)),
    NoEffect("rounds", _OF_ROUNDS[1:], "outer.algorithm", ("gossip",), note=": there is no round of all peers"),
    NoEffect("codec", {"up_decay"}, "codec.up", ("fp32",), note=_LOSSLESS, also=_nothing_left_out("up"), beside=_ALL_FP32),
    NoEffect(
        "codec", {"down_decay"}, "codec.down", ("fp32",), note=_LOSSLESS, also=_nothing_left_out("down"), beside=_ALL_FP32
    ),
    NoEffect("codec", {"up_residual"}, "codec.up", ("fp32",), note=_LOSSLESS, also=_nothing_left_out("up"), beside=_ALL_FP32),
    NoEffect("codec", {"up_residual"}, "codec.up_decay", (0,)),
    NoEffect(
        "codec",
        {"down_residual"},
        "codec.down",
        ("fp32",),
        note=_LOSSLESS,
        also=lambda config: _nothing_left_out("down")(config) and _keeps_no_record(config),
        beside=f"{_ALL_FP32}, {_RECORD}",
    ),
    NoEffect("codec", {"down_residual"}, "codec.down_decay", (0,), also=_keeps_no_record, beside=_RECORD),
    NoEffect(
        "model",
        {"layers", "heads", "width"},
        "model.name",
        None,
        also=lambda config: not config.model.name.startswith("builtin:"),
        beside="of hf: and entry:",
    ),
)
