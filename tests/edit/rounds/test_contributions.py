"""Which contributions are taken: the book's rules one by one, and, under random events, that those which outlive their rounds
are merged whole, once, and never when they are too stale.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.config.run import RoundsConfig
from edit.rounds.contributions import ContributionBook
from edit.rounds.events import (
    Arrived,
    Commit,
    CommitSucceeded,
    Drain,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Phase,
    Progress,
    Reduce,
    Reduced,
    Refused,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    Tick,
)
from edit.rounds.machine import RoundMachine
from tests.support.exhaustive import examples

PEERS = ("a", "b", "c")
DUE = (0, 1)
STALENESS = 2


class Shell:
    """Holds the contributions as the machine says, as a real shell holds their bytes, and answers when told to."""

    def __init__(self, merging: str) -> None:
        waiting = {"quorum": 2, "start_peers": 2, "floor_s": 2.0, "ceiling_s": 20.0} if merging == "rounds" else {}
        config = RoundsConfig(merging=merging, max_staleness=STALENESS, **waiting)  # type: ignore[arg-type]
        self.machine = RoundMachine(config, due=lambda _: DUE, outer_step=0, outer_steps=50, first_round_id=1)
        self.now = 0.0
        self.held: dict[str, tuple[int, int, set[int]]] = {}  # peer -> round, outer step, fragments
        self.merged: set[tuple[str, int]] = set()
        self.reducing: set[str] = set()
        self.asked: deque[Reduce] = deque()
        self.commit: Commit | None = None

    def feed(self, event: Event) -> list[Refused]:
        refused = []
        for effect in self.machine.handle(event, self.now):
            match effect:
                case RoundOpened():
                    self.asked.clear()
                    self.reducing, self.commit = set(), None
                case Refused():
                    refused.append(effect)
                    if not isinstance(event, Offered | Arrived):
                        assert effect.peer_id not in self.reducing or self.machine.phase is not Phase.COMMITTING
                        del self.held[effect.peer_id]
                case Reduce():
                    self.reduce(effect)
                case Commit():
                    self.commit = effect
                case RoundClosed():
                    self.close(effect)
        return refused

    def reduce(self, effect: Reduce) -> None:
        assert self.machine.phase is Phase.COMMITTING, "what may yet be carried over is not merged before the close"
        for peer_id in effect.peers:
            _, step, fragments = self.held[peer_id]
            assert fragments == set(DUE), "merged whole"
            assert 0 <= self.machine.outer_step - step <= STALENESS
        assert not self.reducing or self.reducing == set(effect.peers), "the same peers in every fragment"
        self.reducing = set(effect.peers)
        self.asked.append(effect)

    def close(self, effect: RoundClosed) -> None:
        if effect.committed:
            for peer_id in self.reducing:
                key = peer_id, self.held[peer_id][0]
                assert key not in self.merged, "merged once"
                self.merged.add(key)
                assert peer_id not in effect.carried
        self.held = {peer_id: self.held[peer_id] for peer_id in effect.carried}

    def send(self, peer_id: str, fragments: tuple[int, ...], round_id: int, step: int) -> None:
        for fragment_id in fragments:
            if self.feed(Offered(peer_id, round_id, step, fragment_id)):
                return
            known = self.held.get(peer_id)
            if known is None or known[:2] != (round_id, step):
                assert known is None or known[2] != set(DUE), "what is whole is never replaced"
                self.held[peer_id] = round_id, step, set()
            self.held[peer_id][2].add(fragment_id)
            self.feed(Arrived(peer_id, round_id, fragment_id))

    def act(self, word: str, peer_id: str, number: int, back: int) -> None:
        step, round_id = max(0, self.machine.outer_step - back), max(0, self.machine.round_id - back)
        match word:
            case "ready":
                self.feed(MemberReady(peer_id, step))
            case "lost":
                self.feed(MemberLost(peer_id, "closed"))
            case "send":
                self.send(peer_id, DUE, round_id, step)
            case "part":
                self.send(peer_id, (number % 2,), round_id, step)
            case "more":
                if peer_id in self.held:
                    self.send(peer_id, (number % 2,), *self.held[peer_id][:2])
            case "progress":
                self.feed(Progress(peer_id, round_id, number, 30))
            case "fault":
                self.feed(Faulted(peer_id, self.held[peer_id][0] if peer_id in self.held else round_id, "bad bytes"))
            case "answer":
                self.answer()
            case "failed":
                self.feed(RoundFailed(round_id, "disk full"))
            case "wait":
                self.now += number
                self.feed(Tick())
            case "pause":
                self.feed(Pause())
            case "resume":
                self.feed(Resume())
            case "drain":
                self.feed(Drain())
                if self.machine.phase is Phase.FINISHED:
                    self.held.clear()

    def answer(self) -> None:
        while self.asked:
            effect = self.asked.popleft()
            self.feed(Reduced(effect.round_id, effect.fragment_id))
        if self.commit is not None:
            self.feed(CommitSucceeded(self.commit.round_id))


WORDS = ["ready"] * 3 + ["send"] * 4 + ["part"] * 3 + ["more"] * 3 + ["answer"] * 4 + ["lost", "fault", "failed", "wait"]
WORDS += ["pause", "resume", "resume", "progress", "drain"]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from(PEERS), st.integers(0, 30), st.sampled_from([0, 0, 0, 1, 2, 3])),
    min_size=30,
    max_size=80,
)


@settings(deadline=None, max_examples=examples(300))
@given(ACTIONS, st.sampled_from(["rounds", "arrivals"]))
def test_what_is_carried_over_is_merged_whole_once_and_never_too_stale(
    actions: list[tuple[str, str, int, int]], merging: str
) -> None:
    shell = Shell(merging)
    for action in actions:
        shell.act(*action)


@settings(deadline=None, max_examples=examples(200))
@given(ACTIONS, st.sampled_from(["rounds", "arrivals"]))
def test_the_run_can_always_go_on(actions: list[tuple[str, str, int, int]], merging: str) -> None:
    shell = Shell(merging)
    for action in actions:
        shell.act(*action)
    shell.feed(Resume())
    shell.answer()
    before = shell.machine.outer_step
    for peer_id in PEERS:
        shell.feed(MemberReady(peer_id, before))
    shell.feed(RoundFailed(shell.machine.round_id, "anew"))  # a new round expects all
    for peer_id in PEERS:
        shell.send(peer_id, DUE, shell.machine.round_id, shell.machine.outer_step)
        if peer_id in shell.held:
            shell.send(peer_id, DUE, *shell.held[peer_id][:2])
    shell.answer()
    assert shell.machine.outer_step > before


def test_an_unknown_rate_has_no_end() -> None:
    hand = ContributionBook(1, 1)
    under = hand.begin("a", 1, 0, 10.0)
    assert under is not None and under.ends_at(20.0) == float("inf")
    under.received_bytes, under.total_bytes = 25, 100
    assert under.ends_at(20.0) == pytest.approx(50.0)


TAKEN = ""
OLD_RUN = "round 6 was never opened since the coordinator started; contribute to a new one"


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        ({}, TAKEN),
        ({"round_id": 7, "outer_step": 3}, TAKEN),  # as stale as may be
        ({"round_id": 6}, OLD_RUN),
        ({"round_id": 10}, OLD_RUN.replace("6", "10")),
        ({"outer_step": 6}, "computed against outer step 6; the run is at 5"),
        ({"outer_step": 2}, "computed against outer step 2; the run is at 5, max_staleness = 2"),
        ({"peer_id": "merged"}, TAKEN),
        ({"peer_id": "merged", "round_id": 8}, "a contribution to round 8 is part of outer step 5 already"),
        ({"peer_id": "merged", "round_id": 7}, "a contribution to round 8 is part of outer step 5 already"),
        ({"peer_id": "half", "round_id": 8, "outer_step": 4}, TAKEN),  # the same one again
        ({"peer_id": "half"}, TAKEN),  # a newer one: the peer began anew
        ({"peer_id": "half", "round_id": 7, "outer_step": 4}, "a newer contribution, to round 8, has come"),
        ({"peer_id": "whole", "round_id": 8, "outer_step": 4}, TAKEN),  # the same one again
        ({"peer_id": "whole"}, "the contribution to round 8 is in and waits to be merged"),
    ],
)
def test_what_is_taken_and_why_not(offer: dict[str, object], reason: str) -> None:
    book = ContributionBook(max_staleness=2, first_round_id=7)
    for peer_id in ("merged", "half", "whole"):
        begun = book.begin(peer_id, 8, 4, 0.0)
        assert begun is not None and book.begin(peer_id, 8, 4, 1.0) is None, "the same one again"
        begun.whole = peer_id != "half"
    book.merged(["merged"], 5)
    asked = {"peer_id": "new", "round_id": 9, "outer_step": 5, "newest_round_id": 9, "run_step": 5} | offer
    assert book.refusal(**asked) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(("staleness", "kept", "told"), [(0, (), ()), (1, ("b",), ("a",)), (2, ("a", "b"), ())])
def test_what_outlives_a_round(staleness: int, kept: tuple[str, ...], told: tuple[str, ...]) -> None:
    book = ContributionBook(staleness, 1)
    book.begin("b", 2, 1, 0.0)
    book.begin("a", 1, 0, 0.0)
    assert book.carries == (staleness > 0)
    assert tuple(peer_id for peer_id, _ in book.end_round(2)) == told and book.peers() == kept
