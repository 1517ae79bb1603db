"""What one member has of each part: it holds the updates of owners, adopts what the record names, fetches what it lacks; and,
where it is the owner, offers the updates of its engines.

A part's state moves on a committed record only (I3). An update is held beside the state, at most one: that of the newest grant.
A state that was adopted, and is not among those that led to what the record names, is kept: an operator decides (rule 19).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from edit.council.events import (
    Adopt,
    Applied,
    Cease,
    Damaged,
    Effect,
    Ended,
    Failed,
    Fetch,
    Held,
    Hold,
    Message,
    Noticed,
    Refused,
    Release,
    SendOffer,
    Serve,
)
from edit.council.record import Part, PartState, Phase, Record, Update, peer_of
from edit.errors import LocalProtocolError

__all__ = ["Parts"]


@dataclass(slots=True)
class _Part:
    state: PartState
    staging: Hold | None = None  # under way
    moving: Adopt | Fetch | None = None  # under way
    sources: int = 0  # how many were tried for this outer step
    ahead_at: float = math.inf  # since when the leader names an earlier outer step than is here
    asked: tuple[int, int] = (0, 0)  # of the last Fetch: the record's term, and whether it goes back (-1), stays, or goes on
    forked: tuple[int, int] | None = None  # likewise, of the one that found the state here forked: it is not repeated
    kept: str = ""  # why the state is kept, in words
    told: str = ""  # the digest of the state of which that was noticed
    own: Update | None = None  # an engine here made it
    served: int | None = None  # the grant that an engine here serves
    to_release: Release | None = None  # said to the leader until the grant is another
    disputed: float = math.inf  # the outer step before the update that it disputes; of who does not verify it is over with that
    ended: Ended | None = None  # likewise, until the run is finished


class Parts:
    """All parts, at one member.

    Args:
        me: this member's name.
        states: what its disk has; empty when it was not let in yet.
        connected: the peers that it has a connection to; kept by the machine.
        emit: takes each effect.
        tell_leader: sends a message to the leader, who may be this member.
        say_states: tells the leader what is on disk.
    """

    def __init__(
        self,
        me: str,
        states: Sequence[PartState],
        connected: Set[str],
        emit: Callable[[Effect], None],
        tell_leader: Callable[[Message], None],
        say_states: Callable[[], None],
    ) -> None:
        self._me, self._peer_id = me, peer_of(me)
        self._connected, self._emit, self._tell_leader, self._say_states = connected, emit, tell_leader, say_states
        self._parts = [_Part(state) for state in states]
        self._record: Record | None = None  # the newest that is committed
        self._again_at = math.inf

    @property
    def states(self) -> tuple[PartState, ...]:
        """What is on disk of each part."""
        return tuple(part.state for part in self._parts)

    @property
    def work(self) -> tuple[Adopt | Fetch | None, ...]:
        """What is under way of each part."""
        return tuple(part.moving for part in self._parts)

    @property
    def kept(self) -> tuple[str, ...]:
        """Why nothing of a part is adopted or fetched, in words; '' where that is not so (rule 19)."""
        return tuple(part.kept for part in self._parts)

    @property
    def next_wakeup(self) -> float:
        """When `advance` says something again; inf: never."""
        return self._again_at

    # -- what the record says ----------------------------------------------------------------------------------------------

    def commit(self, record: Record) -> None:
        """Follow a newly committed record."""
        first, self._record = self._record is None, record
        self._parts += [_Part(PartState()) for _ in record.parts[len(self._parts) :]]
        for i, (mine, part) in enumerate(zip(self._parts, record.parts, strict=True)):
            if mine.own is not None and not mine.own.continues(part):
                mine.own = None
            decided = part.outer_step > mine.disputed and self._peer_id not in (part.owner, *part.verifiers)
            if mine.to_release is not None and (mine.to_release.grant != part.grant or decided):
                mine.to_release, mine.disputed = None, math.inf
            if mine.ended is not None and mine.ended.grant != part.grant:
                mine.ended = None
            if first and self._peer_id in (part.owner, *part.verifiers):
                # I4: an engine before this process may have offered an update under this grant; this one makes another.
                # And who verifies must have seen all that the owner did under a grant.
                mine.to_release = Release(i, part.grant, "its process has started", away=False)
                self._tell_leader(mine.to_release)
            self._follow(i, part)

    def _follow(self, i: int, part: Part) -> None:
        """Go where the committed record is (I3), and serve the part if it is this member's."""
        mine = self._parts[i]
        if mine.served is not None and (part.owner != self._peer_id or part.grant != mine.served):
            self._emit(Cease(i, mine.served))
            mine.served = None
        if mine.moving is not None:
            return
        state = mine.state
        if state.outer_step == part.outer_step and state.digest == part.digest:
            mine.forked, mine.kept = None, ""
            if part.owner == self._peer_id and mine.served is None and mine.to_release is None:
                mine.served = part.grant
                self._emit(Serve(i, part.grant, part.outer_step))
        elif state.outer_step > part.outer_step:
            return  # the news is old (I5), or the others have lost what is here (`compare`)
        elif state.leads_to(part):
            mine.moving = Adopt(i, part.outer_step, part.update, part.digest)
            self._emit(mine.moving)
        elif mine.staging is None or mine.staging.update.id != part.update:
            assert self._record is not None
            self._fetch(i, self._record)

    def compare(self, record: Record, now: float, patience_s: float) -> None:
        """Rule 19: see whether the leader, whose record this is, names earlier outer steps than were adopted here.

        For patience_s that means nothing: what was fetched may be newer than what it said before.
        """
        for i, (mine, part) in enumerate(zip(self._parts, record.parts, strict=False)):
            mine.ahead_at = min(mine.ahead_at, now) if mine.state.outer_step > part.outer_step else math.inf
            if now >= mine.ahead_at + patience_s and mine.moving is None:
                self._fetch(i, record)

    def _fetch(self, i: int, record: Record) -> None:
        """Get what is missing from the owner, else from the others in turn; nothing where the state here is kept (rule 19)."""
        mine, part = self._parts[i], record.parts[i]
        ahead, behind = mine.state.outer_step > part.outer_step, mine.state.outer_step < part.outer_step
        asked = record.term, behind - ahead
        if mine.forked == asked:
            return
        members = [part.owner, *sorted(record.members.keys() - {part.owner})]
        peers = [peer_id for peer_id in members if peer_id != self._peer_id]
        sources = [peer_id for peer_id in peers if peer_id in self._connected] or peers
        if not sources:
            return  # it is alone; again when `advance` is called
        damaged = mine.state.outer_step == part.outer_step and bool(mine.state.digest)
        if damaged and not mine.sources:
            text = f"outer step {part.outer_step} is {part.digest[:12]}, here it is {mine.state.digest[:12]}"
            self._emit(Noticed(f"part {i} is damaged, or another one: {text}"))
        source = sources[mine.sources % len(sources)]
        mine.sources += 1
        mine.asked, mine.moving = asked, Fetch(i, part.outer_step, part.update, part.digest, source, damaged)
        self._emit(mine.moving)

    # -- what the shell did ------------------------------------------------------------------------------------------------

    def applied(self, event: Applied) -> None:
        """An Adopt or Fetch was carried out."""
        mine = self._parts[event.part]
        if mine.moving is None:
            raise LocalProtocolError(f"part {event.part} was applied, but nobody asked for that")
        mine.moving, mine.sources, mine.forked, mine.kept = None, 0, None, ""
        mine.state = PartState(event.outer_step, event.digest)
        self._say_states()  # so that it may vote, and own the part, at once
        self._follow(event.part, self._committed_part(event.part))

    def failed(self, event: Failed) -> None:
        """A Hold, Adopt or Fetch came to nothing."""
        mine = self._parts[event.part]
        if isinstance(event.work, Hold):
            mine.staging = None
            if mine.own == event.work.update:
                mine.own, mine.to_release = None, Release(event.part, event.work.update.grant, event.reason, away=True)
                self._tell_leader(mine.to_release)
            elif event.is_wrong or event.is_unclear:
                self.dispute(Release(event.part, event.work.update.grant, event.reason, away=event.is_wrong))
            return
        mine.moving = None
        if isinstance(event.work, Adopt):  # what is held is of no use
            mine.state = PartState(mine.state.outer_step, mine.state.digest)
        elif event.is_forked:
            self._keep(event.work, mine)

    def _keep(self, fetch: Fetch, mine: _Part) -> None:
        """Rule 19: what was adopted here stays. Said once of each state."""
        step, theirs = mine.state.outer_step, fetch.outer_step
        text = f"part {fetch.part} stays at outer step {step}, which was agreed on: the others, at {theirs}, went on without it"
        text += ", as after restoring a backup. To keep it, stop them, say recover here, rejoin there; "
        text += "to go on with theirs, rejoin here"
        mine.forked, mine.kept = mine.asked, text
        if mine.told != mine.state.digest:
            mine.told = mine.state.digest
            self._emit(Noticed(text))

    def damaged(self, event: Damaged) -> None:
        """The shell found that what is here is not what others have. What is under way finds that, too."""
        mine = self._parts[event.part]
        if mine.moving is None and mine.state.outer_step == event.outer_step:
            mine.state = PartState(event.outer_step, event.digest)
            self._say_states()
            self._follow(event.part, self._committed_part(event.part))

    def held(self, event: Held) -> None:
        """A Hold was carried out. If the part went on meanwhile, it is of no use."""
        update = event.update
        mine = self._parts[update.part]
        hold, mine.staging = mine.staging, None
        if hold is None or hold.update != update:
            raise LocalProtocolError(f"part {update.part} holds {update.id[:12]}, but nobody asked for that")
        if (update.outer_step, update.base) == (mine.state.outer_step + 1, mine.state.digest):
            mine.state = PartState(mine.state.outer_step, mine.state.digest, update)
            self._say_states()  # I6: it is on disk
        if self._record is not None:
            self._follow(update.part, self._record.parts[update.part])

    # -- a member: updates of owners ---------------------------------------------------------------------------------------

    def why_refused(self, sender: str, update: Update, record: Record | None) -> str:
        """Return why this update is not held, or ''. record: the newest that is on disk."""
        if record is None or update.part >= min(len(record.parts), len(self._parts)):
            return "there is no such part"
        part, mine = record.parts[update.part], self._parts[update.part]
        if peer_of(sender) != part.owner or update.grant != part.grant:  # I4
            return f"part {update.part} is {part.owner}'s, with grant {part.grant}"
        if (update.outer_step, update.base) != (mine.state.outer_step + 1, mine.state.digest):
            return f"part {update.part} is at outer step {mine.state.outer_step} here, or differs"
        decided = part.outer_step >= update.outer_step and update.id != part.update
        if decided or isinstance(mine.moving, Adopt):
            return f"outer step {update.outer_step} of part {update.part} is decided"
        if mine.staging is not None and mine.staging.update != update:
            return f"another update of part {update.part} is being written"
        if mine.state.held is not None and mine.state.held != update and mine.state.held.grant >= update.grant:
            return f"part {update.part} holds another update of grant {mine.state.held.grant}"
        return ""

    def offered(self, sender: str, update: Update, record: Record | None) -> None:
        """Hold an owner's update, unless there is a reason not to."""
        reason = self.why_refused(sender, update, record)
        if reason:
            self._emit(Refused(reason))
            return
        mine = self._parts[update.part]
        if mine.staging is None and mine.state.held != update:
            mine.staging = Hold(update)
            self._emit(mine.staging)

    # -- an owner ----------------------------------------------------------------------------------------------------------

    def made(self, update: Update, record: Record | None) -> None:
        """Offer what an engine here made, to every member. One grant makes one update to an outer step (I4)."""
        reason = self.why_refused(self._me, update, record)
        mine = self._parts[update.part] if not reason else None
        if mine is None or mine.served != update.grant or mine.own is not None:
            self._emit(Refused(reason or f"grant {update.grant} of part {update.part} is not served, or has made an update"))
            return
        mine.own, mine.staging = update, Hold(update)
        self._emit(mine.staging)
        self._emit(SendOffer(update))

    def ended(self, event: Ended) -> None:
        """An engine here is done with its part."""
        self._parts[event.part].ended = event
        self._tell_leader(event)

    def judge_anew(self) -> None:
        """Take back what is disputed: by other keys it may be right. The shell is offered it again, and says so again."""
        for mine in self._parts:
            if mine.disputed < math.inf:
                mine.to_release, mine.disputed = None, math.inf

    def dispute(self, release: Release) -> None:
        """The owner's update is not what this member computed, or is none; or, if not `away`, that cannot be told here."""
        mine = self._parts[release.part]
        before = mine.to_release
        if before is None or before.grant != release.grant or mine.disputed < math.inf:  # else the grant is over in any case
            mine.to_release, mine.disputed = release, mine.state.outer_step
        self._tell_leader(release)

    # -- time --------------------------------------------------------------------------------------------------------------

    def advance(self, now: float, again_s: float) -> None:
        """Say again what had no effect yet, once per again_s (I7). Called after each event."""
        if now >= self._again_at:
            self._again_at = math.inf
            for i in range(len(self._parts)):
                self._again(i)
        if self._again_at == math.inf and any(map(self._pending, range(len(self._parts)))):
            self._again_at = now + again_s

    def _pending(self, i: int) -> bool:
        """Whether this part waits for somebody else."""
        if self._record is None:
            return False
        mine, part = self._parts[i], self._record.parts[i]
        behind = mine.moving is None and mine.state.outer_step <= part.outer_step and mine.state.digest != part.digest
        ends = mine.ended is not None and self._record.phase is not Phase.FINISHED
        return behind or ends or mine.own is not None or mine.to_release is not None

    def _again(self, i: int) -> None:
        mine, record = self._parts[i], self._record
        assert record is not None
        self._follow(i, record.parts[i])
        if mine.own is not None:
            self._emit(SendOffer(mine.own))
        if mine.to_release is not None:
            self._tell_leader(mine.to_release)
        if mine.ended is not None and record.phase is not Phase.FINISHED:
            self._tell_leader(mine.ended)

    def _committed_part(self, i: int) -> Part:
        assert self._record is not None
        return self._record.parts[i]
