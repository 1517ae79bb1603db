"""`WorkerConfig`: what a worker must know of a run. Owns: these settings, their bounds and the messages for wrong ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from edit.codecs import codec_names
from edit.config.run import OuterConfig, RunConfig
from edit.errors import ConfigError
from edit.fragments.groups import PATTERNS

__all__ = ["WorkerConfig"]

MODES = ("blocking", "forward", "delayed", "eager")
MIXES = ("replay", "replace", "lerp")
SCHEDULES = ("steps", "time")
BUFFERS = ("local", "average")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """sync_every: H, the optimizer steps between two exchanges of the same fragment; codec: of the contributions, by name (see
    `codec_names`).

    groups, pattern, mode, delay, mix, alpha, strict, schedule, time_s: as in `edit.config.run.SyncConfig`, and equal to the
    run's.
    max_staleness: as in `edit.config.run.RoundsConfig`. outer: the run's outer optimizer; only `eager`, which estimates its
    step, needs it (sgd or nesterov, one group).
    buffers: "local" keeps each peer's own; "average" exchanges the persistent floating-point buffers as one more fragment,
    merged as the others are: with a penalty, a clip and an outer optimizer. Integer buffers always stay local.
    """

    sync_every: int = 128
    codec: str = "int8"
    groups: int = 1
    pattern: str = "strided"
    mode: str = "blocking"
    delay: int = 1
    mix: str = "replay"
    alpha: float = 0.5
    strict: bool = False
    schedule: str = "steps"
    time_s: float = 600.0
    max_staleness: int = 0
    buffers: str = "local"
    outer: OuterConfig | None = None

    def __post_init__(self) -> None:
        for name in ("sync_every", "groups", "delay"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _require(self.sync_every % self.groups == 0, "groups", self.groups, f"must divide sync_every ({self.sync_every})")
        for name, allowed in (
            ("codec", codec_names()),
            ("pattern", PATTERNS),
            ("mode", MODES),
            ("mix", MIXES),
            ("schedule", SCHEDULES),
        ):
            _require(getattr(self, name) in allowed, name, getattr(self, name), f"must be one of {', '.join(allowed)}")
        _require(0 <= self.alpha <= 1, "alpha", self.alpha, "must be between 0 and 1")
        _require(self.buffers != "lowest", "buffers", self.buffers, "a merge weighs all peers and cannot take one peer's alone")
        _require(self.buffers in BUFFERS, "buffers", self.buffers, f"must be one of {', '.join(BUFFERS)}")
        if self.overlaps:
            limit = f"must not exceed sync_every / groups ({self.interval}): one contribution is on its way at a time"
            _require(self.delay <= self.interval, "delay", self.delay, limit)
        _require(0 < self.time_s < math.inf, "time_s", self.time_s, "must be a finite number above 0")
        _require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "must not be negative")
        if self.max_staleness:
            _require(self.groups == 1, "groups", self.groups, "must be 1 with max_staleness above 0")
            _require(self.mode != "eager", "mode", self.mode, "must not be eager with max_staleness above 0")
        if self.strict:
            fixed = self.schedule == "steps" and self.max_staleness == 0
            _require(fixed, "strict", True, 'cannot be kept with schedule = "time" or max_staleness above 0')
        if self.mode == "eager":
            self._check_eager()

    def _check_eager(self) -> None:
        _require(self.groups == 1, "groups", self.groups, 'must be 1 with mode = "eager"')
        if self.outer is None:
            raise ConfigError('outer = None: mode = "eager" estimates the outer step, so it needs the run\'s outer optimizer')
        allowed = ("sgd", "nesterov")
        rule = f'must be one of {", ".join(allowed)} with mode = "eager"; the others\' steps cannot be estimated'
        _require(self.outer.optimizer in allowed, "outer.optimizer", self.outer.optimizer, rule)

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """What a run's configuration says."""
        sync = config.sync
        return cls(
            sync_every=sync.every,
            codec=config.codec.up,
            groups=sync.groups,
            pattern=sync.pattern,
            mode=sync.mode,
            delay=sync.delay,
            mix=sync.mix,
            alpha=sync.alpha,
            strict=sync.strict,
            schedule=sync.schedule,
            time_s=sync.time_s,
            max_staleness=config.rounds.max_staleness,
            outer=config.outer,
        )

    @property
    def interval(self) -> int:
        """Inner steps between two contributions."""
        return self.sync_every // self.groups

    @property
    def interval_s(self) -> float | None:
        """Seconds from one outcome to the next contribution; None when that is counted in steps."""
        return self.time_s / self.groups if self.schedule == "time" else None

    @property
    def overlaps(self) -> bool:
        """Whether training always goes on while a contribution is on its way."""
        return self.mode in ("delayed", "eager")


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: {rule}")
