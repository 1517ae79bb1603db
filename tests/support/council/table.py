"""Councils around one table: every message, write and second is the test's. No chance, no time of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from blake3 import blake3

from edit.council import events as ev
from edit.council.machine import Council, Role, Timing
from edit.council.record import Member, Part, PartState, Record, Saved, Update, name_of, update_id

LEASE_S = 1.0
VERIFY_S = 20 * LEASE_S
STALL_S = 12 * LEASE_S
Mail = tuple[str, str, ev.Message]


def start_digest(part: int) -> str:
    return blake3(b"start %d" % part).hexdigest()


def update(part: int, outer_step: int, grant: int, base: str, content: str = "") -> Update:
    """An update from this state; its content decides its id."""
    found = update_id("run", part, outer_step, base, content.encode())
    return Update(part, outer_step, grant, found, base, blake3(f"{base} {found}".encode()).hexdigest())


class Table:
    """Members that run, all voters unless `learners` says so.

    Args:
        voters: peer_ids, a letter each, oldest first.
        learners: members without a vote, with all state.
        blank: peers that were not let in yet.
        owners: who owns each part.
        council: the machine.
        stall_peers: see `Timing`.
        changes: to the record.
    """

    def __init__(
        self,
        voters: str = "abc",
        *,
        learners: str = "",
        blank: str = "",
        owners: str = "a",
        council: type[Council] = Council,
        stall_peers: int = 1,
        **changes: Any,
    ) -> None:
        self.now, self._type, self._stall_peers = 100.0, council, stall_peers
        self.mail: list[Mail] = []
        self.cut = set[str]()  # peers that nothing reaches or leaves
        self.idle = set[str]()  # members that take no update that is offered
        self.waiting = ""  # members whose peers wait for an update of part 0, and say so all the time
        self.works = True  # whether holds, adoptions and fetches are carried out at once
        self.log: list[tuple[str, ev.Effect]] = []  # all effects but messages and writes
        self.disks: dict[str, Saved] = {}
        self.states: dict[str, list[PartState]] = {}
        self.councils: dict[str, Council] = {}
        values: dict[str, Any] = {
            "members": {peer_id: Member(incarnation=1) for peer_id in voters + learners},
            "voters": tuple(name_of(peer_id, 1) for peer_id in voters),
            "parts": tuple(Part(owner=o, grant=1, outer_step=0, digest=start_digest(i)) for i, o in enumerate(owners)),
        }
        self.first = Record(**{"run_id": "run", "lineage": 1, "term": 1, "version": 1} | values | changes)
        for peer_id in voters + learners:
            self.disks[peer_id] = Saved(incarnation=1, term=1, record=self.first)
            self.states[peer_id] = [PartState(0, part.digest) for part in self.first.parts]
        for peer_id in blank:
            self.disks[peer_id], self.states[peer_id] = Saved(incarnation=1), []
        for peer_id in (*voters, *learners, *blank):
            self.start(peer_id)

    # -- what members do ---------------------------------------------------------------------------------------------------

    def start(self, peer_id: str) -> None:
        """Start a member from its disk; all are connected with it."""
        saved = Saved.decode(self.disks[peer_id].encode(), peer_id)
        member = Member(incarnation=saved.incarnation)
        if saved.record is not None and peer_id in saved.record.members:
            member = replace(saved.record.members[peer_id], incarnation=saved.incarnation)
        timing = Timing(
            heartbeat_s=LEASE_S / 4,
            lease_s=LEASE_S,
            forget_s=10 * LEASE_S,
            verify_s=VERIFY_S,
            stall_s=STALL_S,
            stall_peers=self._stall_peers,
        )
        self.councils[peer_id] = self._type("run", peer_id, member, saved, self.states[peer_id], timing, self.now)
        for other in self.councils.keys() - {peer_id}:
            self.handle(peer_id, ev.Connected(other))
            self.handle(other, ev.Connected(peer_id))

    def kill(self, peer_id: str) -> None:
        """Kill a member; the others' connections to it break."""
        del self.councils[peer_id]
        for other in list(self.councils):
            self.handle(other, ev.Disconnected(peer_id))

    def wipe(self, peer_id: str, incarnation: int) -> None:
        """Lose the disk of a member that does not run."""
        self.disks[peer_id], self.states[peer_id] = Saved(incarnation=incarnation), []

    def handle(self, peer_id: str, event: ev.Event) -> list[ev.Effect]:
        """Give a member an event; post its messages, and do its work."""
        effects = self.councils[peer_id].handle(event, self.now)
        for effect in effects:
            match effect:
                case ev.Save(saved):
                    self.disks[peer_id] = saved
                case ev.Send(to, message):
                    self.mail.append((self.name(peer_id), to, message))
                case _:
                    self.log.append((peer_id, effect))
                    if self.works:
                        self._work(peer_id, effect)
        return effects

    def _work(self, peer_id: str, effect: ev.Effect) -> None:
        states = self.states[peer_id]
        match effect:
            case ev.Hold(held):
                states[held.part] = replace(states[held.part], held=held)
                self.handle(peer_id, ev.Held(held))
            case ev.Adopt(part):
                held_update = states[part].held
                assert held_update is not None
                states[part] = PartState(held_update.outer_step, held_update.digest)
                self.handle(peer_id, ev.Applied(part, held_update.outer_step, held_update.digest))
            case ev.Fetch(part, outer_step) if part < len(states) and states[part].outer_step > outer_step:
                self.handle(peer_id, ev.Failed(part, effect, "what is here did not lead there", is_forked=True))
            case ev.Fetch(part, outer_step, _, digest, source):
                found = self.states[source][part] if part < len(self.states[source]) else PartState()
                if found.held is not None:
                    found = PartState(found.held.outer_step, found.held.digest)
                if (found.outer_step, found.digest) == (outer_step, digest) and source not in self.cut:
                    states += [PartState()] * (part + 1 - len(states))
                    states[part] = found
                    self.handle(peer_id, ev.Applied(part, outer_step, digest))
                else:
                    self.handle(peer_id, ev.Failed(part, effect, "the source has it not"))
            case ev.SendOffer(sent):
                for other in self.councils.keys() - {peer_id} - self.cut - self.idle:
                    if peer_id not in self.cut:
                        self.handle(other, ev.Offered(self.name(peer_id), sent))
            case _:
                pass

    # -- what the test does ------------------------------------------------------------------------------------------------

    def say(self, sender: str, to: str, message: ev.Message) -> list[ev.Message]:
        """Give `to` a message, as from this name; return its answers to the sender."""
        effects = self.handle(to, ev.Received(sender, message))
        peer_id = sender.partition("#")[0]
        answers = [effect.message for effect in effects if isinstance(effect, ev.Send) and effect.peer_id == peer_id]
        return answers

    def deliver(self, which: Callable[[Mail], bool] = lambda mail: True) -> None:
        """Deliver messages, and those that follow, until none is left; drop what is cut off, or is not to be delivered."""
        while self.mail:
            self.deliver_one(which)

    def deliver_one(self, which: Callable[[Mail], bool] = lambda mail: True) -> None:
        """Deliver the first message, or drop it, as `deliver`."""
        sender, to, message = mail = self.mail.pop(0)
        through = not {sender.partition("#")[0], to} & self.cut
        if to in self.councils and through and which(mail):
            self.handle(to, ev.Received(sender, message))

    def run(self, seconds: float, only: Collection[str] | None = None, step_s: float = 0.05) -> None:
        """Let time pass, at all members or some, and deliver what they say."""
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            for peer_id in sorted(only if only is not None else self.councils):
                if peer_id in self.councils:
                    self.handle(peer_id, ev.Tick())
                    if peer_id in self.waiting:
                        self.handle(peer_id, ev.Wanted(0, self.states[peer_id][0].outer_step))
            self.deliver()

    def elect(self, peer_id: str) -> Council:
        """Make this member the leader, at once: its timer ends first."""
        council = self.councils[peer_id]
        council._election_at = self.now
        self.handle(peer_id, ev.Tick())
        self.deliver()
        assert council.role is Role.LEADER
        return council

    def make(self, owner: str, part: int = 0, content: str = "") -> Update:
        """Let the engine of an owner make the next update; nothing is delivered."""
        council = self.councils[owner]
        assert council.record is not None
        state = self.states[owner][part]
        made = update(part, state.outer_step + 1, council.record.parts[part].grant, state.digest, content)
        self.handle(owner, ev.Made(made))
        return made

    def steps(self, part: int = 0) -> dict[str, int]:
        """The outer step of a part at each member that runs."""
        return {peer_id: self.states[peer_id][part].outer_step for peer_id in self.councils}

    @property
    def leaders(self) -> list[str]:
        """Who leads."""
        return [peer_id for peer_id, council in self.councils.items() if council.role is Role.LEADER]

    @property
    def record(self) -> Record:
        """The newest record of all disks of members that run."""
        return max((r for c in self.councils.values() if (r := c.record) is not None), key=lambda record: record.stamp)

    def name(self, peer_id: str) -> str:
        return name_of(peer_id, self.disks[peer_id].incarnation)

    def done(self, kind: type[ev.Effect], peer_id: str = "") -> list[Any]:
        """The effects of this kind so far."""
        return [effect for who, effect in self.log if isinstance(effect, kind) and peer_id in ("", who)]
