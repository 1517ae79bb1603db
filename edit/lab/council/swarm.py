"""A swarm in virtual time: members with disks and clocks, engines that make updates, and a network that loses messages."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from blake3 import blake3

from edit.council import events as ev
from edit.council.machine import Council, Role, Timing
from edit.council.record import Member, Part, PartState, Phase, Record, Saved, Update, name_of, peer_of, update_id
from edit.lab.council.plan import Fault, Plan
from edit.lab.council.truth import Broken, Truth

__all__ = ["Host", "Swarm", "applied"]

MOST_EVENTS_PER_S = 2000  # of all members; more is a busy loop


@dataclass(slots=True)
class Host:
    """One member: what survives a kill, and what does not."""

    peer_id: str
    incarnation: int = 1
    disk: Saved | None = None
    states: list[PartState] = field(default_factory=list)
    kept: dict[tuple[int, int], str] = field(default_factory=dict)  # digests of earlier states that its updates lead to

    council: Council | None = None  # None: it does not run
    process: int = 0  # how many times it was started
    stopped: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what came while it was stopped, in order
    torn: int = 0  # it is killed after so many further effects
    offset: float = 0.0  # its clock is ahead by so much
    rate: float = 1.0
    tick_at: float = math.inf
    engines: dict[int, int] = field(default_factory=dict)  # the grants that it serves, by part
    sending: set[tuple[str, str]] = field(default_factory=set)  # updates on their way, by receiver
    leaving: bool = False
    left: bool = False  # it is no member any more

    @property
    def name(self) -> str:
        return name_of(self.peer_id, self.incarnation)

    @property
    def leads(self) -> bool:
        return self.council is not None and self.council.role is Role.LEADER


class Swarm:
    """All members. Raises Broken as soon as something does not hold.

    Args:
        plan: what to simulate.
        council: the machine.
        lines: gets a line for each thing that happens; None: none.
        keeps_name: a member whose disk was lost comes back in its old life. It must not: see `edit.council.record.Member`.
    """

    def __init__(
        self, plan: Plan, council: type[Council] = Council, lines: list[str] | None = None, *, keeps_name: bool = False
    ) -> None:
        self.plan, self._council, self._lines, self._keeps_name = plan, council, lines, keeps_name
        self.now, self.events = 0.0, 0
        self.faults = Counter[str]()
        self._random = Random(f"run {plan.seed}")
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count().__next__
        self._blocked = set[tuple[str, str]]()  # no message comes through, from and to
        self._cut = set[tuple[str, str]]()  # nor between these, for good: the first has evicted the second
        self._loss, self._duplicates = plan.loss, plan.duplicates
        self._wiped = set[str]()  # names whose disk was lost
        self._healed = False
        self.hosts = {f"m{i}": Host(f"m{i}", rate=self._random.uniform(0.98, 1.02)) for i in range(plan.members)}
        self.truth = Truth(self._found(), self._holders)
        for host in self.hosts.values():
            self.at(0.0 if int(host.peer_id[1:]) < plan.voters else self._random.uniform(0.5, 3.0), self._starter(host))
        for fault in plan.faults:
            self.at(fault.at, self._striker(fault))

    # -- virtual time ------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at this time."""
        heapq.heappush(self._queue, (when, self._number(), action))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Go on until this time, or until it is done; return whether it is."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if done():
                return True
        self.now = until
        return done()

    def run_all(self) -> float:
        """Run the plan: faults, healing, two further commits of all parts at all members. Return the seconds these took.

        Where some members are behind a relay, it goes on until these own nothing that others can.
        """
        self.run(self.plan.faulty_s)
        self.heal()
        healed, wanted = self.now, [part.outer_step + 2 for part in self.truth.newest.parts]

        def done() -> bool:
            present = [host.states for host in self.hosts.values() if not host.left]
            return all(len(each) == len(wanted) for each in present) and all(
                state.outer_step >= step for states in present for state, step in zip(states, wanted, strict=True)
            )

        if not self.run(healed + self.plan.recovery_s, done):
            steps = {host.peer_id: [state.outer_step for state in host.states] for host in self.hosts.values()}
            raise Broken(f"no two commits at all members within {self.plan.recovery_s:.0f} s: {wanted} wanted, {steps}")
        recovery_s = self.now - healed
        self._wait_for_direct_owners()
        return recovery_s

    def _wait_for_direct_owners(self) -> None:
        """Rule 11: within a few leases after all is well, relayed members own nothing. Verifiers stay what they are."""
        plan = self.plan
        if not plan.relayed or plan.verify or plan.liar >= 0:
            return

        def done() -> bool:
            record = self.truth.newest
            voters, direct = {peer_of(name) for name in record.voters}, record.direct
            return not voters & direct - record.distrusted or all(part.owner in direct for part in record.parts)

        most_s = 5.0 + 20 * self.truth.newest.lease_s * len(self.truth.newest.parts)
        if not self.run(self.now + most_s, done):
            owners = [part.owner for part in self.truth.newest.parts]
            raise Broken(f"members behind a relay own parts that others could, {most_s:.0f} s later: {owners}")

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        if self._lines is not None:
            self._lines.append(f"{self.now:8.3f} {line}")

    # -- members -----------------------------------------------------------------------------------------------------------

    def _found(self) -> Record:
        """Give the first voters their disks; return the record on them."""
        digests = [blake3(b"start %d" % i).hexdigest() for i in range(self.plan.parts)]
        voters = list(self.hosts.values())[: self.plan.voters]
        record = Record(
            run_id="run",
            lineage=1,
            term=0,
            version=0,
            members={host.peer_id: self._member(host) for host in voters},
            voters=tuple(host.name for host in voters),
            parts=tuple(Part(owner="m0", grant=0, outer_step=0, digest=digest) for digest in digests),
            lease_s=self.plan.lease_s,
            verify=self.plan.verify,
        )
        for host in voters:
            host.disk = Saved(incarnation=host.incarnation, record=record)
            host.states = [PartState(0, digest) for digest in digests]
            host.kept = {(i, 0): digest for i, digest in enumerate(digests)}
        return record

    def _member(self, host: Host) -> Member:
        return Member(incarnation=host.incarnation, relayed=int(host.peer_id[1:]) in self.plan.relayed)

    def _starter(self, host: Host) -> Callable[[], None]:
        return lambda: self.start(host)

    def start(self, host: Host) -> None:
        """Start a member's process from its disk."""
        if host.council is not None or host.left:
            return
        if host.disk is None:
            host.disk = Saved(incarnation=host.incarnation)
        saved = Saved.decode(host.disk.encode(), host.peer_id)  # as a restart does
        host.process += 1
        host.offset = self._random.uniform(0.0, 1000.0)
        host.stopped, host.waiting, host.engines, host.sending, host.torn = False, [], {}, set(), 0
        lease_s = self.plan.lease_s
        timing = Timing(
            heartbeat_s=lease_s / 4, lease_s=lease_s, forget_s=6 * lease_s, verify_s=8 * lease_s, stall_s=self.plan.stall_s
        )
        member = self._member(host)
        host.council = self._council_of(host)("run", host.peer_id, member, saved, host.states, timing, self._clock(host))
        self.note(f"{host.name} starts")
        for other in self.hosts.values():
            if other is not host and other.council is not None:
                self._later(self._latency(), other, ev.Connected(host.peer_id))
                self._later(self._latency(), host, ev.Connected(other.peer_id))
        self._schedule(host)

    def _council_of(self, host: Host) -> type[Council]:
        """Return the machine of a member."""
        return self._council

    def kill(self, host: Host, seconds: float = math.inf) -> None:
        """Kill its process; start it again after so many seconds."""
        if host.council is None:
            return
        self.note(f"{host.name} is killed")
        host.council, host.tick_at = None, math.inf
        for other in self.hosts.values():
            if other.council is not None and (host.peer_id, other.peer_id) not in self._blocked:
                self._after(self._latency(), other, self._breaker(host, other))
        if seconds < math.inf:
            self.at(self.now + seconds, self._starter(host))

    def _breaker(self, host: Host, other: Host) -> Callable[[], None]:
        """Return what tells a member that its connection to a killed one broke, unless there is another by then."""
        process = host.process

        def tell() -> None:
            if host.process == process:
                self.handle(other, ev.Disconnected(host.peer_id))

        return tell

    def wipe(self, host: Host, seconds: float) -> None:
        """Kill it, and lose its disk; unless that loses for good what the others need."""
        if not self._can_lose(host):
            return
        self.kill(host, seconds)
        self.note(f"{host.name} loses its disk")
        if not self._keeps_name:
            self._wiped.add(host.name)
            host.incarnation += 1
        host.disk, host.states, host.kept = None, [], {}

    def _can_lose(self, host: Host) -> bool:
        """Whether the others can still elect a leader and fetch every part. Else only an operator's `recover` helps."""
        if not self.truth.commits or host.disk is None or host.disk.record is None:
            return False
        if self._keeps_name:
            return True
        names = {other.name for other in self.hosts.values() if other is not host and not other.left}
        records = [
            other.disk.record for other in self.hosts.values() if other.disk is not None and other.disk.record is not None
        ]
        newest = max(records, key=lambda record: record.stamp)
        others = [other for other in self.hosts.values() if other is not host and len(other.states) == len(newest.parts)]
        return all(record.agreed(names) for record in records if record.stamp >= self.truth.newest.stamp) and all(
            any(other.states[i].has(part) for other in others)
            for parts in (newest.parts, self.truth.newest.parts)
            for i, part in enumerate(parts)
        )

    def _holders(self, record: Record, i: int) -> Collection[str]:
        has = {
            host.name
            for host in self.hosts.values()
            if i < len(host.states)
            and (host.states[i].has(record.parts[i]) or host.states[i].outer_step > record.parts[i].outer_step)
        }
        return has | self._wiped

    def handle(self, host: Host, event: ev.Event) -> None:
        """Give an event to a member, and carry out the effects."""
        council = host.council
        if council is None:
            return
        if host.stopped:
            host.waiting.append(lambda: self.handle(host, event))
            return
        self.events += 1
        if self.events > MOST_EVENTS_PER_S * (self.now + 1):
            raise Broken(f"{self.events} events in {self.now:.1f} s: a busy loop")
        if self._lines is not None and not isinstance(event, ev.Tick):
            self.note(f"  {host.name} <- {event}")
        led = host.leads
        effects = council.handle(event, self._clock(host))
        if host.leads and not led:
            self.note(f"{host.name} leads in term {council.term}")
        for effect in effects:
            if host.torn:
                host.torn -= 1
                if not host.torn:
                    self.kill(host, self._random.uniform(0.05, 2.0))
            if host.council is not council:
                return
            self._carry_out(host, effect)
        self._schedule(host)

    def _carry_out(self, host: Host, effect: ev.Effect) -> None:
        if self._lines is not None and not isinstance(effect, ev.Send):
            self.note(f"  {host.name} -> {effect}")
        match effect:
            case ev.Save(saved):
                host.disk = saved
            case ev.Send(peer_id, message):
                if isinstance(message, ev.Append):
                    self.truth.leads(host.name, message.stamp)
                self._send(host, self.hosts[peer_id], ev.Received(host.name, message))
            case ev.Committed(record):
                self.truth.committed(record)
                self._shut_out(host, record)
                if host.peer_id not in record.members and host.name not in record.electors:
                    host.left = True
                    self.kill(host)
                    if host.leaving and host.peer_id not in record.evicted:
                        self.at(self.now + self._random.uniform(0.1, 3.0), lambda: self._come_back(host))
            case ev.Hold():
                self._after(self._random.uniform(0.001, 0.02), host, lambda: self._hold(host, effect))
            case ev.Adopt():
                self._after(self._random.uniform(0.0, 0.02), host, lambda: self._adopt(host, effect))
            case ev.Fetch():
                source = self.hosts[effect.source]
                process, found = source.process, self._found_at(source, effect)
                self._after(self._transfer_s(), host, lambda: self._fetched(host, effect, source, process, found))
            case ev.SendOffer(update):
                for other in self.hosts.values():
                    self._offer(host, other, self._offered_to(other, update))
            case ev.Serve(part, grant):
                council = host.council
                assert council is not None and council.committed is not None
                self.truth.serves(host.name, host.process, council.committed, part, grant)
                host.engines[part] = grant
                self._think(host, part, grant)
            case ev.Cease(part):
                host.engines.pop(part, None)
            case _:
                pass

    def _shut_out(self, host: Host, record: Record) -> None:
        """Cut the evicted off from this member, once they vote no more, as the shell does; and end them when all have."""
        for peer_id in record.evicted.keys() - {name.partition("#")[0] for name in record.electors}:
            self._cut |= {(host.peer_id, peer_id), (peer_id, host.peer_id)}
            if record == self.truth.newest:
                evicted = self.hosts[peer_id]
                evicted.left = True
                self.kill(evicted)

    def _come_back(self, host: Host) -> None:
        """Start a member again that has left, from the disk that it left with."""
        if host.peer_id not in self.truth.newest.evicted:
            host.left, host.leaving = False, False
            self.start(host)

    # -- a shell's work ----------------------------------------------------------------------------------------------------

    def _hold(self, host: Host, effect: ev.Hold) -> None:
        update = effect.update
        if self._random.random() < 0.02 and not self._healed:
            self.handle(host, ev.Failed(update.part, effect, "the disk is full"))
            return
        state = host.states[update.part]
        if (state.outer_step + 1, state.digest) == (update.outer_step, update.base):
            host.states[update.part] = replace(state, held=update)
        self.handle(host, ev.Held(update))

    def _adopt(self, host: Host, effect: ev.Adopt) -> None:
        held = host.states[effect.part].held
        if held is None or held.id != effect.update:
            raise Broken(f"{host.name} adopts {effect.update[:8]} of part {effect.part}, and holds another")
        self._move(host, effect.part, PartState(held.outer_step, applied(host.states[effect.part].digest, held)))

    def _found_at(self, source: Host, effect: ev.Fetch) -> str:
        """Return the digest of the state that a source can give: its own, or one that the updates which it keeps lead to."""
        if effect.part >= len(source.states):
            return ""
        state = source.states[effect.part]
        if state.held is not None and state.held.id == effect.update:
            return applied(state.digest, state.held)
        return source.kept.get((effect.part, effect.outer_step), "")

    def _fetched(self, host: Host, effect: ev.Fetch, source: Host, process: int, found: str) -> None:
        if effect.part < len(host.states) and host.states[effect.part].outer_step > effect.outer_step:
            self.handle(host, ev.Failed(effect.part, effect, "what is here did not lead there", is_forked=True))
        elif self._reaches(host, source, process) and found == effect.digest:
            self._move(host, effect.part, PartState(effect.outer_step, found))
        else:
            self.handle(host, ev.Failed(effect.part, effect, "the source has it not"))

    def _reaches(self, host: Host, source: Host, process: int) -> bool:
        """Whether this process of a source answers a member now."""
        here = source.council is not None and source.process == process and not source.stopped
        return here and not {(host.peer_id, source.peer_id), (source.peer_id, host.peer_id)} & self._blocked

    def _move(self, host: Host, part: int, state: PartState) -> None:
        council = host.council
        assert council is not None and council.record is not None
        while len(host.states) < len(council.record.parts):
            host.states.append(PartState())
        self.truth.state(council.record.lineage, part, state)
        host.states[part] = state
        host.kept[part, state.outer_step] = state.digest
        host.kept.pop((part, state.outer_step - 8), None)
        self.handle(host, ev.Applied(part, state.outer_step, state.digest))
        if part in host.engines:
            self._think(host, part, host.engines[part])

    def _think(self, host: Host, part: int, grant: int) -> None:
        """Train, and merge a round of contributions, which come from the other members."""
        self._after(self._random.uniform(0.2, 0.6) + 3 * self.plan.latency_s, host, lambda: self._make(host, part, grant))

    def _make(self, host: Host, part: int, grant: int) -> None:
        council = host.council
        if council is None or council.record is None or host.engines.get(part) != grant:
            return
        made = self._next_update(host, part, grant)
        if made is not None:
            self.handle(host, ev.Made(made))

    def _next_update(self, host: Host, part: int, grant: int) -> Update | None:
        """Return what an engine makes next; None: nothing."""
        state = host.states[part]
        manifest = b"the same" if self.plan.same_bytes else b"%d" % self._random.getrandbits(64)
        step = state.outer_step + 1
        made = Update(part, step, grant, update_id("run", part, step, state.digest, manifest), state.digest, "0" * 64)
        return replace(made, digest=applied(state.digest, made))

    def _offered_to(self, other: Host, update: Update) -> Update:
        """Return what an owner offers to another member when it is told to offer this."""
        return update

    def _arrived(self, other: Host, sender: str, update: Update) -> None:
        """An update came whole."""
        self.handle(other, ev.Offered(sender, update))

    def _offer(self, host: Host, other: Host, update: Update) -> None:
        """Stream an update to another member, unless one is on its way, or it would be refused."""
        held = other.states[update.part].held if update.part < len(other.states) else None
        key = other.peer_id, update.id
        if other is host or other.council is None or key in host.sending or held == update:
            return
        if other.council.why_refused(host.name, update):
            return
        host.sending.add(key)
        process, sender = other.process, host.name

        def arrive() -> None:
            host.sending.discard(key)
            if other.process == process and not {(host.peer_id, other.peer_id), (other.peer_id, host.peer_id)} & self._blocked:
                self._arrived(other, sender, update)

        self._after(self._transfer_s(), host, arrive)

    # -- the network, clocks -----------------------------------------------------------------------------------------------

    def _send(self, sender: Host, receiver: Host, event: ev.Received) -> None:
        if (sender.peer_id, receiver.peer_id) in self._blocked | self._cut or receiver.council is None:
            return
        copies = 2 if self._random.random() < self._duplicates else 1
        for _ in range(copies):
            if self._random.random() >= self._loss:
                self._later(self._latency(), receiver, event)

    def _later(self, seconds: float, host: Host, event: ev.Event) -> None:
        """Deliver an event, if the process that it was sent to is still there."""
        self._after(seconds, host, lambda: self.handle(host, event))

    def _after(self, seconds: float, host: Host, action: Callable[[], None]) -> None:
        """Do something in a process, if it is still there."""
        process = host.process

        def act() -> None:
            if host.council is None or host.process != process:
                return
            if host.stopped:
                host.waiting.append(act)
            else:
                action()

        self.at(self.now + seconds, act)

    def _latency(self) -> float:
        return self.plan.latency_s * self._random.uniform(0.5, 1.5)

    def _transfer_s(self) -> float:
        return self._latency() + self._random.uniform(0.01, 0.15)

    def _clock(self, host: Host) -> float:
        return host.offset + self.now * host.rate

    def _schedule(self, host: Host) -> None:
        """Tick when the council asks for it."""
        council = host.council
        if council is None or host.stopped:
            return
        wakeup = council.next_wakeup()
        when = max(self.now, (wakeup - host.offset) / host.rate + 1e-9) if wakeup < math.inf else math.inf
        if when == host.tick_at or when == math.inf:
            return
        host.tick_at = when

        def tick() -> None:
            if host.tick_at == when and host.council is council:
                host.tick_at = math.inf
                self.handle(host, ev.Tick())

        self.at(when, tick)

    # -- faults ------------------------------------------------------------------------------------------------------------

    def _striker(self, fault: Fault) -> Callable[[], None]:
        return lambda: self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        host = self.hosts[f"m{fault.member}"]
        if host.council is None:
            return
        self.faults[fault.kind] += 1
        self.note(f"{fault.kind} {host.name} for {fault.seconds:.2f} s")
        match fault.kind:
            case "kill" if fault.torn:
                host.torn = fault.torn
            case "kill":
                self.kill(host, fault.seconds)
            case "power cut":
                for each in self.hosts.values():
                    self.kill(each, fault.seconds + self._random.uniform(0.0, 0.02))
            case "wipe":
                self.wipe(host, fault.seconds)
            case "stop":
                host.stopped = True
                self.at(self.now + fault.seconds, lambda: self._continue(host))
            case "partition" | "one-way":
                side = {f"m{i}" for i in fault.others} | {host.peer_id}
                pairs = {(a, b) for a in side for b in self.hosts.keys() - side}
                self._block(pairs if fault.kind == "one-way" else pairs | {(b, a) for a, b in pairs}, fault.seconds)
            case "jump":
                host.offset += 10 * fault.seconds
                self._schedule(host)
            case "drop":  # a connection breaks, and is made again
                for other in (self.hosts[f"m{i}"] for i in fault.others if f"m{i}" != host.peer_id):
                    for one, two in ((host, other), (other, host)):
                        self._later(0.0, one, ev.Disconnected(two.peer_id))
                        self._later(fault.seconds, one, ev.Connected(two.peer_id))
            case "leave" if host.states and sum(bool(other.states) for other in self.hosts.values()) > 2:
                self._after(3.0, host, lambda: self._stop_waiting(host))
                host.leaving = True
                self.handle(host, ev.LeaveAsked())
            case "evict" if self._can_lose(host):
                for each in self.hosts.values():  # the order goes to who leads; the others refuse it
                    self.handle(each, ev.Evict(host.peer_id, "an order"))
            case "pause":
                self.handle(host, ev.SetPhase(Phase.PAUSED))
                self._later(fault.seconds, host, ev.SetPhase(Phase.RUNNING))
            case _:
                pass

    def _stop_waiting(self, host: Host) -> None:
        """A member that asked to leave ends, whether it was told or not."""
        host.left = not self.truth.newest.knows(host.name)
        self.kill(host, 0.1)
        if host.left:
            self.at(self.now + 1.0, lambda: self._come_back(host))
        host.leaving = False

    def _block(self, pairs: set[tuple[str, str]], seconds: float) -> None:
        self._blocked |= pairs
        self.at(self.now + seconds, lambda: self._blocked.difference_update(pairs))

    def _continue(self, host: Host) -> None:
        if host.stopped:
            host.stopped = False
            waiting, host.waiting = host.waiting, []
            for action in waiting:
                action()
            host.tick_at = math.inf
            self._schedule(host)

    def heal(self) -> None:
        """Mend everything."""
        self.note("everything is mended")
        self._healed = True
        self._blocked.clear()
        self._loss = self._duplicates = 0.0
        for host in self.hosts.values():
            host.torn = 0
            self._continue(host)
            self.start(host)


def applied(digest: str, update: Update) -> str:
    """Return the digest of a state after an update."""
    return blake3(f"{digest} {update.id}".encode()).hexdigest()
