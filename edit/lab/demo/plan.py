"""What a demo will do: its options and their bounds, the settings of its run.toml, and the planned faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit.errors import ConfigError
from edit.lab.run_toml import Setting, Settings

__all__ = ["ATTACKS", "LEADER", "OWNER", "DemoOptions", "FaultPlan", "plan_faults", "plan_run"]

LONG_SYNC = 30
LEADER, OWNER = "the leader", "an owner"  # of a swarm: who that is turns out when it is their turn
_MOST_PARTS = 4
HOSTILE = 2  # peers of a demo that mean harm; one more copies
_LEAST_WITH_HOSTILE = 7
ATTACKS = {"flip": "flips its sign", "reverse": "reverses the mean", "copy": "copies"}
"""What the last peers of a demo with hostile peers do, in a few words for the screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `edit-lab demo`."""

    peers: int = 4
    steps: int | None = None  # inner steps of each peer; None: 750; with quick 100, in a swarm 200
    seed: int = 0
    faults: bool = True
    quick: bool = False
    swarm: bool = False  # no coordinator
    hostile: bool = False  # the last peers attack, instead of the faults
    robust: bool = False  # against them: a robust rule instead of the penalty
    masked: bool = False  # beside them: secure aggregation, and one peer is killed
    alone: bool = True  # a lone peer beside the run
    out: Path = Path("runs/demo")

    def __post_init__(self) -> None:
        if not 1 <= self.peers <= 16:
            raise ConfigError(f"--peers {self.peers}: must be between 1 and 16")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed {self.seed}: must be between 0 and 2147483647")
        if not self.sync_every <= self.inner_steps <= 10_000_000:
            raise ConfigError(f"--steps {self.inner_steps}: must be between {self.sync_every} and 10000000")
        if self.hostile and self.swarm:
            raise ConfigError(
                "--hostile: not with --swarm; the audit log, which the demo verifies at the end, needs a coordinator"
            )
        if self.hostile and self.peers < _LEAST_WITH_HOSTILE:
            raise ConfigError(f"--peers {self.peers}: at least {_LEAST_WITH_HOSTILE} with --hostile, of which three attack")
        if self.faults and self.outer_steps < 10:
            raise ConfigError(f"--steps {self.inner_steps}: too short to show the faults; at least 100, or add --no-faults")

    @property
    def inner_steps(self) -> int:
        """Inner steps asked for; the run takes the largest multiple of `sync_every` that is not larger."""
        if self.steps is not None:
            return self.steps
        if self.hostile:
            return 100 if self.quick else 300
        return (200 if self.swarm else 100) if self.quick else 750  # a swarm's killed member must come back in time

    @property
    def sync_every(self) -> int:
        return LONG_SYNC if self.inner_steps >= 600 else 10

    @property
    def outer_steps(self) -> int:
        return self.inner_steps // self.sync_every

    @property
    def lone_steps(self) -> int:
        """Inner steps of the lone peer: at least as many as a peer takes, which trains on while the coordinator is away."""
        away = 2 * self.sync_every if self.faults and self.sync_every == LONG_SYNC and not self.swarm else 0
        return self.outer_steps * self.sync_every + away

    @property
    def parts(self) -> int:
        """Into how many parts a swarm's model is cut."""
        return min(self.peers, _MOST_PARTS)

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(f"peer-{index}" for index in range(self.peers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which peer gets which fault, and at which outer step; None or 0: not in this demo."""

    slow: str | None = None  # runs at half speed
    killed: str | None = None  # gets SIGKILL at kill_at, and is restarted
    damaged: str | None = None  # sends NaN at nan_at, a huge pseudo-gradient at huge_at
    nan_at: int = 0
    huge_at: int = 0
    kill_at: int = 0
    coordinator_kill_at: int = 0
    leader_stop_at: int = 0  # in a swarm: the member that leads gets SIGSTOP, and goes on later
    owner_kill_at: int = 0  # in a swarm: a member that owns a part gets SIGKILL, and is restarted
    attacks: Mapping[str, str] = field(
        default_factory=dict
    )  # by peer: what it does in each round (peers.training.fault_injection)

    def role_of(self, peer_id: str) -> str:
        """Return what happens to this peer, in a few words for the screen."""
        if peer_id in self.attacks:
            return ATTACKS[self.attacks[peer_id]]
        roles = {self.slow: "half speed", self.killed: "power cut", self.damaged: "damaged"}
        return roles.get(peer_id, "") if peer_id else ""


def plan_faults(options: DemoOptions) -> FaultPlan:
    """Return the faults: peer 1 is slow, peer 2 is killed, peer 3 sends NaN and a huge pseudo-gradient.

    With `hostile` there are none of these, but for the kill where contributions are masked; the last three peers attack.

    In a long run the coordinator is killed, too. While it is away the peers train on without exchange; in a short run that
    would be too large a share of their steps for a fair comparison with a lone peer.

    In a swarm it is the member that leads that is stopped, and one that owns a part that is killed: of three members any one
    may be away, of two only the younger. Both come early: whoever was killed must be back before the run ends.
    """
    if options.hostile:
        attacks = dict(zip(options.peer_ids[-len(ATTACKS) :], ATTACKS, strict=True))
        killed, kill_at = (options.peer_ids[2], round(0.4 * options.outer_steps)) if options.masked else (None, 0)
        return FaultPlan(attacks=attacks, killed=killed, kill_at=kill_at)
    if not options.faults:
        return FaultPlan()
    names = (*options.peer_ids, None, None, None)
    total = options.outer_steps
    nan_at = max(2, round(0.25 * total))
    if options.swarm:
        nan_at = round(0.6 * total)
        return FaultPlan(
            slow=names[1],
            damaged=names[3],
            nan_at=nan_at,
            huge_at=max(nan_at + 1, round(0.7 * total)),
            leader_stop_at=round(0.2 * total) if options.peers >= 3 else 0,
            owner_kill_at=round(0.3 * total) if options.peers >= 3 else 0,
        )
    return FaultPlan(
        slow=names[1],
        killed=names[2],
        damaged=names[3],
        nan_at=nan_at,
        huge_at=max(nan_at + 1, round(0.3 * total)),
        kill_at=round(0.4 * total),
        coordinator_kill_at=round(0.6 * total) if options.sync_every == LONG_SYNC else 0,
    )


def plan_run(options: DemoOptions, faults: FaultPlan, listen: str, enrol_listen: str) -> Settings:
    """Return the settings of run.toml: those that differ from the defaults, or that a reader will look for.

    Outer momentum needs many outer steps to pay off (see docs/outer-settings.md), so short runs use plain SGD.
    """
    outer: Mapping[str, Setting] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6}
    if options.outer_steps < 40:
        outer = {"optimizer": "sgd", "lr": 1.0}
    where: Settings = {"server": {"listen": listen, "enrol_listen": enrol_listen, "advertise": ("127.0.0.1", "localhost")}}
    if options.swarm:
        where = {"swarm": {"parts": options.parts, "discovery": "addresses"}}
    quorum = max(1, options.peers // 2)
    trust: dict[str, Any] = {}
    if options.hostile:
        quorum = 2 * HOSTILE + 1
        trust = {"audit": {"enabled": True}}
        if options.robust:
            trust |= {"robust": {"rule": "geometric_median", "hostile": HOSTILE}}
        if options.masked:
            trust |= {"secagg": {"enabled": True}}
    observations = max(2, min(10, faults.nan_at or options.outer_steps // 4))
    return {
        "name": "demo",
        "seed": options.seed,
        "model": {"name": "builtin:gpt", "layers": 4, "heads": 4, "width": 128, "context": 128, "vocabulary": 256},
        "inner": {"lr": 2e-3, "warmup_steps": min(50, options.inner_steps // 10), "batch_size": 4},
        "sync": {"every": options.sync_every, "outer_steps": options.outer_steps},
        # delta: a peer that trained on while the coordinator was away sends a larger pseudo-gradient, which is not an anomaly
        "penalty": {"enabled": True, "observations": observations, "delta": 6.0},
        "outer": outer,
        "codec": {"down": "int8"} if options.masked else {"up": "int8", "down": "int8"},
        "rounds": {"start_peers": options.peers, "quorum": quorum, "ceiling_s": 60.0},
        "membership": {"heartbeat_s": 0.5, "lease_s": 3.0},
        "storage": {"checkpoint_every": 10},
        **where,
        **trust,
    }
