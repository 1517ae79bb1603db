"""What a demo will do, decided before anything starts: the run's settings and the show's faults.

Owns: the demo's options and their bounds, the run.toml that follows from them, which peer gets which part at which outer
step. Must not know: processes, files, the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edit.errors import ConfigError
from edit.lab.run_toml import Setting, Settings

__all__ = ["DemoOptions", "ShowPlan", "plan_run", "plan_show"]

LONG_SYNC = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The command line of `edit-lab demo`. steps: inner steps of each peer; None: 750, or 100 when quick."""

    peers: int = 4
    steps: int | None = None
    seed: int = 0
    faults: bool = True
    quick: bool = False
    out: Path = Path("runs/demo")

    def __post_init__(self) -> None:
        if not 1 <= self.peers <= 16:
            raise ConfigError(f"--peers {self.peers}: must be between 1 and 16")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed {self.seed}: must be between 0 and 2147483647")
        if not self.sync_every <= self.inner_steps <= 10_000_000:
            raise ConfigError(f"--steps {self.inner_steps}: must be between {self.sync_every} and 10000000")
        if self.faults and self.outer_steps < 10:
            raise ConfigError(f"--steps {self.inner_steps}: too short to show the faults; at least 100, or add --no-faults")

    @property
    def inner_steps(self) -> int:
        """Inner steps asked for; the run makes the largest multiple of `sync_every` that is not above."""
        return (100 if self.quick else 750) if self.steps is None else self.steps

    @property
    def sync_every(self) -> int:
        return LONG_SYNC if self.inner_steps >= 600 else 10

    @property
    def outer_steps(self) -> int:
        return self.inner_steps // self.sync_every

    @property
    def lone_steps(self) -> int:
        """Inner steps of the lone peer: no fewer than the others make, who train on while the killed coordinator is away."""
        away = 2 * self.sync_every if self.faults and self.sync_every == LONG_SYNC else 0
        return self.outer_steps * self.sync_every + away

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(f"peer-{index}" for index in range(self.peers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowPlan:
    """Who plays which part; None or 0: not in this show. The numbers are outer steps."""

    slow: str | None = None
    killed: str | None = None
    damaged: str | None = None
    nan_at: int = 0
    huge_at: int = 0
    kill_at: int = 0
    coordinator_kill_at: int = 0

    def part_of(self, peer_id: str) -> str:
        """A few words for the screen."""
        parts = {self.slow: "half speed", self.killed: "power cut", self.damaged: "damaged"}
        return parts.get(peer_id, "") if peer_id else ""


def plan_show(options: DemoOptions) -> ShowPlan:
    """Peer 1 is slow, peer 2 is killed, peer 3 sends NaN and a huge pseudo-gradient; in a long run the coordinator is killed.

    While it is away its peers train on by themselves: in a short run so much that a comparison with a lone peer by the number
    of own steps would no longer be fair.
    """
    if not options.faults:
        return ShowPlan()
    names = (*options.peer_ids, None, None, None)
    total = options.outer_steps
    nan_at = max(2, round(0.25 * total))
    return ShowPlan(
        slow=names[1],
        killed=names[2],
        damaged=names[3],
        nan_at=nan_at,
        huge_at=max(nan_at + 1, round(0.3 * total)),
        kill_at=round(0.4 * total),
        coordinator_kill_at=round(0.6 * total) if options.sync_every == LONG_SYNC else 0,
    )


def plan_run(options: DemoOptions, show: ShowPlan, listen: str, enrol_listen: str) -> Settings:
    """The settings of run.toml, only those that differ from the defaults or that a reader will look for.

    Outer momentum needs many outer steps to pay (see docs/outer-settings.md), so short runs do without.
    """
    outer: Mapping[str, Setting] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6}
    if options.outer_steps < 40:
        outer = {"optimizer": "sgd", "lr": 1.0}
    observations = max(2, min(10, show.nan_at or options.outer_steps // 4))
    return {
        "name": "demo",
        "seed": options.seed,
        "model": {"name": "builtin:gpt", "layers": 4, "heads": 4, "width": 128, "context": 128, "vocabulary": 256},
        "inner": {"lr": 2e-3, "warmup_steps": min(50, options.inner_steps // 10), "batch_size": 4},
        "sync": {"every": options.sync_every, "outer_steps": options.outer_steps},
        # delta: a peer that trained on while the coordinator was away sends more than usual, and means no harm
        "penalty": {"enabled": True, "observations": observations, "delta": 6.0},
        "outer": outer,
        "codec": {"up": "int8", "down": "int8"},
        "rounds": {"start_peers": options.peers, "quorum": max(1, options.peers // 2), "ceiling_s": 60.0},
        "membership": {"heartbeat_s": 0.5, "lease_s": 3.0},
        "storage": {"checkpoint_every": 10},
        "server": {"listen": listen, "enrol_listen": enrol_listen, "advertise": ("127.0.0.1", "localhost")},
    }
