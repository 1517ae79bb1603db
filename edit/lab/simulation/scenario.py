"""What is simulated: the fleet, its links, its faults, and the run's own settings; their bounds and their TOML.

Every key but those of `Scenario` is one of run.toml and means what it means there; a key that a simulation has no use for is an
error, unless it says what is the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit.codecs import codec
from edit.config.overrides import set_key
from edit.config.plugins import is_entry
from edit.config.run import RunConfig, build
from edit.errors import ConfigError
from edit.plain_text import parse_toml

__all__ = ["Compute", "Faults", "Hub", "Link", "PeerClass", "Scenario", "Size"]

# By table of run.toml that a simulation obeys: the keys that it does not. Of [penalty], what changes no verdict.
_NOT_SIMULATED = {
    "sync": ("schedule", "time_s", "dylu", "tokens", "alpha"),
    "rounds": (),
    "membership": ("share_losses", "consent"),
    "storage": ("buffer_bytes", "checkpoint_every", "keep_checkpoints"),
    "codec": ("up_decay", "down_decay", "up_residual", "record", "down_residual", "fragments"),
    "penalty": ("options", "temperature", "clip", "norm", "max_share", "weighting", "staleness", "damping"),
}
SHARED = tuple(_NOT_SIMULATED)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value!r}: must be between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How fast peers compute."""

    step_s: float = 1.0  # median seconds per inner step
    sigma: float = 0.0  # of the lognormal spread of the peers' speeds
    jitter: float = 0.0  # of the lognormal spread of one peer's phases of training
    stalls_per_hour: float = 0.0  # slowdowns of one peer, at random
    stall_s: float = 60.0  # their mean length, exponential
    stall_factor: float = 4.0  # how many times longer a step takes meanwhile

    def __post_init__(self) -> None:
        _within("compute.step_s", self.step_s, 1e-6, 1e6)
        _within("compute.sigma", self.sigma, 0, 3)
        _within("compute.jitter", self.jitter, 0, 3)
        _within("compute.stalls_per_hour", self.stalls_per_hour, 0, 1e5)
        _within("compute.stall_s", self.stall_s, 1e-3, 1e7)
        _within("compute.stall_factor", self.stall_factor, 1, 1e4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The peers' links: medians over the peers, with lognormal spreads."""

    up_mbit: float = 1000.0  # Mbit/s to the aggregator
    down_mbit: float = 1000.0  # Mbit/s from the aggregator
    latency_s: float = 0.02  # seconds one way
    sigma: float = 0.0  # of the spread of both rates
    latency_sigma: float = 0.0

    def __post_init__(self) -> None:
        _within("link.up_mbit", self.up_mbit, 1e-3, 1e9)
        _within("link.down_mbit", self.down_mbit, 1e-3, 1e9)
        _within("link.latency_s", self.latency_s, 0, 60)
        _within("link.sigma", self.sigma, 0, 3)
        _within("link.latency_sigma", self.latency_sigma, 0, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. Rates are per peer and hour, exponential; times are exponential, at least a tenth of their mean."""

    failures_per_hour: float = 0.0  # the process dies
    silent: float = 0.0  # share of the failures that only the lease tells
    repair_s: float = 60.0  # mean time until it is started again
    checkpoint_steps: int = 0  # inner steps between a peer's own checkpoints; 0: what it had not contributed is lost
    leaves_per_hour: float = 0.0  # the peer says goodbye
    away_s: float = 3600.0  # mean time until it is back

    def __post_init__(self) -> None:
        _within("faults.failures_per_hour", self.failures_per_hour, 0, 1e5)
        _within("faults.silent", self.silent, 0, 1)
        _within("faults.repair_s", self.repair_s, 0, 1e8)
        _within("faults.checkpoint_steps", self.checkpoint_steps, 0, 1 << 40)
        _within("faults.leaves_per_hour", self.leaves_per_hour, 0, 1e5)
        _within("faults.away_s", self.away_s, 0, 1e8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model."""

    parameters: float = 100e6
    fragments: int = 1  # equal parts of it

    def __post_init__(self) -> None:
        _within("size.parameters", self.parameters, 1, 1e15)
        _within("size.fragments", self.fragments, 1, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The aggregator."""

    gbit_s: float = 0.0  # of its own link, each way, shared in order of arrival; 0: no limit
    merge_s: float = 0.0  # seconds to merge one peer's whole contribution
    commit_s: float = 0.0  # seconds to write a commit

    def __post_init__(self) -> None:
        _within("hub.gbit_s", self.gbit_s, 0, 1e9)
        _within("hub.merge_s", self.merge_s, 0, 1e6)
        _within("hub.commit_s", self.commit_s, 0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerClass:
    """A share of the peers that differ from the others by these factors."""

    share: float
    slower: float = 1.0  # times as long per step
    bandwidth: float = 1.0
    latency: float = 1.0
    failures: float = 1.0
    dies_s: float = 0.0  # when their processes die; 0: they do not
    after_s: float = 60.0  # how long after that they start again

    def __post_init__(self) -> None:
        _within("classes: share", self.share, 0, 1)
        _within("classes: slower", self.slower, 1e-3, 1e4)
        _within("classes: bandwidth", self.bandwidth, 1e-6, 1e4)
        _within("classes: latency", self.latency, 0, 1e4)
        _within("classes: failures", self.failures, 0, 1e4)
        _within("classes: dies_s", self.dies_s, 0, 1e9)
        _within("classes: after_s", self.after_s, 0, 1e8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation."""

    peers: int = 100
    hours: float = 8760.0  # of virtual time, after which an unfinished run ends
    seed: int = 0
    merge: bool = False  # merge small vectors for real, with the verdicts of [penalty]
    damaged: float = 0.0  # share of the contributions that are not finite or a thousand times too long; needs merge
    compute: Compute = field(default_factory=Compute)
    link: Link = field(default_factory=Link)
    faults: Faults = field(default_factory=Faults)
    size: Size = field(default_factory=Size)
    hub: Hub = field(default_factory=Hub)
    classes: tuple[PeerClass, ...] = ()  # peers outside their shares are ordinary
    run: RunConfig = field(default_factory=RunConfig)  # sync, rounds, membership, storage, codec and penalty are obeyed

    def __post_init__(self) -> None:
        _within("peers", self.peers, 1, 200_000)
        _within("hours", self.hours, 1e-6, 1e6)
        _within("seed", self.seed, 0, 2**63 - 1)
        _within("damaged", self.damaged, 0, 1)
        if self.damaged and not self.merge:
            raise ConfigError("damaged has no effect without merge = true; remove it")
        if math.fsum(each.share for each in self.classes) > 1 + 1e-9:
            raise ConfigError("classes: the shares are more than 1 together")
        for name in ("quorum", "start_peers"):
            if (wanted := getattr(self.run.rounds, name)) > self.peers:
                raise ConfigError(f"rounds.{name} = {wanted}: there are {self.peers} peers, so nothing would ever commit")
        _check_simulated(self.run)
        if self.run.sync.groups > self.size.fragments:
            raise ConfigError(f"sync.groups = {self.run.sync.groups}: size.fragments is {self.size.fragments}")

    @property
    def up_bytes(self) -> int:
        """Bytes of one fragment's contribution."""
        return self._fragment_bytes(self.run.codec.up)

    @property
    def down_bytes(self) -> int:
        """Bytes of one fragment's update."""
        return self._fragment_bytes(self.run.codec.down)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all outer parameters, fp32."""
        return 4 * math.ceil(self.size.parameters)

    def _fragment_bytes(self, text: str) -> int:
        return codec(text).encoded_size(math.ceil(self.size.parameters / self.size.fragments))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Scenario:
        """Build from nested mappings. Raises ConfigError as `RunConfig.from_mapping` does."""
        own = {each.name for each in dataclasses.fields(cls)} - {"run", "classes"}
        known = [*own, "classes", *SHARED]
        for key in mapping:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ConfigError(f"{key}: unknown key; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(known)}")
        if "penalty" in mapping and not mapping.get("merge"):
            raise ConfigError("penalty has no effect without merge = true; remove it")
        settings = build(_Own, {key: value for key, value in mapping.items() if key in own}, "")
        return cls(
            **{each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)},
            classes=_classes(mapping.get("classes", ())),
            run=RunConfig.from_mapping({key: value for key, value in mapping.items() if key in SHARED}),
        )

    @classmethod
    def read(cls, path: Path | None, settings: Sequence[str] = ()) -> Scenario:
        """Read a TOML file (None: all defaults), then `KEY=VALUE` settings in TOML's own spelling, as `compute.sigma=0.3`.

        Raises ConfigError that names the file or the setting.
        """
        tables = _tables(path) if path is not None else {}
        for setting in settings:
            set_key(tables, setting)
        try:
            return cls.from_mapping(tables)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}" if path is not None else str(error)) from error


def _check_simulated(run: RunConfig) -> None:
    """Raise ConfigError for a setting that would change nothing, or of which the simulation does not know what it changes."""
    for section, keys in _NOT_SIMULATED.items():
        config = getattr(run, section)
        default = type(config)()
        for key in keys:
            if getattr(config, key) != getattr(default, key):
                raise ConfigError(f"{section}.{key} is not simulated; remove it")
    if run.sync.mix == "lerp":
        raise ConfigError('sync.mix = "lerp" is not simulated; remove it')
    for name, value in (("codec.up", run.codec.up), ("codec.down", run.codec.down), ("penalty.detector", run.penalty.detector)):
        if is_entry(value):
            raise ConfigError(f"{name} = {value!r}: plug-ins are not simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """The scenario's keys but classes; their bounds are checked by `Scenario`."""

    peers: int = 100
    hours: float = 8760.0
    seed: int = 0
    merge: bool = False
    damaged: float = 0.0
    compute: Compute = field(default_factory=Compute)
    link: Link = field(default_factory=Link)
    faults: Faults = field(default_factory=Faults)
    size: Size = field(default_factory=Size)
    hub: Hub = field(default_factory=Hub)


def _classes(tables: object) -> tuple[PeerClass, ...]:
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError("classes: must be a list of tables ([[classes]])")
    for place, table in enumerate(tables):
        if "share" not in table:
            raise ConfigError(f"classes[{place}].share is missing: which share of the peers is it?")
    return tuple(build(PeerClass, table, f"classes[{place}].") for place, table in enumerate(tables))


def _tables(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
