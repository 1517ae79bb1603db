"""The simulated swarm with one member that lies: as the owner of parts, and as the leader about itself.

wrong     what it offers does not follow from the contributions
nothing   it collects contributions, and offers nothing
two       it offers one update to some members, and another one, which does not follow, to the others
slander   it says all the time that the owners of all parts stall

A leader that lies does nothing about what others say of it as an owner; otherwise it keeps the rules. What a leader can do that
lies about the record, nothing here stops. Beside what `Truth` sees: an update that does not follow is no outer step where a
member that does not lie verifies it, and nobody is blamed because of one that slanders. That the others go on is seen at the
end, as ever.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from edit.council import events as ev
from edit.council.machine import Council
from edit.council.record import Part, Record, Update, peer_of, update_id
from edit.lab.council.plan import Plan
from edit.lab.council.swarm import Host, Swarm, applied
from edit.lab.council.truth import Broken

__all__ = ["LyingSwarm"]

EACH_LEASES = 2.0  # in which each peer says that it waits


class LyingSwarm(Swarm):
    """See above; and `Swarm`. believed: the updates that became outer steps and do not follow, by id."""

    def __init__(self, plan: Plan, council: type[Council] = Council, lines: list[str] | None = None) -> None:
        self._liar = f"m{plan.liar}"
        self._lying = _deaf(council, self._liar)
        self._wrong: dict[str, Update] = {}  # that do not follow, by id
        random = Random(f"who gets the other {plan.seed}")
        self._gets_other = {f"m{i}" for i in range(plan.members) if random.random() < 0.5}
        self._second: dict[str, Update] = {}  # by the id of the first
        self._verifiers: dict[tuple[int, int], tuple[str, ...]] = {}  # by part and grant, as committed records say
        self.believed = set[str]()
        super().__init__(plan, council, lines)
        for host in self.hosts.values():
            self._say_again(host)

    def _council_of(self, host: Host) -> type[Council]:
        return self._lying if host.peer_id == self._liar else super()._council_of(host)

    def _carry_out(self, host: Host, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Committed):
            for i, part in enumerate(effect.record.parts):
                self._look(i, part, effect.record)
        elif isinstance(effect, ev.Noticed) and self.plan.lie == "slander" and " is taken from " in effect.text:
            raise Broken(f"one that slanders is believed: {effect.text}")
        super()._carry_out(host, effect)

    def _look(self, i: int, part: Part, record: Record) -> None:
        """See whether an outer step follows from contributions, where somebody was to see to that."""
        self._verifiers.setdefault((i, part.grant), part.verifiers)
        if (update := self._wrong.get(part.update)) is None:
            return
        self.believed.add(update.id)
        honest = [peer_id for peer_id in self._verifiers.get((i, update.grant), ()) if peer_id != self._liar]
        if honest:
            raise Broken(
                f"{record.stamp}: outer step {part.outer_step} of part {i} does not follow, and {honest[0]} verifies it"
            )

    # -- peers that train --------------------------------------------------------------------------------------------------

    def _say_again(self, host: Host) -> None:
        """The peer beside each member waits for all parts, always; the one that slanders says more."""

        def say() -> None:
            if host.council is not None and host.council.committed is not None:
                for i, state in enumerate(host.states):
                    self.handle(host, ev.Wanted(i, state.outer_step))
                if self.plan.lie == "slander" and host.peer_id == self._liar:
                    self._slander(host)
            self.at(self.now + EACH_LEASES * self.plan.lease_s, say)

        self.at(self._random.uniform(0.0, self.plan.lease_s), say)

    def _slander(self, host: Host) -> None:
        for i, part in enumerate(self.truth.newest.parts):
            for other in self.hosts.values():
                if other is not host:
                    self._send(host, other, ev.Received(host.name, ev.Stall(i, part.grant, part.outer_step, waits=True)))

    # -- what it offers ----------------------------------------------------------------------------------------------------

    def _next_update(self, host: Host, part: int, grant: int) -> Update | None:
        made = super()._next_update(host, part, grant)
        if made is None or host.peer_id != self._liar or self.plan.lie == "slander":
            return made
        if self.plan.lie == "nothing":
            return None
        if self.plan.lie == "wrong":
            self._wrong[made.id] = made
            return made
        found = update_id("run", part, made.outer_step, made.base, b"another than %s" % made.id.encode())
        other = replace(made, id=found)
        self._second[made.id] = self._wrong[found] = replace(other, digest=applied(made.base, other))
        return made

    def _offered_to(self, other: Host, update: Update) -> Update:
        """Some of the members are offered the other one."""
        return self._second.get(update.id, update) if other.peer_id in self._gets_other else update

    def _arrived(self, other: Host, sender: str, update: Update) -> None:
        """Who verifies a part disputes what does not follow."""
        council = other.council
        record = council.record if council is not None else None
        verifies = record is not None and other.peer_id in record.parts[update.part].verifiers
        if verifies and other.peer_id != self._liar and update.id in self._wrong:
            self.handle(other, ev.Disputed(update.part, update.grant, f"{peer_of(sender)} is not believed"))
        else:
            super()._arrived(other, sender, update)


def _deaf(council: type[Council], liar: str) -> type[Council]:
    """Return the machine of a member that as a leader does nothing about what others say of it."""

    class Deaf(council):  # type: ignore[misc,valid-type]
        _moved: dict[int, set[str]]

        def _owns(self, i: int) -> bool:
            parts = self.record.parts
            return i < len(parts) and parts[i].owner == liar

        def _leave_stallers(self) -> None:
            before = dict(self._moved)
            super()._leave_stallers()
            self._moved = {i: avoid for i, avoid in self._moved.items() if i in before or not self._owns(i)}

        def _serve_member(self, sender: str, message: ev.Release | ev.Ended | ev.Leave | ev.Claim) -> None:
            if not (isinstance(message, ev.Release) and peer_of(sender) != liar and self._owns(message.part)):
                super()._serve_member(sender, message)

    return Deaf
