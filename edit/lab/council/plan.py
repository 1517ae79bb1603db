"""What is drawn from a seed: how large the swarm is, how its network behaves, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = ["LIES", "Fault", "Plan", "draw", "draw_liar"]

KINDS = {
    "kill": 4,
    "wipe": 1,
    "stop": 3,
    "partition": 3,
    "one-way": 2,
    "jump": 1,
    "drop": 2,
    "power cut": 0.5,
    "leave": 0.3,
    "pause": 0.3,
}
LIES = ("wrong", "nothing", "two", "slander")
STORM = {"kill": 8.0, "power cut": 2.0, "stop": 1.0, "partition": 1.0, "drop": 2.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at: float  # virtual seconds
    kind: str
    member: int  # whom it strikes
    others: tuple[int, ...]  # on its side of a partition
    seconds: float  # how long it lasts, or how far a clock jumps
    torn: int  # a kill comes after so many effects of the next call; 0: between two calls


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulated swarm."""

    seed: int
    members: int
    parts: int
    voters: int  # so many of the members vote from the beginning; the others join
    latency_s: float
    loss: float
    duplicates: float
    lease_s: float
    verify: int
    same_bytes: bool  # all updates have equal bytes
    faulty_s: float  # faults come until then; then everything is mended
    faults: tuple[Fault, ...]
    liar: int = -1  # the member that lies; -1: none does
    lie: str = ""  # how: one of LIES
    relayed: frozenset[int] = frozenset()  # members that others reach through a relay

    @property
    def is_slow(self) -> bool:
        """Whether the configured lease is too short for the network, so that it must grow first."""
        return 8 * 2 * self.latency_s > self.lease_s

    @property
    def recovery_s(self) -> float:
        """How long two further commits of all parts may take at most after healing: 5 s, more where a message takes long.

        Where a member lies: as long as an owner may stall, and its leader do nothing about it, twice.
        """
        return 5.0 + 60 * self.latency_s * self.is_slow + (2 * self.stall_s + 20 * self.lease_s) * (self.liar >= 0)

    @property
    def stall_s(self) -> float:
        """In which an owner makes an update that peers wait for."""
        return 12 * self.lease_s


def draw(seed: int, most_members: int = 4) -> Plan:
    """Return the plan of a seed.

    Half of them have timeouts far too short for their network. A quarter are storms: elections all the time, in which members
    are killed and come back within one.
    """
    random = Random(f"plan {seed}")
    members, parts = random.randint(2, most_members), random.choice((1, 2, 3))
    voters = random.randint(1, members)
    latency_s, lease_s = random.choice((0.002, 0.01, 0.03)), 1.0
    if random.random() < 0.5:
        latency_s, lease_s = random.choice((0.01, 0.05, 0.2, 0.6)), random.choice((0.1, 0.2, 0.5))
    faulty_s = random.uniform(3.0, 8.0)
    kinds, per_s, longest_s = KINDS, 1.5, 3.0
    if random.random() < 0.25:
        members, parts, voters = most_members, 1, random.choice((3, most_members))
        latency_s, lease_s = random.choice((0.01, 0.03)), random.choice((0.05, 0.1))
        kinds, per_s, longest_s = STORM, 10.0, 0.2
    faults, at = [], 0.0
    while (at := at + random.expovariate(per_s)) < faulty_s:
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        others = tuple(i for i in range(members) if random.random() < 0.5)
        torn = random.choice((0, 0, 1, 1, 2, 3))
        faults.append(Fault(at, kind, random.randrange(members), others, random.uniform(0.02, longest_s), torn))
    faults += _evictions(seed, members, faulty_s)
    return Plan(
        seed=seed,
        members=members,
        parts=parts,
        voters=voters,
        latency_s=latency_s,
        loss=random.choice((0.0, 0.0, 0.05, 0.2)),
        duplicates=random.choice((0.0, 0.1)),
        lease_s=lease_s,
        verify=random.choice((0, 0, 0, 1)),
        same_bytes=random.random() < 0.2,
        faulty_s=faulty_s,
        faults=tuple(faults),
        relayed=_relayed(seed, members),
    )


def _relayed(seed: int, members: int) -> frozenset[int]:
    """Return who is behind a relay, in some seeds; drawn apart, as evictions."""
    random = Random(f"relayed {seed}")
    return frozenset(i for i in range(members) if random.random() < 0.5) if random.random() < 0.25 else frozenset()


def _evictions(seed: int, members: int, faulty_s: float) -> list[Fault]:
    """Return what operators order, in some seeds: drawn apart, so that the other faults of a seed do not depend on it."""
    random = Random(f"evictions {seed}")
    if random.random() >= 0.25:
        return []
    return [Fault(random.uniform(0.5, faulty_s), "evict", random.randrange(members), (), 0.0, 0)]


def draw_liar(seed: int, lie: str, *, verify: int = 0) -> Plan:
    """Return a plan with one member that lies, and a few faults. All vote, so that the others are a quorum without it.

    With "slander" nothing else happens: whoever is blamed has done nothing.
    """
    random = Random(f"liar {seed}")
    members, faulty_s = random.randint(3, 5), random.uniform(2.0, 5.0)
    kinds, faults = ("kill", "stop", "drop", "one-way"), []
    for _ in range(random.randint(0, 3) if lie != "slander" else 0):
        others = tuple(i for i in range(members) if random.random() < 0.5)
        at, seconds = random.uniform(0.5, faulty_s), random.uniform(0.05, 1.5)
        faults.append(Fault(at, random.choice(kinds), random.randrange(members), others, seconds, random.choice((0, 0, 1))))
    return Plan(
        seed=seed,
        members=members,
        parts=random.choice((1, 2, 3)),
        voters=members,
        latency_s=random.choice((0.002, 0.01)),
        loss=random.choice((0.0, 0.05)) if lie != "slander" else 0.0,
        duplicates=random.choice((0.0, 0.1)),
        lease_s=0.25,
        verify=verify,
        same_bytes=False,
        faulty_s=faulty_s,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        liar=random.randrange(members),
        lie=lie,
    )
