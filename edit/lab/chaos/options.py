"""The options of a chaos run, their bounds, and the settings of its run.toml."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.lab.chaos.faults import SWARM_KINDS, Fault, Kind, draw_schedule, kinds_for
from edit.lab.chaos.invariants import Bounds
from edit.lab.chaos.swarm_rules import SwarmBounds
from edit.lab.run_toml import Settings

__all__ = ["SHARDED", "ChaosOptions"]

SHARDED = "sharded"
CONTEXT = 32
_LEAST_MASKED = 4  # peers: three open a sum, while one is gone
_ENDLESS = 10_000_000
_OUTER_STEPS_PER_S = 2.0  # of a run with --exact that nothing disturbs, about
_AGAIN = 10.0  # so many times as long as undisturbed may one under faults take, beside these
_DOWN_S = 0.5  # at most, until a process that is one of many killed ones is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options of `edit-lab chaos`, and some that only benchmarks set."""

    seed: int = 0
    seconds: float = 60.0  # of faults, after all peers are in a commit
    peers: int = 3
    swarm: bool = False  # no coordinator; the last member has no listening port
    sharded: bool = False  # the last peer is a torchrun replica of two ranks
    masked: bool = False  # with secure aggregation
    forked: bool = False  # with an audit log; at the end two coordinators serve the run
    exact: bool = False  # twice, alone and under faults: both end with the same bits
    hostile: int = 0  # members beside them that attack the run
    behaviours: tuple[str, ...] = ()  # of the hostile members; none: all
    behaviour_s: float = 10.0  # of each
    out: Path = Path("runs/chaos")
    gap_s: float = 5.0  # mean time between faults
    longest_s: float = 6.0  # of one fault
    kinds: tuple[Kind, ...] | None = None  # None: all
    kills: int = 0  # this many SIGKILLs, until they are done, instead of faults of all kinds for `seconds`; 0: those
    faults: tuple[Fault, ...] | None = None  # these instead of drawn ones
    layers: int = 1
    width: int = 32
    heads: int = 2
    batch_size: int = 2
    every: int = 10
    throttle: float = 4.0  # an inner step takes so many times as long, to leave the machine time for the faults
    start_s: float = 40.0  # how long a process may take to start, in the bounds
    quorum: int = 1
    heartbeat_s: float = 0.2
    lease_s: float = 1.0
    floor_s: float = 1.0
    ceiling_s: float = 10.0
    checkpoint_every: int = 3
    begin_s: float = 180.0  # how long all peers may take until they are in a commit
    disk_bytes: int = 64 << 20  # of the coordinator's tmpfs; 0: the machine's disk

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed {self.seed}: must be between 0 and 2147483647")
        if not 10 <= self.seconds <= 24 * 3600:
            raise ConfigError(f"--minutes {self.seconds / 60:g}: must be between 0.17 (ten seconds) and 1440 (a day)")
        if not 0.01 <= self.gap_s <= 3600:
            raise ConfigError(f"--gap {self.gap_s:g}: must be between 0.01 and 3600 seconds")
        if self.swarm and (self.sharded or self.hostile or self.kills):
            raise ConfigError("--swarm: cannot be combined with --sharded, --hostile or --kills")
        if self.masked and (self.swarm or self.hostile):
            raise ConfigError("--masked: cannot be combined with --swarm or --hostile")
        if self.masked and self.peers < _LEAST_MASKED:
            raise ConfigError(f"--peers {self.peers}: must be at least {_LEAST_MASKED} with --masked")
        if self.forked and (self.swarm or self.masked or self.hostile):
            raise ConfigError("--forked: cannot be combined with --swarm, --masked or --hostile")
        if self.forked and self.peers < 2 + self.sharded:
            raise ConfigError(f"--peers {self.peers}: must be at least {2 + self.sharded} with --forked")
        if self.exact and (self.swarm or self.masked or self.forked or self.hostile or self.kills):
            raise ConfigError("--exact: cannot be combined with --swarm, --masked, --forked, --hostile or --kills")
        if self.swarm and not 3 <= self.peers <= 7:
            raise ConfigError(f"--peers {self.peers}: with --swarm between 3 and 7")
        if not 1 <= self.peers <= 64:
            raise ConfigError(f"--peers {self.peers}: must be between 1 and 64")
        if not 0 <= self.kills <= 10_000:
            raise ConfigError(f"--kills {self.kills}: must be between 0 and 10000")
        if not 0 <= self.hostile < self.peers:
            raise ConfigError(f"--hostile {self.hostile}: must be fewer than the {self.peers} honest peers, or 0")

    @property
    def peer_ids(self) -> tuple[str, ...]:
        plain = tuple(f"peer-{index}" for index in range(self.peers - self.sharded))
        return (*plain, SHARDED) if self.sharded else plain

    @property
    def parts(self) -> int:
        """Into how many parts the model of a swarm is cut."""
        return 3

    @property
    def hostile_ids(self) -> tuple[str, ...]:
        return tuple(f"hostile-{index}" for index in range(self.hostile))

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of a peer."""
        return self.batch_size * CONTEXT

    @property
    def outer_steps(self) -> int:
        """Of the run; with --exact so many that it takes about `seconds` while nothing disturbs it."""
        return max(8, round(self.seconds * _OUTER_STEPS_PER_S)) if self.exact else _ENDLESS

    @property
    def peer_arguments(self) -> tuple[str, ...]:
        """Further arguments of each peer's command."""
        return ("--checkpoint-every", str(random.Random(f"checkpoints {self.seed}").choice((1, 2, 4)))) if self.exact else ()

    def ends_within_s(self, alone_s: float) -> float:
        """Return how long a run with --exact may take; far more than one on a busy machine does. alone_s: what it took before,
        undisturbed; 0: it is that run."""
        faults_s = sum(fault.lasts_s + self.bounds.return_s for fault in self.schedule()) if alone_s else 0.0
        return self.begin_s + _AGAIN * max(alone_s, self.seconds) + faults_s

    @property
    def bounds(self) -> Bounds:
        return Bounds.of(ceiling_s=self.ceiling_s, lease_s=self.lease_s, start_s=self.start_s)

    @property
    def swarm_bounds(self) -> SwarmBounds:
        """Return generous bounds: every timeout of the run once, and `start_s` for a process to start under load."""
        of_a_round = 2 * self.ceiling_s + 4 * self.lease_s
        return SwarmBounds(
            advance_s=of_a_round + self.start_s / 2, return_s=of_a_round + 2 * self.start_s, spare=(self.peers - 1) // 2
        )

    def schedule(self) -> tuple[Fault, ...]:
        """Return the planned faults; the same options give the same ones."""
        if self.faults is not None:
            return self.faults
        kinds, seconds, longest_s = self.kinds, self.seconds, self.longest_s
        if self.swarm and kinds is None:
            kinds = SWARM_KINDS
        if self.exact and kinds is None:
            kinds = (*kinds_for(self.sharded), Kind.KILL_PEER, Kind.KILL_PEER, Kind.KILL_COORDINATOR)
        if self.kills:
            kinds = tuple(kind for kind in kinds_for(self.sharded) if kind.kills)
            seconds, longest_s = 10 * self.kills * self.gap_s, _DOWN_S
        drawn = draw_schedule(
            self.seed,
            seconds,
            self.peer_ids,
            sharded=SHARDED if self.sharded else None,
            kinds=kinds,
            gap_s=self.gap_s,
            longest_s=longest_s,
        )
        return drawn[: self.kills] if self.kills else drawn

    def run(self) -> Settings:
        """Return the settings of run.toml: small numbers, so that what takes minutes in a real run takes seconds here.

        With hostile members the quorum is one more than there are of them: every commit has an honest peer in it, and as there
        are more honest peers than hostile ones, none of these is ever needed.
        """
        quorum = max(self.quorum, self.hostile + 1) if self.hostile else max(self.quorum, 3) if self.masked else self.quorum
        model = {"layers": self.layers, "heads": self.heads, "width": self.width, "context": CONTEXT}
        rounds = {"start_peers": self.peers, "quorum": quorum, "floor_s": self.floor_s, "ceiling_s": self.ceiling_s}
        where: Settings = {
            "server": {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0", "advertise": ("127.0.0.1", "localhost")}
        }
        if self.swarm:
            where = {"swarm": {"parts": self.parts, "lease_s": 1.0, "forget_s": 10.0, "discovery": "addresses"}}
        if self.forked:
            where = {**where, "audit": {"enabled": True}}
        codec = {"up": "int8", "down": "bf16"}
        if self.masked:
            where = {**where, "secagg": {"enabled": True}}
            del codec["up"]
        settings: Settings = {
            "name": "chaos",
            "seed": self.seed,
            "model": {"name": "builtin:gpt", "vocabulary": 256, **model},
            "inner": {"lr": 1e-3, "warmup_steps": 20, "batch_size": self.batch_size},
            "sync": {"every": self.every, "outer_steps": _ENDLESS},
            "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6},
            # Only against hostile members: a peer that trained on while it was disconnected sends a larger norm.
            "penalty": {"enabled": self.hostile > 0},
            "codec": codec,
            "rounds": rounds,
            "membership": {"heartbeat_s": self.heartbeat_s, "lease_s": self.lease_s},
            "storage": {"checkpoint_every": self.checkpoint_every, "keep_updates": 4},
            **where,
        }
        if not self.exact:
            return settings
        # Each peer is in each outer step, or it is not made: then it does not matter how long something took.
        rounds |= {"quorum": self.peers}
        every, last = 4, self.outer_steps
        ends: dict[str, Any] = {"outer_steps": last}
        if random.Random(f"tokens {self.seed}").random() < 0.4:  # when all tokens are merged, which no peer knows beforehand
            ends = {"outer_steps": 4 * last, "tokens": last * every * self.step_tokens * self.peers}
        strict = {"every": every, "strict": True, **ends}
        return next(filter(_is_valid, (_over(settings, drawn, strict) for drawn in _drawn(self.seed))))


def _drawn(seed: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield what a run with --exact may train with, without end; not all of it is valid together."""
    chance = random.Random(seed)
    while True:
        mode = chance.choice(("blocking", "forward", "delayed", "eager"))
        sync: dict[str, Any] = {"mode": mode, "groups": chance.choice((1, 1, 2))}
        if mode in ("delayed", "eager"):
            sync["delay"] = chance.choice((1, 2, 3))
        codec: dict[str, Any] = {
            "up": chance.choice(("fp32", "int8", "int8", "int4", "e3m0", "topk:k=64")),
            "down": chance.choice(("fp32", "bf16", "int8")),
        }
        if codec["up"] != "fp32":
            codec |= {"up_residual": chance.choice(("fp32", "bf16", "int8", "local")), "up_decay": chance.choice((1.0, 0.95))}
        yield {
            "sync": sync,
            "codec": codec,
            "outer": {"optimizer": chance.choice(("nesterov", "nesterov", "sgd")), "lr": 0.7},
            "inner": {"optimizer": chance.choice(("adamw", "adamw", "muon"))},
            "penalty": {"enabled": chance.choice((False, True))},
        }


def _over(settings: Settings, drawn: dict[str, dict[str, Any]], sync: dict[str, Any]) -> Settings:
    """Return the settings with those that are drawn, and [sync], in their place."""
    drawn["sync"] |= sync
    drawn["inner"] = {**settings["inner"], **drawn["inner"]}  # type: ignore[dict-item]
    return {**settings, **drawn}


def _is_valid(settings: Settings) -> bool:
    try:
        RunConfig.from_mapping(settings)
    except ConfigError:
        return False
    return True
