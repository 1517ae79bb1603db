"""The methods to compare: each a preset's name or a run.toml, with settings behind it.

`diloco`, `diloco outer.lr=0.9 outer.momentum=0.4`, `my/run.toml sync.every=100`. Settings of the harness have the section
`compare`: `compare.warmup` (the share of the steps that is data-parallel before the peers train alone), `compare.mu_x`,
`compare.mu_y` (of gpa), `compare.topk`, `compare.chunk`, `compare.decay` (of demo-optimizer).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edit.config.overrides import set_key
from edit.config.presets import PRESETS, dropped, preset, warmup
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.plain_text import parse_toml

__all__ = ["DEFAULT_EVERY", "Length", "Method", "read_method", "trial_length"]

DEFAULT_EVERY = 30
"""H of the presets where no other is asked for, and of each trial whose method exchanges at every step."""

_TAKE_OUTER_STEPS = ("exchange", "one-replica")

_HARNESS = ("warmup", "mu_x", "mu_y", "topk", "chunk", "decay")
_WHOLE = {"chunk": 181, "topk": 181**2}  # from 1 to this: a place in a block is sent as an int16
_OF_RUN = ("sync.outer_steps", "sync.tokens", "seed", "rounds.start_peers", "rounds.quorum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """What all methods have in common."""

    peers: int
    # Inner steps of each peer.
    steps: int
    # H of the presets; a run.toml has its own, and so has a method with sync.every behind its name.
    every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method, ready for every seed."""

    # As it was asked for.
    name: str
    # See `edit.config.presets.Preset.trains`.
    trains: str
    # run.toml's tables, the seed left out.
    tables: Mapping[str, Any]
    # Settings of the section `compare`.
    harness: Mapping[str, float] = field(default_factory=dict)

    @property
    def takes_outer_steps(self) -> bool:
        """Whether H means something; else the method exchanges at every step, or never."""
        return self.trains in _TAKE_OUTER_STEPS

    def config(self, seed: int) -> RunConfig:
        """Return the run's configuration. Raises ConfigError, which names the method."""
        try:
            return RunConfig.from_mapping({**self.tables, "seed": seed})
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def share_of(self, steps: int, every: int) -> int:
        """Return the inner steps of the data-parallel phase before the first outer step: whole H."""
        return round(self.harness.get("warmup", 0.0) * steps / every) * every


def trial_length(method: Method, length: Length) -> Length:
    """Return the length of a trial, with the method's own H: one trial serves a comparison of any other.

    Where H means nothing it is the default, and where it changes during the run the one that was asked for.
    """
    if not method.takes_outer_steps:
        return replace(length, every=DEFAULT_EVERY)
    sync = method.config(0).sync
    return length if sync.milestones else replace(length, every=sync.every)


def read_method(text: str, length: Length, settings: Sequence[str] = ()) -> Method:
    """Return the method that a text asks for; settings: for every method, before its own.

    Raises ConfigError for an unknown name, a wrong setting, and what the harness decides itself.
    """
    try:
        name, *own = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--method {text!r}: must be NAME, or NAME KEY=VALUE ...") from error
    is_file = name not in PRESETS and (name.endswith(".toml") or "/" in name)
    chosen = None if is_file else preset(name)
    trains = chosen.trains if chosen is not None else "exchange"
    tables = (
        _of_file(Path(name))
        if is_file
        else _of_preset(name, _own_every((*settings, *own), length.every) if trains in _TAKE_OUTER_STEPS else DEFAULT_EVERY)
    )
    harness = dict(chosen.harness) if chosen is not None else {}
    for setting in (*settings, *own):
        key = setting.partition("=")[0].strip()
        if key in _OF_RUN:
            raise ConfigError(f"{text}: {key} follows from --peers, --steps and --seeds; leave it out")
        set_key(tables, setting)
    harness |= _harness(text, tables.pop("compare", {}))
    for section in ("sync", "outer", "rounds"):
        if not isinstance(tables.get(section, {}), dict):
            raise ConfigError(f"{section}: must be a table ([{section}])")
    if chosen is not None and chosen.warmup and "warmup" not in harness:
        _warm_up(tables, chosen.warmup, length.steps)
    tables = _sized(tables, length, 1 if trains == "one-replica" else length.peers)
    if chosen is not None:
        try:
            for section, key in dropped(tables, [*settings, *own]):
                del tables[section][key]
        except ConfigError as error:
            raise ConfigError(f"{text}: {error}") from error
    method = Method(name=text, trains=trains, tables=tables, harness=harness)
    _check(method, length)
    return method


def _of_file(path: Path) -> dict[str, Any]:
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for section in ("server", "aggregators", "swarm", "storage", "membership"):
        tables.pop(section, None)  # of processes and their network
    return tables


def _own_every(settings: Sequence[str], every: int) -> int:
    """Return the H that these settings say, from which other settings follow; else, or where it changes, `every`."""
    tables: dict[str, Any] = {}
    for setting in settings:
        set_key(tables, setting)
    sync = tables.get("sync")
    if not isinstance(sync, dict) or "milestones" in sync or type(own := sync.get("every")) is not int:
        return every
    return own if own > 0 else every


def _of_preset(name: str, every: int) -> dict[str, Any]:
    tables: dict[str, Any] = {section: dict(keys) for section, keys in preset(name).settings.items()}
    sync = tables.setdefault("sync", {})
    own, sync["every"] = sync.get("every"), every
    if (sync.get("mode") == "eager") or sync.get("delay") == own:
        sync["delay"] = every
    if sync.get("schedule") == "time":
        sync["time_s"] = float(every)  # a step of a peer that is not slowed down takes a virtual second
    return tables


def _warm_up(tables: dict[str, Any], share: float, steps: int) -> None:
    """Let peers average parameters after each inner step of the first share of them, whole H; not where H changes already."""
    sync, outer = tables["sync"], tables["outer"]
    every = sync["every"]
    if "milestones" in sync or "mean_steps" in outer or not isinstance(every, int) or every < 2:
        return
    if first := round(share * steps / every) * every:
        for key, value in warmup(first, every):
            section, _, name = key.partition(".")
            tables[section][name] = value


def _harness(text: str, section: object) -> dict[str, float]:
    if not isinstance(section, dict):
        raise ConfigError(f"{text}: compare must have a key, as compare.warmup=0.1")
    for key, value in section.items():
        if key not in _HARNESS:
            raise ConfigError(f"{text}: compare.{key}: unknown key; known keys: {', '.join(_HARNESS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise ConfigError(f"{text}: compare.{key} = {value!r}: must be a number between 0 and 1e+06")
        most = _WHOLE.get(key)
        if most is not None and not (value == int(value) and 1 <= value <= most):
            raise ConfigError(f"{text}: compare.{key} = {value!r}: must be a whole number from 1 to {most}")
    return {key: float(value) for key, value in section.items()}


def _sized(tables: dict[str, Any], length: Length, peers: int) -> dict[str, Any]:
    """Write the run's length into the tables. peers: those that contribute; with arrivals each takes outer steps of its own."""
    sync = tables.setdefault("sync", {})
    every, groups = sync.get("every", length.every), sync.get("groups", 1)
    if not all(isinstance(value, int) and value > 0 for value in (every, groups)):
        raise ConfigError(f"sync.every = {every!r}, sync.groups = {groups!r}: must be whole numbers above 0")
    sync["every"] = every
    sync["outer_steps"] = max(1, _outer_steps(length.steps, every, groups, sync.get("milestones", ())))
    tables["rounds"] = {**tables.get("rounds", {}), "start_peers": length.peers, "quorum": length.peers}
    if tables["rounds"].get("merging") == "arrivals":
        del tables["rounds"]["start_peers"], tables["rounds"]["quorum"]
        sync["outer_steps"] *= peers
    if tables.get("outer", {}).get("algorithm") == "gossip":
        tables["rounds"].pop("quorum", None)
    return tables


def _outer_steps(steps: int, every: int, groups: int, milestones: Any) -> int:
    """Return how many whole outer steps fit into so many inner steps. What milestones cannot be is checked with the section."""
    taken, begins = 0, 0
    for milestone, following in milestones if _are_milestones(milestones) else ():
        fits = (steps - taken) * groups // every
        if begins + fits <= milestone:
            break
        taken += (milestone - begins) * every // groups
        begins, every = milestone, following
    return begins + (steps - taken) * groups // every


def _are_milestones(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    return pairs and all(isinstance(each, int) and each > 0 for one in value for each in one)


def _check(method: Method, length: Length) -> None:
    config = method.config(0)
    if config.model.name != "builtin:gpt":
        raise ConfigError(f"{method.name}: model.name = {config.model.name!r}: the harness trains builtin:gpt")
    if config.robust.scored:
        raise ConfigError(f"{method.name}: robust.trust = {config.robust.trust!r}: no peer scores in the harness; leave it out")
    sync = config.sync
    if method.takes_outer_steps:
        if not sync.milestones and length.steps % sync.every:
            raise ConfigError(f"{method.name}: --steps {length.steps} must be a multiple of sync.every ({sync.every})")
        if sync.milestones and (taken := sync.inner_steps_before(sync.outer_steps)) != length.steps:
            rule = f"must end with an outer step; with sync.every and sync.milestones {sync.outer_steps} of them take {taken}"
            raise ConfigError(f"{method.name}: --steps {length.steps} {rule}")
    if config.inner.batch_growth > 1 and (not method.takes_outer_steps or config.outer.algorithm == "gossip"):
        rule = "must be 1: the harness ends such a trial by the tokens that are merged"
        raise ConfigError(f"{method.name}: inner.batch_growth = {config.inner.batch_growth} {rule}")
    rule = "has no effect with sync.milestones, whose first H can be 1; leave one of them out"
    if method.harness.get("warmup") and sync.milestones:
        raise ConfigError(f"{method.name}: compare.warmup {rule}")
    if method.harness.get("warmup", 0.0) >= 1:
        raise ConfigError(f"{method.name}: compare.warmup = {method.harness['warmup']:g}: must be below 1")
    if method.harness.get("warmup") and method.trains != "exchange":
        raise ConfigError(f"{method.name}: compare.warmup has no effect without an exchange; leave it out")
