"""Every behaviour by name, with the part of the coordinator that it tries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edit.lab.hostile import claims, contributions, reading, strangers
from edit.lab.hostile.member import Attacker

__all__ = ["BEHAVIOURS", "Behaviour"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One thing that an attacker does, until it is cancelled."""

    name: str
    act: Callable[[Attacker], Awaitable[None]]
    unfounded: bool = False  # it only means something before the run has parameters

    @property
    def text(self) -> str:
        """What it does, in one line."""
        return (self.act.__doc__ or "").partition("\n")[0]


def _by_name(*behaviours: Behaviour) -> Mapping[str, Behaviour]:
    return MappingProxyType({behaviour.name: behaviour for behaviour in behaviours})


BEHAVIOURS = _by_name(
    Behaviour("step-times", claims.lying_step_times),
    Behaviour("heartbeats-only", claims.heartbeats_only),
    Behaviour("huge-messages", claims.huge_messages),
    Behaviour("evicted-calls", claims.evicted_calls),
    Behaviour("many-ranks", claims.many_ranks),
    Behaviour("silent-founder", claims.silent_founder, unfounded=True),
    Behaviour("unread-snapshots", reading.unread_snapshots),
    Behaviour("unread-observer", reading.unread_snapshots_as_observer),
    Behaviour("many-boxes", contributions.many_boxes),
    Behaviour("tokens", contributions.lying_tokens),
    Behaviour("bad-bytes", contributions.bad_bytes),
    Behaviour("half-contributions", contributions.half_contributions),
    Behaviour("random-bytes", contributions.random_bytes),
    Behaviour("noise", contributions.noise),
    Behaviour("x100", contributions.huge_norm),
    Behaviour("x-3", contributions.reversed_direction),
    Behaviour("not-finite", contributions.not_finite),
    Behaviour("silent-connections", strangers.silent_connections),
    Behaviour("handshakes", strangers.uncertified_handshakes),
    Behaviour("silent-calls", strangers.silent_calls),
    Behaviour("enrolments", strangers.refused_enrolments),
)
"""In the order of what they are about: claims, reads, contributions, strangers."""
