"""The council's machine at one member: who leads, what is committed, who votes, who owns which part.

`handle(event, now)` returns the effects that the shell carries out, in order: what must be on disk comes before the messages
that say so. The machine is Raft (Ongaro and Ousterhout 2014, with the trial vote and joint lists of Ongaro's thesis) whose log
is one entry: a version of the whole record. A member is FOLLOWER, TRIAL, CANDIDATE or LEADER.

Invariants

I1  One digest per (lineage, part, outer step): rules 12 and 13.
I2  What the record names, a quorum holds on disk: rules 10 and 13.
I3  A part's state moves as a whole, and on a committed record only: rule 15.
I4  One grant makes at most one update to an outer step, and grants only grow: rules 11 and 12.
I5  An outer step never goes back within a lineage, while no quorum forgets what it had on disk: rules 5 and 13. Where one
    did, as with folders restored from a backup, no member that has it goes back, nor loses it, without an operator: rule 19.
I6  A vote, an accepted record and a held update are on disk before they are said: rules 3, 5 and 12.
I7  Nothing waits without a bound: what had no effect is said again each again_s (a fifth of a lease) or heartbeat.

Rules

Who counts
 1. A message counts when its sender is a member of the newest record here, in that life, or one of its voters. The shell says
    who the sender is. Everybody else gets nothing; but a Hello lets a peer in (rule 9) unless it was evicted, or comes from a
    machine that has another key than the one for which the name is enrolled. A member that
    has no record takes the first that a leader sends it, and only ever one of its own run. What another lineage says does not
    count, but for the log.
    A term or a grant may be FAR ahead of the one here, a version or an outer step FARTHER, not more: a member that lies cannot
    use up the numbers. Voters in terms beyond that are followed where the others that are connected are no quorum: else one
    that lies could part all for good. Which settings and which model a run has never changes.
 2. A quorum is more than half of the voters, or exactly half with the oldest among them; while the voters change, of both
    lists. So of two members the older goes on alone.

Elections
 3. A voter that has not heard a leader for 1 to 1.5 leases, or whose connection to the leader broke 0.02 to 0.22 s ago (and up
    to two round trips more), asks for a trial vote; a quorum of these lets it take the next term, vote for itself, on disk,
    and ask for votes. Whoever hears a leader refuses a trial and ignores the other. Else a vote is given once per term, on
    disk first, to a candidate whose stamp is at least the one here. A refusal carries the refuser's term, so that a candidate
    that is behind learns it. A candidate that cannot win any more asks for another trial after as short a time; one that
    hears too little after three round trips, at least a lease, and up to twice as long.
 4. The winner stamps its record with the term as a new version, and so commits whatever it had accepted before.

Versions
 5. Append of a term at least as late as the one here makes a follower. A record with a newer stamp is written to disk, then
    Accepted. Hello from a member with an older stamp is answered by News: a record that was accepted anywhere may be taken
    anywhere if its stamp is newer, but that is no acceptance. It counts only while no leader is heard: who hears one, or leads,
    gets all versions by Append. It may be from a peer of the run that is not known here but in that record: all voters may have
    changed while this member was away.
 6. One version is on its way at a time. It is committed when a quorum has accepted it, in its own term. What is asked for
    meanwhile is gathered in the next one. The leader tells everybody at once, and again at each heartbeat.
 7. A leader that hears no quorum for two leases follows. So does one that hears of a later term, or is no voter any more.
 8. lease_s in force is the configured one, or 8 times the median round trip if that is more: the leader's own measurement
    for all, in the record, and each member's for itself where it is longer. With latencies above the configured lease nothing
    could ever be agreed. A follower measures only when it asks for votes, and whoever was stopped then answered late; so what
    it measured counts no longer than until a leader's record is committed: no more than that record says from then on.

Members and voters
 9. Hello makes a peer a member, without a vote. A member that has all parts becomes a voter, as long as there are fewer than
    7. A life that is over (a larger incarnation came) and a voter that was silent for forget_s vote no more. Evict and Leave
    remove a member. Who leaves is gathered for a heartbeat, and when all that are live leave, nobody is removed: the swarm
    ends as it is, and all come back to it. A smaller incarnation is refused.
10. The list of voters changes in two versions: the first has both lists (rule 2), the second only the new. It changes only
    when nothing is on its way, and when a live quorum of the new list holds what the record names of all parts (I2).

Owners
11. A part whose owner, or a verifier of it, was silent for a lease, or whose connection broke, goes to the live voter with the
    fewest parts that is up to date on it, with the next grant. A new leader gives the one that it replaces no fresh lease. The
    owner may Release a grant: when it was restarted, because the engine before may have offered something, and when its disk
    fails. A verifier may Release what it disputes, or when it was restarted; then others get the part, if there are others.
    So they do when so many voters Release an update that is none that those who are left are no quorum: it could never be a
    step, and who refuses it without a reason could as well have said nothing. Whoever cannot judge it Releases it, too, and
    blames nobody: if no other says that it is none, and those of the others that are live are no quorum, its owner has it
    merged again, with the next grant. Who has a record with other keys than the leader's is not heard on this; where a newer
    record has others, a member takes back what it disputes, and judges again.
    Whom two others disagreed with owns and verifies nothing, if others can. Disputes are in the record, until one of the two is
    evicted or enrolled anew; who did not verify in time (rule 13), only the leader knows that waited for it. Of those that can,
    they get it first to whom others connect without a relay. To such a voter that has been live for 5 leases a part moves from
    an owner behind a relay; and where loads differ by two or more, one part moves to a voter that has been live as long.
12. An owner's update is held when its grant, its outer step and its base are those of the record and the state here; it
    replaces only what was held for an older grant. When it is on disk the leader hears of it: Accepted says what is held. See
    `edit.council.parts`.
13. An update becomes the outer step when its grant is the record's, its outer step the next, its base the record's digest, and
    when a quorum, and all verifiers of the part, say themselves that they hold it. No word of its owner is needed. Where a
    quorum holds it, and a verifier does not for verify_s more, at least a lease, others verify, with the next grant.
14. When all engines have ended under their present grants, the run is FINISHED, until it is resumed, with new grants. A run
    that drains is not paused: it is resumed, likewise with new grants, or finishes. All parts are to end at last_step: the
    step after that of the part that is furthest, for its round may be open, or closed and its update on the way; where the
    run is paused, so that none is, the step of that part. (Where a part was still being merged when the run was paused, and
    it was drained before the update was there, that part ends one step after the others.)
15. A committed record that names the next outer step is adopted where its update is held, and fetched elsewhere. A digest
    that is not the record's is damage, mended by a snapshot; never an assertion. So is a state that most voters came to
    otherwise, which the shell asks for when an update is for other parameters than are here: it is not held. But see
    rule 19.

Who comes in
16. The record has the holders of the authority's key. Where one of them redeems an invitation it says Claim, until a committed
    record has for which key the name was enrolled last, and with which invitation. The first claim of an invitation counts, and
    of two invitations for one name the later. So whoever has the key may redeem any, at the same time, and each is used once.
    Only who is enrolled is let in; and nobody by a name that was evicted, also before somebody was enrolled with it. With a
    later invitation for a member its life is over, and nobody connects to where it was: whatever the clocks say, the
    incarnation of who comes next, with the key of that invitation, is later.
17. Supersede puts another authority in the place of the present one. Its key has one member, the only holder then. The one
    before stays in the record until all members say that they have a certificate of the new one. So whoever saw a new one
    committed takes no version without it: else the key of the one before, and a leader that lies, could bring in another.

Owners that stall
18. Wanted says that the peer beside this member waits for an owner's update. Where a part has stood still under one grant for
    stall_s since then, by the clock here, while a leader was heard and the run was not paused, the member says Stall to all
    voters. It does so also where it holds an update: others may hold another, or none. A voter without such a peer, to whom
    the part has stood still as long, says so, too, once two others' peers wait. A word is of one grant and outer step, and so
    is over with either.
    When the voters that have not said so are no quorum, and at least stall_peers have peers that wait, the part goes to others,
    and this owner gets no part for ten times stall_s if others can. Every voter counts that itself: one that was counted, and
    whose leader changes nothing for four leases, neither follows nor elects that leader for twenty. So fewer than it takes to
    stop all depose nobody, and a leader does not stay by being deaf. What an owner stops, it stops for about stall_s in ten.

Members that were set back
19. A leader has all versions of its own term. One that for LOST_LEASES lacks some that are here is noticed.
    What a member adopted was agreed on. Where its leader names an earlier outer step of a part for LOST_LEASES, or another one
    of the same number, or one to which another history led, a quorum has lost what is here: its folders are of an earlier day,
    or a leader lies. The shell can tell, by the chain of updates, when it is asked to fetch: its answer is Failed, as forked.
    Then the state is kept: nothing of the part is adopted or fetched, which `status` says, until the record names what is
    here, or follows it, or an operator recovers here or has this member rejoin. It is looked at again in each term: one that
    lied may have led. Where the updates that are kept do not reach back so far, nobody can tell, and the state is replaced,
    unless it was found to be forked before, which is on disk. What was only accepted or held is not kept so.

role       event                       condition                                  effects                           next
---------  --------------------------  -----------------------------------------  --------------------------------  ---------
FOLLOWER   lease over, or connection   is a voter that may lead (rule 3)          Ask (trial)                       TRIAL
           to the leader broke
TRIAL      Vote                        quorum granted                             Save (term + 1, own vote), Ask    CANDIDATE
CANDIDATE  Vote                        quorum granted                             Save (record, new stamp), Append  LEADER
TRI, CAN   no quorum in time                                                      Ask (trial)                       TRIAL
any        Vote                        refused with a later term                  Save (term)                       FOLLOWER
any        Ask                         hears a leader                             trial: Vote (refused)             same
any        Ask (trial)                                                            Vote                              same
any        Ask                         later term                                 Save (term, vote), Vote           FOLLOWER
any        Append                      an older term                              Accepted (with the later term)    same
any        Append                      term at least as late                      Save if newer, Accepted           FOLLOWER
any        Append                      its committed is the stamp here            Committed                         FOLLOWER
LEADER     Accepted                    a later term                               Save (term)                       FOLLOWER
LEADER     Accepted                    quorum has this stamp                      Committed, Append                 LEADER
LEADER     any                         nothing on its way, something to change    Save (record), Append             LEADER
LEADER     heartbeat_s is over         a quorum was heard in two leases           Append                            LEADER
LEADER     Tick                        no quorum was heard in two leases          Noticed                           FOLLOWER
any        Hello                       member with an older stamp                 News                              same
any        News                        no leader is heard                         Save if newer                     same
any        Here                                                                   Hello                             same
LEADER     Hello, Leave, Evict,        rules 1, 9, 11, 13, 14, 16                 a part of the next version        LEADER
           SetPhase, Release, Ended,
           Entrust, Supersede, Claim
any        Claim (of this member)                                                 Claim to the leader               same
any        Offered                     rule 12                                    Hold, else Refused                same
any        Held                                                                   Accepted to the leader            same
any        Wanted, Stall               rule 18                                    Stall to all voters               same
any        Stall                       enough say so, the leader does nothing     as if its connection broke        FOLLOWER
LEADER     Stall                       enough say so                              a part of the next version        LEADER
owner      Made                        its grant is served                        Hold, SendOffer (again each       same
                                                                                  again_s)
LEADER     Accepted                    a quorum holds the next update (rule 13)   a part of the next version        LEADER
any        Committed                   a part is ahead                            Adopt, else Fetch                 same
any        Append                      a part is behind for LOST_LEASES           Fetch, which fails (rule 19)      same
any        Failed                      of a Fetch, as forked                      Noticed, once                     same
any        Committed                   owner changed                              Cease, Serve                      same
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median_low
from typing import Any

from blake3 import blake3

from edit.council.events import (
    Accepted,
    Adopt,
    Append,
    Applied,
    Ask,
    Claim,
    Committed,
    Connected,
    Damaged,
    Disconnected,
    Disputed,
    Effect,
    Ended,
    Entrust,
    Event,
    Evict,
    Failed,
    Fetch,
    Held,
    Hello,
    Here,
    Leave,
    LeaveAsked,
    Made,
    Message,
    News,
    Noticed,
    Offered,
    Received,
    Refused,
    Release,
    Save,
    Send,
    SetPhase,
    Stall,
    Supersede,
    Tick,
    Vote,
    Wanted,
)
from edit.council.parts import Parts
from edit.council.record import (
    MOST_COUNT,
    MOST_ENROLLED,
    MOST_EVICTED,
    MOST_HOLDERS,
    MOST_LEASE_S,
    MOST_MEMBERS,
    MOST_ROOTS,
    MOST_UNKNOWN,
    MOST_VOTERS,
    Member,
    Part,
    PartState,
    Phase,
    Record,
    Saved,
    Stamp,
    Update,
    check_count,
    check_seconds,
    incarnation_of,
    is_quorum,
    name_of,
    peer_of,
)

__all__ = ["Council", "Known", "Role", "Timing"]

FAR = 2**20  # terms, and grants, that a message may be ahead
FARTHER = 2**32  # versions, and outer steps, likewise: there may be many in a second
ROUND_TRIPS = 8  # a lease is at least so many median round trips
SAMPLES = 4  # of which the shortest counts, per peer
DEAF_LEASES = 4  # after which a leader that does nothing about an owner that stalls is left
LOST_LEASES = 4  # for which a leader names an earlier outer step than is here, until it counts as lost (rule 19)
SHUNNED_LEASES = 20  # for which it is neither followed nor elected then
PARDONED = 10  # times stall_s, after which an owner that stalled may own parts again
MOST_TERM = MOST_COUNT // 4  # to which voters that are too far ahead are followed: later ones are still left
STEADY_LEASES = 5  # a voter that was live for so long may get parts of others
NOBODY = Stamp(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How fast a council notices. Seconds."""

    heartbeat_s: float = 0.25
    lease_s: float = 1.0  # the shortest; see rule 8
    forget_s: float = 60.0
    verify_s: float = 60.0  # in which all who verify a part hold what a quorum holds; at least the lease in force
    stall_s: float = 1800.0  # in which an owner makes an update that peers wait for; longer than the longest honest round
    stall_peers: int = 1  # the peers without which a round may come to nothing, beside the owner's own

    def __post_init__(self) -> None:
        check_seconds("lease_s", self.lease_s, MOST_LEASE_S)
        check_seconds("heartbeat_s", self.heartbeat_s, self.lease_s / 2)
        check_seconds("forget_s", self.forget_s, 1e9)
        check_seconds("verify_s", self.verify_s, 1e9)
        check_seconds("stall_s", self.stall_s, 1e10)
        check_count("stall_peers", self.stall_peers)


class Role(Enum):
    """See the table."""

    FOLLOWER = "follower"
    TRIAL = "trial"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Known:
    """What a leader knows of a member, for `status`."""

    live: bool
    silent_s: float  # since it said something; inf: never
    states: tuple[PartState, ...]  # what it says it has on disk; empty: nothing was said


@dataclass(slots=True)
class _Heard:
    """What a leader knows of a peer."""

    name: str = ""  # whose the rest is
    at: float = -math.inf  # when it was heard last
    since: float = math.inf  # since when it has been live without a break
    broken: bool = False  # its connection broke after that
    stamp: Stamp = NOBODY  # of its record
    states: tuple[PartState, ...] = ()  # what it says it has on disk; it lies at most about itself


@dataclass(slots=True)
class _Stalled:
    """Who says of a part that its owner stalls (rule 18)."""

    grant: int
    outer_step: int
    names: set[str]  # all who say so
    waiting: set[str]  # of these, whose own peers wait
    enough_at: float = math.inf  # when they were enough


class Council:
    """The machine of one member.

    Args:
        run_id: the run of its certificate.
        peer_id: this member.
        member: where it is; its incarnation is that of `saved`.
        saved: what is on disk. `Saved(incarnation=...)` for a member that joins.
        states: what is on disk of each part, in order; empty for a member that joins.
        timing: equal at all members.
        now: seconds of a monotonic clock, as in each `handle`.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        member: Member,
        saved: Saved,
        states: Sequence[PartState],
        timing: Timing,
        now: float,
    ) -> None:
        self._run_id = run_id
        self._peer_id, self._me, self._member = peer_id, name_of(peer_id, saved.incarnation), member
        self._saved, self._timing, self._now = saved, timing, now
        self._effects: list[Effect] = []
        self._round_trips: dict[str, list[float]] = {}  # seconds, by peer_id, the last SAMPLES
        self._measured_at: dict[str, float] = {}  # by peer_id, when the last of these was
        self._electors, self._round_trip_s, self._measured_lease_s, self._lease_s = frozenset[str](), 0.0, 0.0, 0.0
        self._note_record()
        self._connected = set[str]()
        self._told: dict[str, str] = {}  # by peer_id, what was noticed of it last
        self._older = set[str]()  # peers of an earlier lineage
        self._far: dict[str, int] = {}  # by name of a voter, a term that it said, too far ahead
        self._parts = Parts(self._me, states, self._connected, self._effects.append, self._tell_leader, self._say_states)

        self.role = Role.FOLLOWER
        self._committed: Record | None = None  # the newest known to be
        self._leader = ""  # the last that was heard, a peer_id
        self._led_term = 0  # the term that it leads in
        self._leader_at = -math.inf  # when
        self._enrols_since = NOBODY  # the earliest version that is known to enrol the same as the present one
        self._set_back_at = math.inf  # since when it has an earlier version of its own term than is here
        self._draws = 0
        self._election_at = now + self._lease_s * (1 + self._draw() / 2)
        self._hello_at = now
        self._leaving = False
        self._votes, self._refused = set[str](), set[str]()  # a candidate's, by name

        self._led_s = 0.0  # so long a leader was heard, and the run not paused: the clock of rule 18
        self._stood = dict[int, tuple[tuple[int, int], float]]()  # by part: the grant and outer step, and since when
        self._wanted = dict[int, tuple[tuple[int, int], float]]()  # likewise, since when the peer beside this member waits
        self._stalled = dict[int, _Stalled]()  # by part
        self._stallers = dict[str, float]()  # by peer: until when it should own nothing
        self._shunned = dict[str, float]()  # by peer: until when it is no leader here

        # a leader's:
        self._draft: Record | None = None  # what the next version changes, with the stamp of the present one
        self._accepted = set[str]()  # names that have the present version on disk
        self._heard: dict[str, _Heard] = {}  # by peer_id
        self._moved: dict[int, set[str]] = {}  # parts that change hands with the next version, and who should not get them
        # By part: a grant and an outer step, and the voters that cannot hold the next update, with whether it is none to them.
        self._cannot_hold: dict[int, tuple[tuple[int, int], dict[str, bool]]] = {}
        self._unverified: dict[int, tuple[Update, float]] = {}  # by part: what a quorum holds, since when
        self._against: dict[str, set[str]] = {}  # by peer: with whom an update was not verified in time
        self._ended: dict[int, int] = {}  # the grants of the parts whose engine ended
        self._leavers: dict[str, float] = {}  # who asked to leave, and when at first
        self._former = frozenset[str]()  # who had a part in the version before: told once when this one is committed
        self._beat_at = math.inf

    # -- questions ---------------------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record | None:
        """The newest record on disk, committed or not."""
        return self._saved.record

    @property
    def committed(self) -> Record | None:
        """The newest record that is known to be committed."""
        return self._committed

    @property
    def leader(self) -> str:
        """The peer_id of the leader that is heard now, or ''."""
        if self.role is Role.LEADER:
            return self._peer_id
        return self._leader if self._hears_leader else ""

    @property
    def term(self) -> int:
        """The term it is in."""
        return self._saved.term

    @property
    def states(self) -> tuple[PartState, ...]:
        """What this member has on disk of each part."""
        return self._parts.states

    @property
    def live(self) -> frozenset[str]:
        """The peers that this leader hears, with itself; empty at others."""
        return (
            frozenset(peer_id for peer_id in self._heard if self._is_live(peer_id)) if self.role is Role.LEADER else frozenset()
        )

    @property
    def settled(self) -> bool:
        """Whether all that this leader hears have the committed record and what it names; a follower does not know."""
        record = self._committed
        if record is None:
            return False
        return self.role is not Role.LEADER or all(
            heard.stamp >= record.stamp
            and [(state.outer_step, state.digest) for state in heard.states] == [(p.outer_step, p.digest) for p in record.parts]
            for heard in self._heard.values()
            if self._is_fresh(heard)
        )

    @property
    def lease_s(self) -> float:
        """The lease in force (rule 8)."""
        return self._lease_s

    @property
    def work(self) -> tuple[Adopt | Fetch | None, ...]:
        """What is under way here of each part."""
        return self._parts.work

    @property
    def kept(self) -> tuple[str, ...]:
        """Why nothing of a part is adopted or fetched here, in words; '' where that is not so (rule 19)."""
        return self._parts.kept

    def known(self, peer_id: str, now: float) -> Known | None:
        """Return what this leader knows of a member; None at others."""
        if self.role is not Role.LEADER:
            return None
        heard = self._heard_of(peer_id)
        live = peer_id == self._peer_id or (not heard.broken and heard.at + self._lease_s > now)
        return Known(live, 0.0 if peer_id == self._peer_id else max(0.0, now - heard.at), heard.states)

    def why_refused(self, sender: str, update: Update) -> str:
        """Return why an update that an owner begins to send would not be held, or '' (rule 12)."""
        return self._parts.why_refused(sender, update, self.record) if self._knows(sender) else "not a member"

    def next_wakeup(self) -> float:
        """Return when a Tick can change something; inf: only other events can."""
        times = [self._parts.next_wakeup]
        if self._wants_hello:
            times.append(self._hello_at)
        if self.role is Role.LEADER:
            if self._committed is self.record:  # else what it would change waits for that version
                times += [since + self._verify_s for _, since in self._unverified.values()]
            times += [self._beat_at, *(heard.at + self._lease_s for heard in self._heard.values() if self._is_fresh(heard))]
        elif self._may_stand:
            times.append(self._election_at)
        elif self._hears_leader:
            times.append(self._leader_at + self._lease_s)
        return min(times)

    # -- events ------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do, in this order. Raises LocalProtocolError for answers that nobody asked for."""
        self._note_time(now)
        match event:
            case Received(sender, message, key):
                self._receive(sender, message, key)
            case Connected(peer_id):
                self._connected.add(peer_id)
                self._hello_at = self._now
            case Disconnected(peer_id):
                self._disconnected(peer_id)
            case Offered(sender, update):
                if self._knows(sender):
                    self._parts.offered(sender, update, self.record)
            case Made(update):
                self._parts.made(update, self.record)
            case Held():
                self._parts.held(event)
            case Applied():
                self._parts.applied(event)
            case Failed():
                fault = not self._is_outdated(event.judged_by)
                self._parts.failed(replace(event, is_wrong=event.is_wrong and fault, is_unclear=event.is_unclear and fault))
            case Damaged():
                self._parts.damaged(event)
            case Ended():
                self._parts.ended(event)
            case Disputed(part, grant, reason, is_unclear, judged_by):
                if not self._is_outdated(judged_by):
                    self._parts.dispute(Release(part, grant, reason, away=not is_unclear))
            case Claim():
                self._tell_leader(event)
            case Evict() | SetPhase() | Entrust() | Supersede():
                self._order(event)
            case Here(member):
                self._member = member
                self._hello_at = self._now
            case LeaveAsked():
                self._leaving = True
                self._hello_at = self._now
            case Wanted():
                self._want(event)
            case Tick():
                pass
        self._advance()
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def _receive(self, sender: str, message: Message, key: str = "") -> None:
        """Rule 1."""
        record = self.record
        if isinstance(message, Hello):
            self._hello(sender, message, key)
        elif record is None:
            if isinstance(message, Append):
                self._take_first(sender, message)
        elif isinstance(message, News) and message.record.lineage != record.lineage:
            if message.record.run_id == record.run_id:
                self._notice_lineage(sender, message.record.lineage)
        elif isinstance(message, News):
            if not self._hears_leader and self._is_newer(message.record) and self._may_learn(sender, message.record):
                self._follow_term(message.record.term)
                self._save(record=message.record)
        elif self._knows(sender):
            match message:
                case Append() if message.stamp.lineage == record.lineage and self._is_near(message.stamp.term):
                    self._append(sender, message)
                case Ask() if message.stamp.lineage == record.lineage and self._is_near(message.term):
                    self._ask(sender, message)
                case Vote() if self._is_near(message.term):
                    self._vote(sender, message)
                case Accepted() if message.stamp.lineage == record.lineage and self._is_near(message.term):
                    self._accept(sender, message)
                case Append(stamp) if stamp.lineage == record.lineage:
                    self._note_far(sender, stamp.term)
                case Ask(term, stamp) | Accepted(term, stamp) if stamp.lineage == record.lineage:
                    self._note_far(sender, term)
                case Vote(term):
                    self._note_far(sender, term)
                case Stall():
                    self._count_stall(sender, message)
                case Release() | Ended() | Leave() | Claim() if self.role is Role.LEADER:
                    self._serve_member(sender, message)
                case _:
                    pass

    def _notice_once(self, peer_id: str, text: str) -> None:
        """Say for the log what a peer claims. Once: a member that lies changes nothing here."""
        if self._told.get(peer_id) != text:
            self._told[peer_id] = text
            self._effects.append(Noticed(text))

    def _notice_lineage(self, sender: str, lineage: int) -> None:
        """Say that another one is of another lineage: one of the two joins anew."""
        assert self.record is not None
        peer_id, mine = peer_of(sender), self.record.lineage
        if lineage > mine:
            if self.record.knows(sender):
                text = f"{peer_id} says that the swarm was recovered: it is of lineage {lineage}, this member of {mine}"
                self._notice_once(peer_id, f"{text}, and must join anew (edit-peer swarm rejoin)")
            return
        self._older.add(peer_id)
        text = f"{peer_id} is of lineage {lineage}, not {mine}: it joins anew"
        if 2 * len(self._older & self._connected) > len(self._connected):  # then a member that lied may have let this one in
            text += ", or, where nobody recovered the swarm, this member does (edit-peer swarm rejoin)"
        self._notice_once(peer_id, text)

    def _may_learn(self, sender: str, record: Record) -> bool:
        """Rule 5: whom to believe, when the voters may have changed while this member was away."""
        mine = self.record
        assert mine is not None
        stranger = not mine.knows(sender) and peer_of(sender) not in mine.evicted
        return (mine.knows(sender) or stranger) and record.knows(sender) and record.knows(self._me)

    def _take_first(self, sender: str, append: Append) -> None:
        """Rule 1. Nothing here says who is right, so a leader that lies is believed; what shows that later is noticed."""
        record = append.record
        if record is None or record.run_id != self._run_id or self._me not in record.names or not record.has_room:
            return
        self._follow_term(record.term)
        self._save(record=record)
        self._append(sender, append)

    def _disconnected(self, peer_id: str) -> None:
        self._connected.discard(peer_id)
        if peer_id in self._heard:
            self._heard[peer_id].broken = True
        if peer_id == self._leader and self._hears_leader:
            self._leader_at = -math.inf
            self._stand_soon()

    def _advance(self) -> None:
        """What time, and the event before, make due."""
        if self.role is Role.LEADER:
            self._lead()
        elif self._may_stand and self._now >= self._election_at:
            self._stand()
        again_s = self._lease_s / 5
        self._parts.advance(self._now, again_s)
        if self._wants_hello and self._now >= self._hello_at:
            self._hello_at = self._now + again_s
            self._say_hello()
        if self.role is Role.LEADER:
            self._lead()  # what the parts, and this member, told their leader, who is here

    # -- elections (rules 3 and 4) -----------------------------------------------------------------------------------------

    def _stand(self) -> None:
        """Ask for a trial vote. It hears no leader from now on, also if its lease grows by what the answers took."""
        self.role, self._votes, self._leader_at = Role.TRIAL, {self._me}, -math.inf
        self._ask_all(self.term + 1)
        if self._agreed(self._votes):
            self._elect()

    def _elect(self) -> None:
        """The trial was won: take the next term."""
        self.role, self._votes, self._refused = Role.CANDIDATE, {self._me}, set()
        self._save(term=self.term + 1, vote=self._me)  # I6
        self._ask_all(self.term)
        if self._agreed(self._votes):
            self._win()

    def _ask_all(self, term: int) -> None:
        answers_s = max(self._timing.lease_s, 3 * self._round_trip_s)
        self._election_at = self._now + answers_s * (1 + self._draw())
        ask = Ask(term, self._stamp, self.role is Role.TRIAL, self._now)
        self._emit_each(self._electors - {self._peer_id}, ask)

    def _stand_soon(self) -> None:
        """Ask for a trial after a moment that differs between members by more than a message takes."""
        self._election_at = min(self._election_at, self._now + 0.02 + (0.2 + 2 * self._round_trip_s) * self._draw())

    def _win(self) -> None:
        record = self._saved.record
        assert record is not None
        replaced, self._enrols_since = self._replaced(), record.stamp
        self.role, self._leader, self._led_term, self._draft = Role.LEADER, self._peer_id, self.term, None
        self._heard = {p: _Heard("", self._now, self._now, p == replaced) for p in (*record.members, *self._electors)}
        self._moved, self._ended, self._leavers, self._former = {}, {}, {}, frozenset()
        self._cannot_hold, self._unverified, self._against = {}, {}, {}
        self._leave_stallers()
        self._publish(record)

    def _replaced(self) -> str:
        """Return the leader that this one replaces, or '' if it votes for this one, and so is there."""
        return self._leader if self._leader not in {peer_of(name) for name in self._votes} else ""

    def _ask(self, sender: str, ask: Ask) -> None:
        hears, peer_id = self._hears_leader, peer_of(sender)
        if self._is_shunned(peer_id):
            return
        if ask.trial:
            granted = not hears and ask.term > self.term and self._may_follow(ask.stamp)
            self._effects.append(Send(peer_id, Vote(ask.term if granted else self.term, granted, True, ask.sent)))
        elif not hears:
            granted = self._grants(sender, ask)
            if ask.term > self.term or granted:
                vote = sender if granted else ""
                self.role = Role.FOLLOWER
                self._save(term=ask.term, vote=vote)  # I6
            if granted:
                self._election_at = self._now + self._lease_s * (1 + self._draw() / 2)
            self._effects.append(Send(peer_id, Vote(self.term, granted, False, ask.sent)))

    def _grants(self, sender: str, ask: Ask) -> bool:
        """Whether a vote is given: one per term, and to nobody who may lack what is committed."""
        vote = "" if ask.term > self.term else self._saved.vote
        return ask.term >= self.term and vote in ("", sender) and self._may_follow(ask.stamp)

    def _may_follow(self, stamp: Stamp) -> bool:
        return stamp >= self._stamp

    def _vote(self, sender: str, vote: Vote) -> None:
        self._measure(sender, vote.echo)
        if not vote.granted and vote.term > self.term:
            self._follow_term(vote.term)
            self._stand_soon()
        elif not vote.granted and not vote.trial and self.role is Role.CANDIDATE and vote.term == self.term:
            self._refused.add(sender)
            if not self._agreed({*self._names} - self._refused):  # the votes are split
                self._stand_soon()
        elif vote.granted and vote.trial and self.role is Role.TRIAL and vote.term == self.term + 1:
            self._votes.add(sender)
            if self._agreed(self._votes):
                self._elect()
        elif vote.granted and not vote.trial and self.role is Role.CANDIDATE and vote.term == self.term:
            self._votes.add(sender)
            if self._agreed(self._votes):
                self._win()

    # -- a follower (rules 5 and 9) ----------------------------------------------------------------------------------------

    def _append(self, sender: str, append: Append) -> None:
        peer_id = peer_of(sender)
        if self._is_shunned(peer_id):
            return
        if self._is_current(append.stamp.term):
            if self._led_term == append.stamp.term and self._leader != peer_id:
                self._effects.append(Noticed(f"{peer_id} says that it leads in term {self._led_term}, but {self._leader} does"))
                return
            self._led_term, self._leader, self._leader_at = append.stamp.term, peer_id, self._now
            self.role = Role.FOLLOWER
            self._election_at = self._now + self._lease_s * (1 + self._draw() / 2)
            self._note_committed(append.committed)
            newer = append.record is not None and self._is_newer(append.record)
            if newer or append.stamp.term > self.term:
                record = append.record if newer else self.record
                vote = self._saved.vote if append.stamp.term == self.term else ""
                self._save(term=append.stamp.term, vote=vote, record=record)  # I6
            self._note_committed(append.committed)
            self._note_set_back(peer_id, append)
            if append.record is not None and append.record.stamp > self._stamp:
                self._notice_once(
                    peer_id, f"{peer_id} leads with a record that cannot be of this run: one of the two joins anew"
                )
        elif self.term > append.stamp.term + FAR:
            terms = f"{peer_id} leads in term {append.stamp.term}, this member is in {self.term}, as one that lied has said"
            self._notice_once(peer_id, f"{terms}: it joins anew (edit-peer swarm rejoin)")
        self._say_states(peer_id, append.sent)

    def _note_set_back(self, leader: str, append: Append) -> None:
        """Rule 19: see whether the leader lacks versions of its own term, or outer steps, that are here."""
        older = append.stamp < self._stamp
        self._set_back_at = min(self._set_back_at, self._now) if older else math.inf
        if self._now >= self._set_back_at + LOST_LEASES * self._lease_s:
            text = f"{leader} leads, and has lost versions of the record that are here"
            self._notice_once(leader, f"{text}: was its folder restored from an earlier backup?")
        named = append.record if older else self.record
        if named is not None and append.stamp <= self._stamp:
            self._parts.compare(named, self._now, LOST_LEASES * self._lease_s)

    def _is_current(self, term: int) -> bool:
        return term >= self.term

    def _say_states(self, to: str = "", echo: float = -math.inf) -> None:
        """Tell the leader, or whoever says so, what is on disk. At the leader itself nothing has to be said."""
        to = to or (self._leader if self._hears_leader else "")
        if to and to != self._peer_id:
            self._effects.append(Send(to, Accepted(self.term, self._stamp, self._parts.states, echo)))

    def _is_newer(self, record: Record) -> bool:
        """Whether this version may replace the one on disk (I5): it is of the same run, and no number is far ahead (rule 1)."""
        mine = self.record
        assert mine is not None
        if record.stamp <= mine.stamp or _what_stays(record) != _what_stays(mine):
            return False
        trusted = {root.certificate for root in record.roots}
        if self._committed is not None and any(root.certificate not in trusted for root in self._committed.roots[-1:]):
            return False  # rule 17
        pairs = zip(record.parts, mine.parts, strict=True)
        near = all(new.grant <= old.grant + FAR and new.outer_step <= old.outer_step + FARTHER for new, old in pairs)
        return near and self._is_near(record.term) and record.version <= mine.version + FARTHER and record.has_room

    def _note_committed(self, stamp: Stamp) -> None:
        record = self.record
        if record is not None and record.stamp == stamp:
            self._commit(record)

    def _commit(self, record: Record) -> None:
        if self._committed is None or record.stamp > self._committed.stamp:
            self._committed = record
            if self.role is not Role.LEADER:
                self._bound_round_trips(record.lease_s / ROUND_TRIPS)
            self._note_steps(record)
            self._effects.append(Committed(record))
            self._parts.commit(record)

    def _say_hello(self) -> None:
        if self._leaving:
            self._tell_leader(Leave())
            return
        hello = Hello(self._stamp, self._member)
        if self.role is Role.LEADER:
            self._hello(self._me, hello)
            return
        known = self.record.members.keys() | self._electors if self.record is not None else self._connected
        self._emit_each({*known, *self._connected} - {self._peer_id}, hello)

    # -- a leader: versions (rules 6, 7 and 8) -----------------------------------------------------------------------------

    def _lead(self) -> None:
        """Step down, publish what there is to change, say that it leads."""
        while self.role is Role.LEADER:
            heard = {name for name in self._names if self._heard_within(peer_of(name), 2 * self._lease_s)}
            if not self._agreed(heard | {self._me}):
                self._effects.append(Noticed("no quorum was heard for two leases"))
                self._step_down()
                return
            if self._committed is not self.record:
                break
            record = self._next_version()
            if record == self.record:
                break
            self._publish(record)
        if self.role is Role.LEADER and self._now >= self._beat_at:
            self._broadcast()

    def _publish(self, record: Record) -> None:
        """Make the next version, of this term."""
        before, self._draft = self.record, None
        assert before is not None
        record = replace(record, term=self.term, version=before.version + 1)
        self._former = frozenset((*before.members, *map(peer_of, before.electors))) - record.evicted.keys()
        self._accepted = {self._me}
        self._save(record=record)
        self._broadcast()
        self._check_committed()

    def _check_committed(self) -> None:
        """Commit the present version once a quorum has it on disk. It is of this term: older ones are committed by it."""
        record = self.record
        assert record is not None
        if self._committed is not record and record.agreed(self._accepted):
            self._commit(record)
            self._broadcast()
            self._former = frozenset()
            if self._me not in record.electors:
                self._step_down()

    def _broadcast(self) -> None:
        record, committed = self.record, self._committed
        assert record is not None
        self._beat_at = self._now + max(self._timing.heartbeat_s, self._lease_s / 8)
        sent = committed.stamp if committed is not None else NOBODY
        for peer_id in sorted({*record.members, *self._electors, *self._former} - {self._peer_id}):
            known = self._heard.get(peer_id)
            has_it = known is not None and known.stamp == record.stamp
            self._effects.append(Send(peer_id, Append(record.stamp, sent, None if has_it else record, self._now)))

    def _accept(self, sender: str, accepted: Accepted) -> None:
        peer_id, record = peer_of(sender), self.record
        assert record is not None
        self._follow_term(accepted.term)
        if self.role is not Role.LEADER or accepted.term < self.term:
            return
        self._measure(sender, accepted.echo)
        heard = self._heard.get(peer_id)
        if heard is None or heard.name not in ("", sender):
            heard = self._heard[peer_id] = _Heard()  # what its life before had is lost
        if not self._is_fresh(heard):
            heard.since = self._now
        heard.name, heard.at, heard.broken, heard.stamp = sender, self._now, False, accepted.stamp
        if len(accepted.states) == len(record.parts):
            heard.states = accepted.states
        if accepted.stamp == record.stamp:
            self._accepted.add(sender)
            self._check_committed()

    def _step_down(self) -> None:
        self.role, self._draft = Role.FOLLOWER, None
        self._leader_at = -math.inf
        self._election_at = self._now + self._lease_s * (1 + self._draw() / 2)

    def _follow_term(self, term: int) -> None:
        """Give up whatever it is in an earlier term."""
        if term > self.term:
            if self.role is Role.LEADER:
                self._step_down()
            self.role = Role.FOLLOWER
            self._save(term=term, vote="")

    def _note_far(self, sender: str, term: int) -> None:
        """Rule 1: follow voters that are too far ahead, once the others can agree on nothing. Who has no vote does at once."""
        record = self.record
        assert record is not None
        if sender in record.electors:
            self._far[sender] = term
        far = {name: said for name, said in self._far.items() if name in record.electors and not self._is_near(said)}
        others = {name for name in record.electors - far.keys() if peer_of(name) in {self._peer_id, *self._connected}}
        needed = self._me not in record.electors or not record.agreed(others)
        if far and needed and (least := min(far.values())) <= MOST_TERM:
            self._follow_term(least)
            self._stand_soon()

    # -- a leader: what the next version changes ---------------------------------------------------------------------------

    def _next_version(self) -> Record:
        """Return what should be agreed on, with the present stamp: nothing else is on its way."""
        record = self._draft or self.record
        assert record is not None
        record = self._without_leavers(self._with_steps(record))
        self._give_up_unverified(record)
        distrusted = self._distrusted(record)
        live = {peer_of(name) for name in record.voters if name in record.names and self._is_live(peer_of(name))}
        fit = [
            {
                peer_of(name)
                for name in record.names
                if peer_of(name) in live and self._has(name, i, part) and record.leads(name)
            }
            for i, part in enumerate(record.parts)
        ]
        changed = record.assigned(live, fit, self._moved, distrusted)
        self._moved = {i: avoid for i, avoid in self._moved.items() if not fit[i]}  # later, when somebody can take it
        if changed is record:
            steady = {p for p in live if self._now - self._heard_of(p).since > STEADY_LEASES * self._lease_s}
            changed = record.balanced([able & steady - distrusted for able in fit])
        changed = _with_roots(self._with_lease(self._with_voters(changed)))
        if self._ended and self._ended == {i: part.grant for i, part in enumerate(changed.parts)}:
            self._ended, changed = {}, replace(changed, phase=Phase.FINISHED)
        return changed

    def _without_leavers(self, record: Record) -> Record:
        """Rule 9: they are gathered for a heartbeat. When all that are live leave, the swarm ends as it is."""
        self._leavers = {peer_id: at for peer_id, at in self._leavers.items() if peer_id in record.members}
        if not self._leavers or self._leavers.keys() >= {p for p in record.members if self._is_live(p)}:
            return record
        due = {peer_id for peer_id, at in self._leavers.items() if self._now >= at + self._timing.heartbeat_s}
        return replace(record, members={p: m for p, m in record.members.items() if p not in due}) if due else record

    def _with_voters(self, record: Record) -> Record:
        """Rules 9 and 10."""
        if record.before:
            return replace(record, before=())
        names, forget_s = record.names, max(self._timing.forget_s, 2 * self._lease_s)
        kept = [name for name in record.voters if name in names and self._heard_within(peer_of(name), forget_s)]
        up_to_date = {n for n in names if self._is_live(peer_of(n)) and self._has_all(n, record)}
        learners = sorted(up_to_date.difference(kept), key=lambda name: (self._heard_of(peer_of(name)).since, name))
        voters = (*kept, *learners)[:MOST_VOTERS]
        if voters == record.voters or not is_quorum(voters, up_to_date):
            return record
        return replace(record, voters=voters, before=record.voters)

    def _with_lease(self, record: Record) -> Record:
        wanted = self._measured_lease_s
        close = 0.5 * record.lease_s <= wanted <= 1.25 * record.lease_s  # not a version for each small change
        return record if close and wanted >= self._timing.lease_s else replace(record, lease_s=wanted)

    def _with_steps(self, record: Record) -> Record:
        """Rule 13: I1, I2 and I5 hold when an update becomes the outer step."""
        if record.phase is Phase.FINISHED:
            return record
        for i, part in enumerate(record.parts):
            for update, names in self._holders(record, i).items():
                if self._is_held(names, part, record):
                    tokens = max(part.tokens, update.tokens)
                    step = replace(part, outer_step=update.outer_step, digest=update.digest, update=update.id, tokens=tokens)
                    record = record.with_part(i, step)
        return record

    def _give_up_unverified(self, record: Record) -> None:
        """Rule 13: verify_s after a quorum holds an update, whoever should verify it and does not is left."""
        waiting = dict[int, tuple[Update, float]]()
        for i, part in enumerate(record.parts):
            if not part.verifiers or record.phase is Phase.FINISHED:
                continue
            for update, names in self._holders(record, i).items():
                if not record.agreed(names):
                    continue
                known, since = self._unverified.get(i, (update, self._now))
                waiting[i] = update, since if known == update else self._now
                if self._now < waiting[i][1] + self._verify_s:
                    continue
                del waiting[i]
                late = {*part.verifiers} - {peer_of(name) for name in names}
                self._moved[i] = late
                for peer_id in late:
                    self._against.setdefault(part.owner, set()).add(peer_id)
                    self._against.setdefault(peer_id, set()).add(part.owner)
                text = f"part {i}, owned by {part.owner}: not verified within {self._verify_s:g} s by"
                self._effects.append(Noticed(f"{text} {', '.join(sorted(late))}"))
        self._unverified = waiting

    @property
    def _verify_s(self) -> float:
        """What rule 13 gives verifiers: where messages take long, a lease is several round trips."""
        return max(self._timing.verify_s, self._lease_s)

    def _distrusted(self, record: Record) -> frozenset[str]:
        """Rule 11: whom two others disagreed with, or did not come to an end with."""
        with_each = {peer_id: {*record.disputes.get(peer_id, ()), *late} for peer_id, late in self._against.items()}
        stallers = {peer_id for peer_id, until in self._stallers.items() if self._now < until}
        return record.distrusted | stallers | {peer_id for peer_id, others in with_each.items() if len(others) > 1}

    def _holders(self, record: Record, i: int) -> dict[Update, set[str]]:
        """Return who holds which update that a part may go on with."""
        part, holders = record.parts[i], dict[Update, set[str]]()
        for heard in map(self._heard_of, self._electors):
            held = heard.states[i].held if i < len(heard.states) else None
            if held is not None and held.part == i and held.continues(part) and heard.states[i].digest == held.base:
                holders.setdefault(held, set()).add(heard.name)
        return holders

    def _is_held(self, names: set[str], part: Part, record: Record) -> bool:
        """Whether enough members have an update on disk (I2)."""
        return record.agreed(names) and {peer_of(name) for name in names}.issuperset(part.verifiers)

    def _serve_member(self, sender: str, message: Release | Ended | Leave | Claim) -> None:
        """Take what a member asks its leader for, or drop it: it asks again."""
        record, peer_id = self._draft or self.record, peer_of(sender)
        assert record is not None
        if isinstance(message, Leave):
            self._leavers.setdefault(peer_id, self._now)
            return
        if isinstance(message, Claim):
            self._claim(peer_id, message)
            return
        if message.part >= len(record.parts) or message.grant != record.parts[message.part].grant:  # I4
            return
        part = record.parts[message.part]
        blames = isinstance(message, Release) and message.away and peer_id != part.owner
        if blames and self._heard_of(peer_id).stamp < self._enrols_since:  # it judged by keys of before, and will judge again
            return
        if isinstance(message, Release) and peer_id in (part.owner, *part.verifiers):
            self._moved[message.part] = {part.owner, peer_id} if message.away else set()
            if blames:
                self._draft = record.disputed(part.owner, peer_id)
            said = f", owned by {part.owner}: {peer_id} says" if peer_id != part.owner else f": its owner {peer_id} returns it"
            self._effects.append(Noticed(f"part {message.part}{said}: {message.reason}"))
        elif isinstance(message, Release) and sender in record.electors and self._has(sender, message.part, part):
            self._refuse(sender, message, record, part)
        elif isinstance(message, Ended) and peer_id == part.owner:
            self._ended[message.part] = message.grant

    def _refuse(self, sender: str, release: Release, record: Record, part: Part) -> None:
        """Rule 11: count the voters that cannot hold an owner's update; when the others are no quorum, the part moves."""
        place = part.grant, part.outer_step
        known, names = self._cannot_hold.get(release.part, (place, {}))
        names = names if known == place else {}
        if sender not in names:
            text = f"part {release.part}, owned by {part.owner}: {peer_of(sender)} says: {release.reason}"
            self._effects.append(Noticed(text))
        names = {**names, sender: release.away or names.get(sender, False)}
        self._cannot_hold[release.part] = place, names
        others = {*record.electors} - names.keys()
        if not any(names.values()):  # nobody blames anybody, and who is not there does not hold it, either
            others = {name for name in others if self._is_live(peer_of(name))}
        if record.agreed(others):
            return
        blaming = [name for name, blames in names.items() if blames]
        self._moved[release.part] = {part.owner} if blaming else set()
        for name in blaming:
            record = record.disputed(part.owner, peer_of(name))
        self._draft = record

    def _claim(self, holder: str, claim: Claim) -> None:
        """Rule 16. Who claims hears of it by the committed record."""
        record = self._draft or self.record
        assert record is not None
        before, full = record.enrolled.get(claim.peer_id), len(record.enrolled) >= MOST_ENROLLED
        if holder not in record.holders or claim.peer_id in record.evicted or (before is None and full):
            return
        if before is None or claim.enrolled.invitation > before.invitation:
            enrolled = {**record.enrolled, claim.peer_id: claim.enrolled}
            self._draft = replace(record.settled(claim.peer_id), enrolled=enrolled)
            earlier = record.members.get(claim.peer_id)
            if before is not None and earlier is not None:
                over = replace(earlier, incarnation=0, addresses=(), maddr="", reachable=False, relayed=False)
                self._draft = replace(self._draft, members={**record.members, claim.peer_id: over})

    def _hello(self, sender: str, hello: Hello, key: str = "") -> None:
        """Rules 1, 5, 9 and 16."""
        record, peer_id = self._draft or self.record, peer_of(sender)
        if record is None or peer_id in record.evicted or hello.member.incarnation != incarnation_of(sender):
            return
        if not record.may_enter(peer_id):
            return
        enrolled = record.enrolled.get(peer_id)
        if key and enrolled is not None and enrolled.key != key:
            return
        if hello.stamp.lineage not in (0, record.lineage):
            self._effects.append(Send(peer_id, News(record)))  # so that it can say why nobody lets it in
            self._notice_lineage(sender, hello.stamp.lineage)
            return
        self._older.discard(peer_id)
        if self.record is not None and self.record.knows(sender) and NOBODY < hello.stamp < self.record.stamp:
            self._effects.append(Send(peer_id, News(self.record)))
        if self.role is not Role.LEADER:
            return
        self._leavers.pop(peer_id, None)
        known = record.members.get(peer_id)
        if known is not None and hello.member.incarnation < known.incarnation:
            self._effects.append(Noticed(f"{peer_id} came with an older folder than before"))
        elif hello.member != known and (known is not None or len(record.members) < MOST_MEMBERS):
            self._draft = replace(record, members={**record.members, peer_id: hello.member})

    def _order(self, order: Evict | SetPhase | Entrust | Supersede) -> None:
        record = self._draft or self.record
        if self.role is not Role.LEADER or record is None:
            self._effects.append(Refused(f"ask the leader, {self.leader}" if self.leader else "there is no leader now"))
        elif isinstance(order, SetPhase):
            if record.phase is Phase.FINISHED and order.phase is not Phase.RUNNING:
                if order.phase is Phase.PAUSED:
                    self._effects.append(Refused("the run is finished"))
                return
            if record.phase is Phase.DRAINING and order.phase is Phase.PAUSED:  # open rounds are to end, and some parts have
                self._effects.append(Refused("the run drains; resume it first, or wait until it has finished"))
                return
            again = order.phase is Phase.RUNNING and record.phase in (Phase.DRAINING, Phase.FINISHED)
            parts = tuple(replace(part, grant=part.grant + again) for part in record.parts)  # engines that ended begin again
            last_step = self._last_step(record) if order.phase is Phase.DRAINING else 0
            self._ended, self._draft = {}, replace(record, phase=order.phase, parts=parts, last_step=last_step)
        elif isinstance(order, Evict) and order.peer_id in record.evicted:
            pass  # for the first reason
        elif order.peer_id not in record.members and not isinstance(order, Evict):
            self._effects.append(Refused(f"{order.peer_id} is not a member"))
        elif isinstance(order, Supersede):
            if not record.roots:
                self._effects.append(Refused("the record does not say which authority there is"))
            elif order.root == record.roots[-1]:
                pass
            elif len(record.roots) == MOST_ROOTS:
                self._effects.append(Refused(f"members have certificates of {MOST_ROOTS} authorities already: wait, or evict"))
            else:
                self._draft = replace(record, roots=(*record.roots, order.root), holders=(order.peer_id,))
        elif isinstance(order, Entrust):
            if len({*record.holders, order.peer_id}) > MOST_HOLDERS:
                self._effects.append(Refused(f"{MOST_HOLDERS} members have the authority's key already"))
            elif not record.members[order.peer_id].reachable:
                self._effects.append(Refused(f"{order.peer_id} accepts no connections, and could let nobody in"))
            elif order.peer_id not in record.holders:
                self._draft = replace(record, holders=(*record.holders, order.peer_id))
        elif record.members.keys() == {order.peer_id}:
            self._effects.append(Refused(f"{order.peer_id} is the only member"))
        elif len(record.evicted) == MOST_EVICTED:
            self._effects.append(Refused(f"{MOST_EVICTED} were evicted already; begin a new run"))
        elif order.peer_id not in {**record.members, **record.enrolled} and _unknown(record) >= MOST_UNKNOWN:
            rule = "replace the authority, which makes all invitations void"
            self._effects.append(Refused(f"{MOST_UNKNOWN} names that nobody had were evicted already; {rule}"))
        else:
            evicted = {**record.evicted, order.peer_id: order.reason}
            members = _without(record.members, order.peer_id)
            self._draft = replace(record.settled(order.peer_id), members=members, evicted=evicted)

    def _last_step(self, record: Record) -> int:
        """Return the outer step at which all parts end once the run drains (rule 14)."""
        if record.phase is Phase.DRAINING:
            return record.last_step
        runs = record.phase is Phase.RUNNING
        return max(part.outer_step + (runs or bool(self._holders(record, i))) for i, part in enumerate(record.parts))

    # -- owners that stall (rule 18) ---------------------------------------------------------------------------------------

    def _note_time(self, now: float) -> None:
        """Take the time. While no leader is heard, the run is paused, or this process stands still, nobody stalls."""
        passed, self._now = max(now - self._now, 0.0), max(now, self._now)
        record = self._committed
        runs = record is not None and record.phase in (Phase.RUNNING, Phase.DRAINING)
        if runs and passed <= self._lease_s and self._hears_leader:
            self._led_s += passed

    def _note_steps(self, record: Record) -> None:
        """Note since when each part stands where it does."""
        for i, part in enumerate(record.parts):
            place = part.grant, part.outer_step
            if i not in self._stood or self._stood[i][0] != place:
                self._stood[i] = place, self._led_s
            if i in self._wanted and self._wanted[i][0] != place:
                del self._wanted[i]
            if (said := self._stalled.get(i)) is not None and (said.grant, said.outer_step) != place:
                del self._stalled[i]

    def _want(self, wanted: Wanted) -> None:
        """The peer beside this member waits for an update."""
        record, i = self._committed, wanted.part
        if record is None or i >= len(record.parts) or wanted.outer_step != record.parts[i].outer_step:
            return
        place = record.parts[i].grant, record.parts[i].outer_step
        _, since = self._wanted.setdefault(i, (place, self._led_s))
        if self._stands_still(i, since):
            self._say_stall(Stall(i, *place, waits=True))

    def _stands_still(self, i: int, since: float = -math.inf) -> bool:
        """Whether the owner of a part has owed an update for stall_s, as far as it is known here."""
        record = self._committed
        if record is None or self._led_s < max(self._stood[i][1], since) + self._timing.stall_s:
            return False
        return record.parts[i].owner != self._peer_id

    def _say_stall(self, stall: Stall) -> None:
        self._emit_each(self._electors - {self._peer_id}, stall)
        self._count_stall(self._me, stall)

    def _count_stall(self, sender: str, stall: Stall) -> None:
        """Count who says that an owner stalls. Once these are enough the part moves, or a leader that moves nothing is left."""
        record, i = self._committed, stall.part
        if record is None or i >= len(record.parts) or peer_of(sender) == (part := record.parts[i]).owner:
            return
        if (stall.grant, stall.outer_step) != (part.grant, part.outer_step):
            return
        said = self._stalled.setdefault(i, _Stalled(part.grant, part.outer_step, set(), set()))
        if sender not in said.names:
            text = f"{peer_of(sender)} says: no update to outer step {part.outer_step + 1} comes from {part.owner}"
            self._effects.append(Noticed(f"part {i}, owned by {part.owner}: {text}"))
        said.names.add(sender)
        if stall.waits:
            said.waiting.add(sender)
        wanted = max(2, self._timing.stall_peers)
        silent = self._me in record.electors - said.names
        if silent and len(said.waiting) >= wanted and self._stands_still(i):
            self._say_stall(Stall(i, part.grant, part.outer_step, waits=False))
            return
        if not self._are_enough(said, record):
            return
        if said.enough_at == math.inf:
            said.enough_at = self._now
            self._stallers[part.owner] = self._now + PARDONED * self._timing.stall_s
            text = f"it made no update to outer step {part.outer_step + 1}, which peers wait for; {part.owner} stalls"
            self._effects.append(Noticed(f"part {i} is taken from {part.owner}: {text}"))
        if self.role is Role.LEADER:
            self._leave_stallers()
        elif self._hears_leader and self._now >= said.enough_at + DEAF_LEASES * self._lease_s:
            self._shun()

    def _are_enough(self, said: _Stalled, record: Record) -> bool:
        """Whether the part goes to others: the voters that have not said so could agree on nothing."""
        return not record.agreed({*record.electors} - said.names) and len(said.waiting) >= self._timing.stall_peers

    def _leave_stallers(self) -> None:
        """Have the parts whose owners stall change hands with the next version, unless that is on its way."""
        assert self.record is not None
        for i, said in self._stalled.items():
            if said.enough_at < math.inf and self.record.parts[i].grant == said.grant:
                self._moved[i] = {self.record.parts[i].owner}

    def _shun(self) -> None:
        """Neither follow nor elect the present leader for a while."""
        self._effects.append(Noticed(f"{self._leader} leads, and does nothing about an owner that stalls: another is elected"))
        self._shunned[self._leader] = self._now + SHUNNED_LEASES * self._lease_s
        self._leader_at = -math.inf
        self._stand_soon()

    def _is_shunned(self, peer_id: str) -> bool:
        return self._shunned.get(peer_id, -math.inf) > self._now

    # -- what is known of others -------------------------------------------------------------------------------------------

    def _heard_of(self, peer_id: str) -> _Heard:
        if peer_id == self._peer_id:
            return _Heard(self._me, self._now, -math.inf, False, self._stamp, self._parts.states)
        return self._heard.get(peer_id) or _Heard()

    def _heard_within(self, peer_id: str, seconds: float) -> bool:
        return self._heard_of(peer_id).at > self._now - seconds

    def _is_fresh(self, heard: _Heard) -> bool:
        return not heard.broken and heard.at + self._lease_s > self._now

    def _is_live(self, peer_id: str) -> bool:
        return self._is_fresh(self._heard_of(peer_id))

    def _has(self, name: str, i: int, part: Part) -> bool:
        """Whether this life of a peer has said that it has a part: what a life before had is lost."""
        heard = self._heard_of(peer_of(name))
        return heard.name == name and i < len(heard.states) and heard.states[i].has(part)

    def _has_all(self, name: str, record: Record) -> bool:
        return all(self._has(name, i, part) for i, part in enumerate(record.parts))

    def _measure(self, sender: str, echo: float) -> None:
        """Note a round trip. What a peer says of when it was asked is bounded, and the median of all peers counts.

        Of answers to what was asked meanwhile only the first counts, so that one time in which a process stands still, or its
        clock jumps, is in one sample of a peer, and not in all.
        """
        round_trip = self._now - echo
        if 0 <= round_trip <= MOST_LEASE_S and echo >= self._measured_at.get(peer_of(sender), -math.inf):
            self._measured_at[peer_of(sender)] = self._now
            self._round_trips[peer_of(sender)] = [*self._round_trips.get(peer_of(sender), [])[1 - SAMPLES :], round_trip]
            self._note_lease()

    def _bound_round_trips(self, seconds: float) -> None:
        self._round_trips = {p: [min(sample, seconds) for sample in samples] for p, samples in self._round_trips.items()}
        self._note_lease()

    def _note_lease(self) -> None:
        """Rule 8."""
        shortest = [min(samples) for peer_id, samples in self._round_trips.items() if peer_id in self._electors]
        self._round_trip_s = median_low(shortest) if shortest else 0.0
        self._measured_lease_s = min(max(self._timing.lease_s, ROUND_TRIPS * self._round_trip_s), MOST_LEASE_S)
        self._lease_s = max(self.record.lease_s if self.record is not None else 0.0, self._measured_lease_s)

    # -- what is known of itself -------------------------------------------------------------------------------------------

    @property
    def _hears_leader(self) -> bool:
        return self.role is Role.LEADER or self._leader_at + self._lease_s > self._now

    @property
    def _may_stand(self) -> bool:
        record = self.record
        return record is not None and self._me in record.electors and record.leads(self._me)

    @property
    def _wants_hello(self) -> bool:
        if self._leaving:
            return self.record is not None and self.record.knows(self._me)
        settled = self._committed is not None and self._committed.members.get(self._peer_id) == self._member
        return not (settled and self._hears_leader)

    @property
    def _stamp(self) -> Stamp:
        return self.record.stamp if self.record is not None else NOBODY

    @property
    def _names(self) -> frozenset[str]:
        return self.record.electors if self.record is not None else frozenset()

    def _agreed(self, names: set[str]) -> bool:
        return self.record is not None and self.record.agreed(names)

    def _knows(self, sender: str) -> bool:
        return self.record is not None and self.record.knows(sender)

    def _is_near(self, term: int) -> bool:
        return term <= self.term + FAR

    def _save(self, **changes: Any) -> None:
        before, self._saved = self.record, replace(self._saved, **changes)
        self._effects.append(Save(self._saved))
        if "record" in changes:
            self._note_record()
            if self.record is not None and not self.record.enrols_as(before):
                self._enrols_since = self.record.stamp
                self._parts.judge_anew()

    def _is_outdated(self, judged_by: Stamp | None) -> bool:
        """Whether other keys counted then than now."""
        return judged_by is not None and judged_by < self._enrols_since

    def _note_record(self) -> None:
        """Work out what follows from the record."""
        self._electors = frozenset(map(peer_of, self.record.electors)) if self.record is not None else frozenset()
        self._note_lease()

    def _tell_leader(self, message: Message) -> None:
        if self.role is Role.LEADER:
            self._receive(self._me, message)
        elif self._leader and self._hears_leader:
            self._effects.append(Send(self._leader, message))

    def _emit_each(self, peer_ids: set[str] | frozenset[str], message: Message) -> None:
        self._effects += [Send(peer_id, message) for peer_id in sorted(peer_ids)]

    def _draw(self) -> float:
        """Return a number from 0 to 1 that differs between members and from call to call, and is the same in each replay."""
        self._draws += 1
        return int.from_bytes(blake3(f"{self._me} {self.term} {self._draws}".encode()).digest(4)) / 2**32


def _with_roots(record: Record) -> Record:
    """Rule 17."""
    if len(record.roots) < 2 or any(member.authority != record.roots[-1].name for member in record.members.values()):
        return record
    return replace(record, roots=record.roots[-1:])


def _what_stays(record: Record) -> tuple[object, ...]:
    """Return what is the same in all versions of a lineage."""
    return record.run_id, record.lineage, record.config_hash, record.schema_hash, len(record.parts)


def _unknown(record: Record) -> int:
    """Return how many names were evicted that nobody was enrolled with."""
    return len(record.evicted.keys() - record.enrolled.keys())


def _without(members: Mapping[str, Member], peer_id: str) -> Mapping[str, Member]:
    return {key: member for key, member in members.items() if key != peer_id}
