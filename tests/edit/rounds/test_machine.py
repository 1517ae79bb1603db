"""The round machine under random events: what must hold whatever happens. Its decisions one by one are in the transcripts."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edit.rounds.machine
from edit.config.run import InnerConfig, RoundsConfig, RunConfig
from edit.errors import LocalProtocolError
from edit.fragments.groups import fragments_due
from edit.records import MOST_TOKENS
from edit.rounds.deadlines import FEWEST, MEASURED, PeerPhase
from edit.rounds.events import (
    Arrived,
    Close,
    Commit,
    CommitSucceeded,
    Drain,
    Effect,
    EndRun,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Phase,
    Progress,
    Quarantined,
    Reduce,
    Reduced,
    Refused,
    Restricted,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunFinished,
    Tick,
    Withdrawn,
)
from edit.rounds.machine import RoundMachine
from edit.rounds.work_claims import UsualWork
from tests.support.exhaustive import examples

FOLDER = Path(edit.rounds.machine.__file__).parent
PEERS = ("a", "b", "c", "d")
FRAGMENTS = 4


def due(outer_step: int, groups: int = 1) -> tuple[int, ...]:
    return fragments_due(outer_step, FRAGMENTS, groups, "strided")


def machine(groups: int = 1, **settings: object) -> RoundMachine:
    config = RoundsConfig(**settings)  # type: ignore[arg-type]
    return RoundMachine(config, due=lambda step: due(step, groups), outer_step=0, outer_steps=6, first_round_id=1_000_001)


class Watched:
    """A machine, a shell that answers its effects when told to, and the invariants, checked after every event."""

    def __init__(self, quorum: int, start_peers: int, groups: int = 1, **settings: object) -> None:
        settings = {"floor_s": 2, "ceiling_s": 40, "grace_s": 1, **settings}
        self.machine = machine(groups, quorum=quorum, start_peers=start_peers, **settings)
        self.quorum, self.groups = quorum, groups
        self.now = 0.0
        self.asked: deque[Reduce] = deque()
        self.commits: deque[Commit] = deque()
        self.arrived: set[tuple[str, int]] = set()  # of the open round
        self.reduced: dict[int, frozenset[str]] = {}  # fragment -> with whom
        self.open_id = self.last_id = 0

    @property
    def due(self) -> tuple[int, ...]:
        return due(self.machine.outer_step, self.groups)

    def feed(self, event: Event) -> list[Effect]:
        step, phase = self.machine.outer_step, self.machine.phase
        if isinstance(event, Arrived) and event.round_id == self.open_id and phase in (Phase.COLLECTING, Phase.GATHERING):
            self.arrived.add((event.peer_id, event.fragment_id))
        effects = self.machine.handle(event, self.now)
        committed = any(isinstance(effect, RoundClosed) and effect.committed for effect in effects)
        assert self.machine.outer_step == step + committed
        assert not committed or isinstance(event, CommitSucceeded)
        for effect in effects:
            self.check(effect, event)
        assert self.machine.round_id == self.open_id
        assert all(self.machine.quarantined_until(peer_id) is None for peer_id in self.machine.expected)
        assert not (self.machine.held_back and self.open_id)
        assert (self.machine.phase is Phase.COMMITTING) <= bool(self.open_id)
        return effects

    def check(self, effect: Effect, event: Event) -> None:
        match effect:
            case RoundOpened():
                assert self.open_id == 0 and effect.round_id > self.last_id
                assert effect.outer_step == self.machine.outer_step and effect.expected and effect.deadline > self.now
                self.open_id = self.last_id = effect.round_id
                self.arrived.clear(), self.reduced.clear(), self.asked.clear(), self.commits.clear()
            case Reduce():
                assert effect.round_id == self.open_id and effect.fragment_id not in self.reduced
                assert len(effect.peers) >= self.quorum and list(effect.peers) == sorted(set(effect.peers))
                assert all((peer_id, effect.fragment_id) in self.arrived for peer_id in effect.peers)
                self.reduced[effect.fragment_id] = frozenset(effect.peers)
                self.asked.append(effect)
            case Commit():
                assert effect.round_id == self.open_id and effect.outer_step == self.machine.outer_step + 1
                assert self.reduced.keys() == set(self.due) and not self.asked and not self.commits
                of_any = frozenset().union(*self.reduced.values())
                of_all = of_any.intersection(*self.reduced.values())
                assert not set(effect.missing) & of_any
                assert {peer_id for peer_id in PEERS if f"{peer_id} in part" in effect.reason} == of_any - of_all
                self.commits.append(effect)
            case RoundClosed():
                assert effect.round_id == self.open_id and effect.reason and effect.seconds >= 0
                self.open_id = 0
            case Refused():
                assert isinstance(event, Offered | Arrived) and effect.peer_id == event.peer_id and effect.reason
            case RunFinished():
                assert self.machine.phase is Phase.FINISHED

    def act(self, word: str, peer_id: str, number: int, offset: int) -> None:
        """One random action; `offset` makes steps and round ids wrong now and then."""
        step, round_id = self.machine.outer_step, self.machine.round_id
        match word:
            case "ready":
                self.feed(MemberReady(peer_id, step + offset))
            case "lost":
                self.feed(MemberLost(peer_id, "closed"))
            case "offer":
                self.feed(Offered(peer_id, round_id + offset, step, number % (FRAGMENTS + 1)))
            case "arrive":
                self.feed(Arrived(peer_id, round_id + offset, self.due[number % len(self.due)]))
            case "send":
                for fragment_id in self.due:
                    self.feed(Arrived(peer_id, round_id, fragment_id))
            case "fault":
                self.feed(Faulted(peer_id, round_id + offset, "bad bytes"))
            case "reduced" if self.asked:
                effect = self.asked.popleft()
                self.feed(Reduced(effect.round_id, effect.fragment_id))
            case "committed" if self.commits:
                self.feed(CommitSucceeded(self.commits.popleft().round_id))
            case "failed":
                self.feed(RoundFailed(round_id + offset, "disk full"))
            case "wait":
                self.now += number
                self.feed(Tick())
                wakeup = self.machine.next_wakeup()
                assert wakeup is None or wakeup > self.now
            case "pause":
                self.feed(Pause())
            case "resume":
                self.feed(Resume())


FAULTS = [("fault", "a")] * 4 + [("ready", "a"), ("send", "a"), ("offer", "a"), ("lost", "a"), ("wait", "a"), ("failed", "a")]
FAULTS += [("ready", "b"), ("ready", "c"), ("send", "b"), ("send", "c"), ("lost", "b"), ("reduced", "b"), ("committed", "b")]
WORDS = ["ready"] * 4 + ["send"] * 4 + ["arrive"] * 3 + ["offer", "lost", "fault", "failed", "pause", "resume"]
WORDS += ["reduced"] * 3 + ["committed"] * 3 + ["wait"] * 2
ACTIONS = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from(PEERS), st.integers(0, 30), st.sampled_from([0, 0, 0, 0, -1, -2, 1])),
    max_size=80,
)


def watched(
    actions: list[tuple[str, str, int, int]], quorum: int, start_peers: int, groups: int = 1, **settings: object
) -> Watched:
    run = Watched(quorum, start_peers, groups, **settings)
    for action in actions:
        run.act(*action)
    return run


@settings(deadline=None, max_examples=examples(300))
@given(ACTIONS, st.integers(1, 3), st.integers(1, 3), st.integers(1, FRAGMENTS))
def test_invariants_hold_whatever_happens(
    actions: list[tuple[str, str, int, int]], quorum: int, start_peers: int, groups: int
) -> None:
    watched(actions, quorum, start_peers, groups)


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 9)), min_size=30, max_size=80),
    st.integers(1, 2),
)
def test_nothing_is_taken_of_a_quarantined_peer_and_nobody_waits_for_it(
    actions: list[tuple[tuple[str, str], int]], quorum: int
) -> None:
    run = Watched(quorum, 1)
    for (word, peer_id), number in actions:
        run.act(word, peer_id, number, 0)
        if run.machine.quarantined_until("a") is not None and run.open_id:
            assert isinstance(run.feed(Offered("a", run.open_id, run.machine.outer_step, run.due[0]))[0], Refused)


@settings(deadline=None, max_examples=examples(200))
@given(ACTIONS, st.integers(1, 3))
def test_lost_peers_never_block(actions: list[tuple[str, str, int, int]], quorum: int) -> None:
    """With a quorum complete, the loss of everybody who is missing closes the collection: no tick is needed."""
    run = watched(actions, quorum, 1)
    round_id = run.machine.round_id
    if run.machine.phase is Phase.COLLECTING and len(run.machine.arrived) >= quorum:
        for peer_id in sorted(run.machine.expected - run.machine.arrived):
            run.feed(MemberLost(peer_id, "closed"))
        assert (run.machine.phase, run.machine.round_id) == (Phase.COMMITTING, round_id)


@settings(deadline=None, max_examples=examples(200))
@given(ACTIONS, st.integers(1, 3))
def test_a_collection_never_outlives_its_deadline(actions: list[tuple[str, str, int, int]], quorum: int) -> None:
    run = watched(actions, quorum, 1)
    round_id, deadline = run.machine.round_id, run.machine.deadline
    if deadline is not None:
        assert deadline <= run.now + 40
        wakeup = run.machine.next_wakeup()
        assert wakeup is not None and wakeup <= deadline
        run.now = max(run.now, deadline)
        run.feed(Tick())
        assert run.machine.phase is Phase.COMMITTING or run.machine.round_id != round_id


@settings(deadline=None, max_examples=examples(200))
@given(ACTIONS, st.integers(1, 3))
def test_with_slack_only_grace_a_quorum_waits_for_nobody_beyond_it(
    actions: list[tuple[str, str, int, int]], quorum: int
) -> None:
    run = watched(actions, quorum, 1, wait="slack")
    if run.machine.phase is Phase.COLLECTING and len(run.machine.arrived) >= quorum:
        wakeup = run.machine.next_wakeup()
        assert wakeup is not None and wakeup <= run.now + 1
        run.now = wakeup
        run.feed(Tick())
        assert run.machine.phase is Phase.COMMITTING


@settings(deadline=None, max_examples=examples(100))
@given(ACTIONS, st.integers(1, 3), st.sampled_from(["times", "slack"]))
def test_a_wakeup_changes_something(actions: list[tuple[str, str, int, int]], quorum: int, wait: str) -> None:
    run = watched(actions, quorum, 1, wait=wait)
    round_id, wakeup = run.machine.round_id, run.machine.next_wakeup()
    if wakeup is not None:
        run.now = max(run.now, wakeup)
        run.feed(Tick())
        assert run.machine.phase is Phase.COMMITTING or run.machine.round_id != round_id


@settings(deadline=None, max_examples=examples(100))
@given(ACTIONS, st.integers(1, FRAGMENTS))
def test_the_run_can_always_go_on(actions: list[tuple[str, str, int, int]], groups: int) -> None:
    """From any state: what is under way fails, resume, everybody is here and sends, the shell answers; it advances."""
    run = watched(actions, 2, 2, groups)
    before = run.machine.outer_step
    if run.machine.phase is Phase.COMMITTING:
        run.feed(RoundFailed(run.machine.round_id, "given up"))
    run.feed(RoundFailed(run.machine.round_id, "anew"))
    run.feed(Resume())  # also ends the wait after rounds that came to nothing
    for peer_id in PEERS:
        run.feed(MemberReady(peer_id, run.machine.outer_step))
    for peer_id in PEERS:
        run.act("send", peer_id, 0, 0)
    while run.asked:
        run.act("reduced", "", 0, 0)
    run.act("committed", "", 0, 0)
    assert run.machine.outer_step == min(before + 1, 6)


LATE_WORDS = ["ready"] * 3 + ["send"] * 6 + ["answer"] * 8 + ["fail"] * 3
LATE_WORDS += ["lost", "fault", "withdraw", "close", "wait", "pause", "resume", "resume", "drain"]


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(st.tuples(st.sampled_from(LATE_WORDS), st.sampled_from(PEERS), st.integers(0, 99)), min_size=40, max_size=120),
    st.sampled_from([("rounds", 0), ("rounds", 2), ("arrivals", 2)]),
)
def test_a_round_that_is_being_merged_always_ends(actions: list[tuple[str, str, int]], rule: tuple[str, int]) -> None:
    """Results come in any order, also after their round has failed, and rounds fail at any moment.

    Whenever the machine is COMMITTING, somebody works for the open round; once all answered or failed, it is not.
    """
    merging, staleness = rule
    waiting = {"quorum": 2, "floor_s": 2.0, "ceiling_s": 9.0} if merging == "rounds" else {}
    config = RoundsConfig(merging=merging, max_staleness=staleness, **waiting)  # type: ignore[arg-type]
    subject = RoundMachine(config, due=lambda _: (0, 1), outer_step=0, outer_steps=100, first_round_id=1)
    working: list[Reduce | Commit] = []  # of all rounds
    now = 0.0

    def feed(event: Event) -> None:
        working.extend(effect for effect in subject.handle(event, now) if isinstance(effect, Reduce | Commit))
        open_ones = [effect for effect in working if effect.round_id == subject.round_id]
        assert subject.phase is not Phase.COMMITTING or open_ones

    def answer(effect: Reduce | Commit) -> None:
        working.remove(effect)
        is_reduce = isinstance(effect, Reduce)
        feed(Reduced(effect.round_id, effect.fragment_id) if is_reduce else CommitSucceeded(effect.round_id))

    for word, peer_id, number in actions:
        now += 0.5
        match word:
            case "ready":
                feed(MemberReady(peer_id, subject.outer_step))
            case "send":
                round_id, step = subject.round_id, subject.outer_step
                for fragment_id in (0, 1):
                    feed(Offered(peer_id, round_id, step, fragment_id))
                    feed(Arrived(peer_id, round_id, fragment_id))
            case "answer" if working:
                answer(working[number % len(working)])
            case "fail":
                failed = working.pop(number % len(working)).round_id if working and number % 2 else subject.round_id
                feed(RoundFailed(failed, "disk full"))
            case "wait":
                now += number % 12
                feed(Tick())
            case "lost":
                feed(MemberLost(peer_id, "closed"))
            case "fault":
                feed(Faulted(peer_id, subject.round_id, "bad bytes"))
            case "withdraw":
                feed(Withdrawn(peer_id))
            case "close":
                feed(Close("now"))
            case "pause":
                feed(Pause())
            case "resume":
                feed(Resume())
            case "drain":
                feed(Drain(number % 5))
    if actions and actions[-1][2] % 2:
        feed(RoundFailed(subject.round_id, "given up"))
    while working:
        answer(working[0])
    assert subject.phase is not Phase.COMMITTING


def test_the_same_events_give_the_same_effects() -> None:
    def effects() -> list[Effect]:
        subject = machine(quorum=2, start_peers=2)
        events: list[Event] = [MemberReady(peer_id, 0) for peer_id in "cab"]
        events += [Arrived(peer_id, 1_000_001, i) for peer_id in "bca" for i in range(FRAGMENTS)]
        return [effect for event in events for effect in subject.handle(event, 1.0)]

    assert effects() == effects()
    assert [effect.peers for effect in effects() if isinstance(effect, Reduce)] == [("a", "b", "c")] * FRAGMENTS


@pytest.mark.parametrize(
    "event",
    [Reduced(1_000_001, 0), CommitSucceeded(1_000_001), Arrived("a", 1_000_001, FRAGMENTS)],
    ids=lambda e: type(e).__name__,
)
def test_results_nobody_asked_for_are_our_own_bug(event: Event) -> None:
    subject = machine()
    subject.handle(MemberReady("a", 0), 0.0)
    with pytest.raises(LocalProtocolError):
        subject.handle(event, 1.0)
    assert (subject.outer_step, subject.phase) == (0, Phase.COLLECTING)


def test_only_peers_that_were_there_from_the_opening_on_are_measured() -> None:
    """A latecomer's or a returned peer's time says nothing about how long a round should wait for it."""
    run = Watched(quorum=1, start_peers=2)
    for peer_id in "ab":
        run.feed(MemberReady(peer_id, 0))
    for _ in range(3):
        run.now += 8
        step, round_id = run.machine.outer_step, run.machine.round_id
        run.act("offer", "b", 0, 0)
        run.feed(MemberLost("b", "closed"))
        for peer_id in "bc":  # b comes back to its transfer, c is new
            run.feed(MemberReady(peer_id, step))
        for peer_id in "cba":
            run.act("send", peer_id, 0, 0)
        while run.asked:
            run.act("reduced", "", 0, 0)
        run.feed(MemberLost("c", "closed"))
        run.act("committed", "", 0, 0)
        assert run.machine.round_id > round_id
    assert run.machine.expected_s("a") == pytest.approx(8 + 6 * 0.8)
    assert run.machine.expected_s("b") is None and run.machine.expected_s("c") is None


def test_the_sum_of_tokens_stays_at_what_a_64_bit_number_holds() -> None:
    run = Watched(quorum=1, start_peers=1)
    run.feed(MemberReady("a", 0))
    for _ in range(2):
        run.act("send", "a", 0, 0)
        while run.asked:
            run.act("reduced", "", 0, 0)
        run.feed(CommitSucceeded(run.commits.popleft().round_id, MOST_TOKENS - 1))
    assert run.machine.tokens == MOST_TOKENS


def test_a_machine_at_the_last_step_is_finished() -> None:
    subject = RoundMachine(RoundsConfig(), due=due, outer_step=6, outer_steps=6, first_round_id=1)
    assert subject.handle(MemberReady("a", 6), 0.0) == []
    assert subject.phase is Phase.FINISHED


def test_impossible_machines() -> None:
    with pytest.raises(LocalProtocolError, match="first_round_id"):
        RoundMachine(RoundsConfig(), due=due, outer_step=0, outer_steps=1, first_round_id=0)
    idle = RoundMachine(RoundsConfig(), due=lambda _: (), outer_step=0, outer_steps=1, first_round_id=1)
    with pytest.raises(LocalProtocolError, match="no fragment is due"):
        idle.handle(MemberReady("a", 0), 0.0)


def test_a_fragment_of_another_group_is_a_fault_in_an_offer_and_our_own_bug_when_it_arrived() -> None:
    subject = machine(groups=2)
    subject.handle(MemberReady("a", 0), 0.0)
    (refused,) = subject.handle(Offered("a", 1_000_001, 0, 1), 1.0)
    assert isinstance(refused, Refused) and not refused.stale
    assert refused.reason == "fragment 1 is not exchanged from outer step 0; 0, 2 are"
    with pytest.raises(LocalProtocolError, match="fragment 1"):
        subject.handle(Arrived("a", 1_000_001, 1), 1.0)
    assert subject.handle(Arrived("a", 1_000_000, 1), 1.0) == [Refused("a", "round 0 is not open; round 1 is", stale=True)]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_deciding_modules_do_no_io(name: str) -> None:
    """Sans-IO modules never import a clock, chance, a loop, a carrier or a log."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in imported} & {
        "time",
        "random",
        "asyncio",
        "grpc",
        "logging",
        "os",
        "threading",
    }


def test_who_goes_on_with_a_run_waits_for_its_peers_before_the_first_round_opens() -> None:
    config = RoundsConfig()

    def taken_over() -> RoundMachine:
        made = RoundMachine(
            config, due=due, outer_step=3, outer_steps=6, first_round_id=1, awaited=("a", "b"), awaits_until=10.5
        )
        assert made.handle(MemberReady("a", 3, 0.0), 10.0) == [] and made.handle(MemberReady("c", 3, 0.0), 10.1) == []
        assert made.phase is Phase.GATHERING and made.next_wakeup() == 10.5 and not made.held_back
        return made

    back, late = taken_over(), taken_over()
    (opened,) = back.handle(MemberReady("b", 3, 0.0), 10.2)
    assert isinstance(opened, RoundOpened) and opened.expected == {"a", "b", "c"}
    assert late.handle(Tick(), 10.4) == []
    (opened,) = late.handle(Tick(), 10.5)
    assert isinstance(opened, RoundOpened) and opened.expected == {"a", "c"}


def test_who_goes_on_with_a_run_that_drains_waits_for_its_peers_and_no_longer() -> None:
    def taken_over(*awaited: str) -> RoundMachine:
        made = RoundMachine(
            RoundsConfig(), due=due, outer_step=3, outer_steps=6, first_round_id=1, awaited=awaited, awaits_until=10.5
        )
        assert made.handle(Drain(5), 10.0) == [] and made.phase is Phase.GATHERING and made.next_wakeup() == 10.5
        return made

    back, alone, none_before = taken_over("a"), taken_over("a"), taken_over()
    assert none_before.handle(Tick(), 10.1) == []
    (opened,) = none_before.handle(MemberReady("b", 3, 0.0), 10.2)
    assert isinstance(opened, RoundOpened) and opened.expected == {"b"}
    (opened,) = back.handle(MemberReady("a", 3, 0.0), 10.2)
    assert isinstance(opened, RoundOpened) and back.draining and back.last_step == 5
    assert back.handle(Drain(), 10.2) == [] and back.last_step == 5  # asked again, it ends no earlier
    assert back.handle(Drain(9), 10.2) == [] and back.last_step == 6  # as late as the run itself
    assert alone.handle(Tick(), 10.4) == []
    assert alone.handle(Tick(), 10.5) == [RunFinished(3)] and alone.phase is Phase.FINISHED


def whole_machine(now: float = 0.0) -> RoundMachine:
    """A machine of a run with masks, in its first round, which expects four peers."""
    config = RoundsConfig(start_peers=4, quorum=3)
    rounds = RoundMachine(config, due=lambda step: due(step), outer_step=0, outer_steps=6, first_round_id=1, whole=True)
    for peer_id in PEERS:
        rounds.handle(MemberReady(peer_id, 0), now)
    return rounds


def test_with_masks_nothing_is_reduced_before_the_close_and_of_no_peer_in_part() -> None:
    rounds = whole_machine()
    for i in range(FRAGMENTS):
        for peer_id in PEERS:
            if (peer_id, i) != ("d", FRAGMENTS - 1):
                assert rounds.handle(Arrived(peer_id, 1, i), 1.0) == []
    effects = rounds.handle(Close("enough"), 2.0)
    assert effects == [Reduce(1, i, ("a", "b", "c")) for i in range(FRAGMENTS)]


@pytest.mark.parametrize(("outer_steps", "said"), [(2, "used up"), (1, "")])
def test_a_run_that_is_ended_says_why_unless_it_has_come_to_its_last_outer_step(outer_steps: int, said: str) -> None:
    rounds = RoundMachine(
        RoundsConfig(), due=lambda step: (0,), outer_step=0, outer_steps=outer_steps, first_round_id=1, whole=True
    )
    for event in (MemberReady("a", 0), Arrived("a", 1, 0), EndRun("used up")):
        rounds.handle(event, 0.0)
    assert (rounds.phase, rounds.ended) == (Phase.COMMITTING, "used up")
    rounds.handle(Reduced(1, 0), 0.0)
    assert rounds.handle(CommitSucceeded(1), 0.0)[-1] == RunFinished(1)
    assert (rounds.phase, rounds.ended) == (Phase.FINISHED, said)
    again = RoundMachine(
        RoundsConfig(), due=lambda step: (0,), outer_step=1, outer_steps=outer_steps, first_round_id=2, ended="used up"
    )
    assert (again.phase, again.ended) == (Phase.FINISHED, said)


def test_a_restricted_round_waits_for_nobody_else_and_misses_nobody_else() -> None:
    rounds = whole_machine()
    assert rounds.expected == frozenset(PEERS)
    assert rounds.handle(Restricted(2, frozenset("abc")), 1.0) == []  # another round
    assert rounds.expected == frozenset(PEERS)
    rounds.handle(Restricted(1, frozenset("abc")), 1.0)
    rounds.handle(MemberReady("d", 0), 1.5)  # within floor_s of the opening
    assert rounds.expected == frozenset("abc")
    effects: list[Effect] = []
    for peer_id in "abc":
        for i in range(FRAGMENTS):
            effects = rounds.handle(Arrived(peer_id, 1, i), 2.0)
    assert [type(effect) for effect in effects] == [Reduce] * FRAGMENTS
    for i in range(FRAGMENTS):
        effects = rounds.handle(Reduced(1, i), 3.0)
    assert effects == [Commit(1, 1, "all 3 contributors in", ())]


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_is_absent_from_a_masked_round_that_ends_before_its_peers_have_shared_their_keys(shared: bool) -> None:
    config = RoundsConfig(quorum=3, start_peers=3, floor_s=2, ceiling_s=40)
    rounds = RoundMachine(config, due=lambda step: (0,), outer_step=0, outer_steps=9, first_round_id=1, whole=True, masked=True)
    for peer_id in "abc":
        rounds.handle(MemberReady(peer_id, 0), 0.0)
    for number in (1, 2):
        if shared:
            rounds.handle(Restricted(number, frozenset("abc")), 40.0 * number - 1.0)
        closed, _ = rounds.handle(Tick(), 40.0 * number)
        assert isinstance(closed, RoundClosed) and "too few: 0 of quorum 3 at the deadline" in closed.reason
    assert [rounds.is_optional(peer_id) for peer_id in "abc"] == [shared] * 3
    assert (rounds.deadlines.allowed_s("a", PeerPhase.COMPUTE) > 0) is shared


@pytest.mark.parametrize(("staleness", "bytes_a_round", "waits"), [(0, 0, 2), (2, 0, 2), (0, 1, 5), (2, 1, 7)])
def test_a_contribution_that_begins_and_does_not_end_costs_a_few_deadlines_and_not_one_in_every_round(
    staleness: int, bytes_a_round: int, waits: int
) -> None:
    config = RoundsConfig(quorum=2, start_peers=3, floor_s=2, ceiling_s=40, grace_s=1, max_staleness=staleness)
    rounds = RoundMachine(config, due=lambda step: (0,), outer_step=0, outer_steps=99, first_round_id=1, whole=staleness > 0)
    now, received, lasted = 0.0, 0, list[float]()
    for _ in range(waits + 3):
        for peer_id in "abh":
            rounds.handle(MemberReady(peer_id, rounds.outer_step), now)
        number, opened = rounds.round_id, now
        rounds.handle(Offered("h", number, rounds.outer_step, 0), now)
        if bytes_a_round:
            received += bytes_a_round
            for of_round in range(1, number + 1):  # it is known by the round in which it began
                rounds.handle(Progress("h", of_round, received, 1000), now)
        now, effects = now + 3.0, list[Effect]()
        for peer_id in "ab":
            rounds.handle(Offered(peer_id, number, rounds.outer_step, 0), now)
            effects = rounds.handle(Arrived(peer_id, number, 0), now)
        while not any(isinstance(effect, Reduce) for effect in effects):
            now = rounds.next_wakeup() or now
            effects = rounds.handle(Tick(), now)
        rounds.handle(Reduced(number, 0), now)
        rounds.handle(CommitSucceeded(number), now)
        lasted.append(now - opened)
    assert [seconds > 30.0 for seconds in lasted] == [True] * waits + [False] * 3 and rounds.is_optional("h")


def test_a_peer_that_delivers_a_part_each_time_and_never_the_rest_is_soon_waited_for_no_longer() -> None:
    config = RoundsConfig(quorum=2, start_peers=3, floor_s=2, ceiling_s=40, grace_s=1)
    rounds = RoundMachine(config, due=lambda step: (0, 1), outer_step=0, outer_steps=99, first_round_id=1)
    now, lasted = 0.0, list[float]()

    def ready() -> None:
        for peer_id in "abh":
            rounds.handle(MemberReady(peer_id, rounds.outer_step), now)

    def deliver(peer_id: str, fragments: list[int]) -> list[Effect]:
        effects = []
        for fragment in fragments:
            rounds.handle(Offered(peer_id, rounds.round_id, rounds.outer_step, fragment), now)
            effects += rounds.handle(Arrived(peer_id, rounds.round_id, fragment), now)
        return effects

    def commit(effects: list[Effect]) -> list[Effect]:
        """Wait until both fragments are reduced, and commit; return the Reduce effects."""
        nonlocal now
        reduces = [effect for effect in effects if isinstance(effect, Reduce)]
        while len(reduces) < 2:
            now = rounds.next_wakeup() or now
            reduces += [effect for effect in rounds.handle(Tick(), now) if isinstance(effect, Reduce)]
        number = rounds.round_id
        for fragment in (0, 1):
            rounds.handle(Reduced(number, fragment), now)
        rounds.handle(CommitSucceeded(number), now)
        return reduces

    for _ in range(8):
        ready()
        opened = now
        part = deliver("h", [0])
        now += 3.0
        reduces = commit([*part, *deliver("a", [0, 1]), *deliver("b", [0, 1])])
        assert [set(reduce.peers) for reduce in reduces] == [{"a", "b", "h"}, {"a", "b"}], "its part counts all the same"
        lasted.append(now - opened)
    assert [seconds > 30.0 for seconds in lasted] == [True] * 5 + [False] * 3 and rounds.is_optional("h")

    ready()
    commit([effect for peer_id in "hab" for effect in deliver(peer_id, [0, 1])])
    assert not rounds.is_optional("h"), "a whole contribution ends that"


def test_who_is_known_to_have_lied_in_a_round_that_failed_is_quarantined_after_the_third() -> None:
    rounds, quarantined = whole_machine(), []
    for number in range(1, 4):
        effects = rounds.handle(RoundFailed(number, "its shares are of another key", ("d",)), float(number))
        quarantined += [effect for effect in effects if isinstance(effect, Quarantined)]
        rounds.handle(Tick(), number + 0.9)
        if number < 3:
            assert rounds.round_id == number + 1
    assert [each.peer_id for each in quarantined] == ["d"]


@pytest.mark.parametrize("growth", [1, 2])
def test_a_round_waits_for_a_peer_whose_batch_was_doubled_only_where_it_may_double(growth: int) -> None:
    inner = InnerConfig(accumulation=2, batch_growth=growth)
    rounds = RoundMachine(
        RoundsConfig(),
        due=lambda _: (0,),
        outer_step=0,
        outer_steps=6,
        first_round_id=1,
        work=UsualWork.of(RunConfig(inner=inner)),
    )
    for phase in MEASURED:
        for _ in range(FEWEST):
            rounds.deadlines.record("a", phase, 10.0 if phase is PeerPhase.COMPUTE else 0.0)
    waits = rounds.expected_s("a")
    assert waits is not None and (waits > 20.0) == (growth == 2)
