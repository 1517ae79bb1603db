"""Named settings of published methods, for `edit-coordinator init --preset` and `edit-lab compare`.

A preset says what its source chose, H too; a run's length, peers, model and inner learning rate are not in it. What differs
from the source is in its note.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edit.config.overrides import commented_out, with_settings
from edit.config.run import RunConfig, SyncConfig, ineffective
from edit.config.validation import build
from edit.errors import ConfigError
from edit.plain_text import parse_toml

__all__ = ["PRESETS", "Preset", "dropped", "founding_text", "preset", "warmup", "with_preset", "without_ineffective"]

Plain = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One method."""

    # What it does, in a line.
    summary: str
    # The paper.
    source: str
    # By section and key of run.toml.
    settings: Mapping[str, Mapping[str, Plain]] = field(default_factory=dict)
    # How `edit-lab compare` trains it: `exchange`, `data-parallel`, `one-replica` (one peer, which has all peers' batches),
    # `gpa` or `demo`.
    trains: str = "exchange"
    # The share of a run's inner steps that comes first, in which peers average their parameters after every inner step.
    warmup: float = 0.0
    # Settings of the harness alone, see `edit.lab.compare.method`. Its `warmup` is data-parallel, in place of the one above.
    harness: Mapping[str, float] = field(default_factory=dict)
    # Why a run cannot be created with it; "": it can.
    only_harness: str = ""
    # Whether only a swarm can be founded with it, and no run with a coordinator be created.
    only_swarm: bool = False
    # What is not as in the source.
    note: str = ""


def _outer(optimizer: str, lr: float, momentum: float | None = None, **more: Plain) -> dict[str, Plain]:
    return {"optimizer": optimizer, "lr": lr, **({} if momentum is None else {"momentum": momentum}), **more}


_MEAN: Mapping[str, Plain] = {"enabled": False}
_OF_WARMUP = {"sync.milestones", "outer.mean_steps"}  # who sets these has a warm-up of her own, or none
_EACH_STEP = "it needs every peer's gradient at every step, which no carrier of this project transports"

_CO2_OUTER = _outer("co2", 1.0, 0.5, momentum_clip=1.0)

PRESETS: Mapping[str, Preset] = {
    "data-parallel": Preset(
        summary="gradients averaged at every step: what the others are compared with",
        source="Goyal et al. 2017, arXiv 1706.02677",
        trains="data-parallel",
        only_harness=f"{_EACH_STEP}; `edit-peer run` under torchrun does it within one peer",
        note="bytes are those of fp32 gradients to and from a hub",
    ),
    "post-local-sgd": Preset(
        summary="data-parallel at first, then the plain mean of the peers' parameters every H steps",
        source="Lin et al. 2018, arXiv 1808.07217",
        settings={"sync": {"every": 128}, "outer": _outer("sgd", 1.0), "penalty": _MEAN},
        warmup=0.1,
        harness={"warmup": 0.1},
        note="in the first tenth of the inner steps the peers of a run average their parameters after each, in the harness "
        "their gradients",
    ),
    "diloco": Preset(
        summary="the mean pseudo-gradient through Nesterov momentum",
        source="Douillard et al. 2023, arXiv 2311.08105",
        settings={"sync": {"every": 500}, "outer": _outer("nesterov", 0.7, 0.9), "penalty": _MEAN},
    ),
    "co2": Preset(
        summary="heavy-ball outer steps one round late: an exchange has all of the next round's time",
        source="Sun et al. 2024, arXiv 2401.16265",
        settings={
            "sync": {"every": 48, "mode": "delayed", "delay": 48, "mix": "replay"},
            "outer": _CO2_OUTER,
            "penalty": _MEAN,
        },
        note="a peer keeps its own progress of the round that is on its way (sync.mix = replay), which the paper's drops; "
        "the gap penalty is 1, as in the authors' code",
    ),
    "co2-star": Preset(
        summary="CO2's outer step on sharded outer parameters and momentum; training waits for the exchange",
        source="Sun et al. 2024, arXiv 2401.16265, outer_momentum_memory_efficient of its code; EDiT's CO2*",
        settings={"sync": {"every": 48}, "outer": _CO2_OUTER, "penalty": _MEAN},
        note="aggregators hold the shards, workers do in the authors' code; its averages between outer steps "
        "(localsgd_frequency) are left out",
    ),
    "edit": Preset(
        summary="DiLoCo with the pseudo-gradient penalty, layer by layer before each forward",
        source="Cheng et al. 2024, arXiv 2412.07210",
        settings={"sync": {"every": 128, "mode": "forward"}, "outer": _outer("nesterov", 0.8, 0.85)},
        note="the penalty's detector is this project's; the paper's is penalty.detector = \"edit\"",
    ),
    "a-edit": Preset(
        summary="EDiT whose peers take as many steps as they can until a deadline",
        source="Cheng et al. 2024, arXiv 2412.07210, section 3.4",
        settings={
            "sync": {"every": 128, "schedule": "time", "time_s": 600.0},
            "outer": _outer("nesterov", 0.8, 0.85),
        },
        note="in the harness the deadline is H steps of a peer that is not slowed down, on a virtual clock",
    ),
    "streaming": Preset(
        summary="groups of fragments in turn, applied 5 inner steps later, 4 bits up",
        source="Douillard et al. 2025, arXiv 2501.18512",
        settings={
            "sync": {"every": 100, "groups": 2, "mode": "delayed", "delay": 5, "mix": "lerp", "alpha": 0.5},
            "outer": _outer("nesterov", 0.4, 0.9),
            "penalty": _MEAN,
            "codec": {"up": "e3m0", "down": "bf16"},
        },
        note="2 groups, so that H is a multiple of them; the paper's groups are of 3 layers, each",
    ),
    "eager": Preset(
        summary="goes on at once from an estimate of the outer step, one round late",
        source="Kale et al. 2025, arXiv 2502.12996",
        settings={
            "sync": {"every": 30, "mode": "eager", "delay": 30},
            "outer": _outer("nesterov", 0.7, 0.9),
            "penalty": _MEAN,
        },
    ),
    "muloco": Preset(
        summary="DiLoCo with Muon as inner optimizer",
        source="Therien et al. 2025, arXiv 2505.23725",
        settings={
            "inner": {"optimizer": "muon"},
            "sync": {"every": 30},
            "outer": _outer("nesterov", 0.8, 0.9),
            "penalty": _MEAN,
        },
        note="Muon's step is scaled to AdamW's size, so that one learning rate fits both",
    ),
    "muloco-warmup": Preset(
        summary="MuLoCo, after a first tenth in which the peers average their parameters at every inner step",
        source="this project (docs/compare.md), of arXiv 2505.23725 and of arXiv 1808.07217",
        settings={
            "inner": {"optimizer": "muon"},
            "sync": {"every": 30},
            "outer": _outer("nesterov", 0.9, 0.4),
            "penalty": _MEAN,
            "average": {"kind": "last", "last": 2},
        },
        warmup=0.1,
        note="export with --averaged: the mean of the last two outer parameters; measured with inner.lr = 4.5e-3",
    ),
    "sparseloco": Preset(
        summary="top 64 of 4096 elements in 2 bits with error feedback, no outer momentum",
        source="Sarfi et al. 2025, arXiv 2508.15706",
        settings={
            "sync": {"every": 30},
            "outer": _outer("sgd", 1.0),
            "penalty": _MEAN,
            "codec": {"up": "topk", "up_decay": 0.95, "down": "bf16"},
        },
        note="what is merged is published in bf16, where the paper's peers exchange the sparse contributions",
    ),
    "noloco": Preset(
        summary="gossip: an outer step of two peers, with no parameters that all share",
        source="Kolehmainen et al. 2025, arXiv 2506.10911",
        settings={"sync": {"every": 50}, "outer": {"algorithm": "gossip"}, "penalty": _MEAN},
        only_swarm=True,
        note="edit-coordinator cannot run it, a swarm can: edit-peer swarm start RUN_TOML --preset noloco",
    ),
    "snoo": Preset(
        summary="Nesterov momentum on the pseudo-gradients of one replica that trains on all batches",
        source="Kallusky et al. 2025, arXiv 2510.15830",
        settings={"sync": {"every": 30}, "outer": _outer("nesterov", 0.7, 0.6), "penalty": _MEAN},
        trains="one-replica",
        note="a run with one peer; within it gradients are averaged at every step",
    ),
    "gpa": Preset(
        summary="generalized primal averaging of AdamW's iterates, data-parallel",
        source="Defazio et al. 2025, arXiv 2512.17131",
        trains="gpa",
        harness={"mu_x": 0.97, "mu_y": 0.8},
        only_harness=_EACH_STEP,
    ),
    "demo-optimizer": Preset(
        summary="momentum stays with the peers, its largest DCT coefficients are exchanged at every step; sign descent",
        source="Peng et al. 2024, arXiv 2411.19870",
        settings={"inner": {"lr": 1e-3}},
        trains="demo",
        harness={"topk": 32, "chunk": 64, "decay": 0.999},
        only_harness=_EACH_STEP,
    ),
    "fedavg": Preset(
        summary="the mean of the peers' parameters, weighted by their tokens",
        source="McMahan et al. 2017, arXiv 1602.05629",
        settings={
            "sync": {"every": 128},
            "outer": _outer("sgd", 1.0),
            "penalty": {"enabled": False, "weighting": "tokens"},
        },
    ),
    "fedadam": Preset(
        summary="the mean pseudo-gradient through Adam",
        source="Reddi et al. 2021, arXiv 2003.00295",
        settings={
            "sync": {"every": 128},
            "outer": _outer("adam", 1e-2, beta1=0.9, beta2=0.99, eps=1e-3),
            "penalty": {"enabled": False, "weighting": "tokens"},
        },
    ),
}


def preset(name: str) -> Preset:
    """Return the preset of this name. Raises ConfigError, which names the nearest."""
    if (found := PRESETS.get(name)) is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(PRESETS)}"
        raise ConfigError(f"preset {name}: there is none; {known}")
    return found


def with_preset(text: str, name: str, settings: Sequence[str] = ()) -> str:
    """Return run.toml's text with a preset's settings written into it, then these, `SECTION.KEY=VALUE`.

    Keys that become ineffective, and are not among `settings`, become comments. To write a preset again changes nothing. Raises
    ConfigError for an unknown preset, one that this run cannot have, and wrong settings, and ValueError for what is not TOML.
    """
    chosen = preset(name)
    if chosen.only_harness:
        raise ConfigError(f"preset {name}: edit-lab compare has it, a run cannot: {chosen.only_harness}")
    if chosen.only_swarm and "swarm" not in parse_toml(text):
        raise ConfigError(f"preset {name}: {chosen.note}")
    own = [f"{section}.{key}={_toml(value)}" for section, keys in chosen.settings.items() for key, value in keys.items()]
    if "lr" in chosen.settings.get("outer", {}) and parse_toml(text).get("outer", {}).get("preset", "manual") != "manual":
        own.append('outer.preset="manual"')
    if chosen.only_swarm:
        own.append("swarm.parts=1")  # a swap is of the whole model
    text = with_settings(text, [*own, *settings])
    asked = {setting.partition("=")[0].strip() for setting in settings}
    if chosen.warmup and asked.isdisjoint(_OF_WARMUP):
        text = with_settings(text, [f"{key}={_toml(value)}" for key, value in _warmed_up(chosen, text)])
    return without_ineffective(text, settings)


def warmup(outer_steps: int, every: int) -> Sequence[tuple[str, Any]]:
    """Return (SECTION.KEY, value) of a run whose first outer steps average parameters after one inner step, and whose others
    have H = `every`.
    """
    return ("sync.every", 1), ("sync.milestones", [[outer_steps, every]]), ("outer.mean_steps", outer_steps)


def _warmed_up(chosen: Preset, text: str) -> Sequence[tuple[str, Any]]:
    """Return what `warmup` does for as many outer steps as the text says in all: of their inner steps, the preset's share."""
    sync = parse_toml(text)["sync"]
    every, outer_steps = sync["every"], sync.get("outer_steps", SyncConfig().outer_steps)
    if not all(isinstance(value, int) and value > 1 for value in (every, outer_steps)):
        raise ConfigError(
            f"sync.every = {every!r}, sync.outer_steps = {outer_steps!r}: must be whole numbers above 1 with this preset"
        )
    # of n outer steps, the first w and (n - w) H inner steps behind them: w = share (w + (n - w) H)
    first = chosen.warmup * outer_steps * every / (1 - chosen.warmup + chosen.warmup * every)
    return warmup(min(max(1, round(first)), outer_steps - 1), every)


def without_ineffective(text: str, settings: Sequence[str]) -> str:
    """Return run.toml's text with each key as a comment that has no effect and is not among the settings.

    Raises ConfigError for unknown keys and wrong values, and where a key has no line of its own.
    """
    mapping: Mapping[str, Any] = parse_toml(text)
    for section, key in dropped(mapping, settings):
        text = commented_out(text, section, key)
    return text


def founding_text(text: str, settings: Sequence[str]) -> str:
    """Return the run.toml that a swarm is founded with: this text, with these settings, and with what `auto` chooses.

    Keys that only the settings make ineffective become comments. What `outer.preset = "auto"` chooses is written, so that it is
    part of what all members have in the same bytes, whatever their version would choose.

    Raises ConfigError for what cannot be, or has no line of its own, and ValueError where the text is not TOML.
    """
    before: Mapping[str, Any] = parse_toml(text)
    text = with_settings(text, settings)
    mapping: Mapping[str, Any] = parse_toml(text)
    if mapping != before:
        already = set(ineffective(build(RunConfig, before, ""), before))
        for section, key in dropped(mapping, settings):
            if (section, key) not in already:
                text = commented_out(text, section, key)
    config = RunConfig.from_mapping(parse_toml(text))
    if config.outer.preset != "auto" or config.swarm is None:
        return text
    own = [f"outer.{key}={_toml(getattr(config.outer, key))}" for key in ("preset", "optimizer", "lr", "momentum", "chosen")]
    return with_settings(text, own)


def dropped(mapping: Mapping[str, Any], settings: Sequence[str]) -> list[tuple[str, str]]:
    """Return (section, key) of what has no effect in these tables and was not asked for by one of the settings.

    Raises ConfigError for unknown keys and wrong values.
    """
    asked = {setting.partition("=")[0].strip() for setting in settings}
    found = ineffective(build(RunConfig, mapping, ""), mapping)
    return [(section, key) for section, key in found if f"{section}.{key}" not in asked]


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
