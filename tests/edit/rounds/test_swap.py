"""One swap: the table of the machine, and two sides over a line that loses, delays and breaks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from edit.codecs import codec
from edit.config.run import OuterConfig, PenaltyConfig, RunConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.gossip import GossipState, Offer
from edit.merging.merge import Measured, measure
from edit.rounds.swap import Came, Decided, Effect, Event, Failed, Have, Judge, Judged, SendHave, State, Swap

BOTH = frozenset({0, 2})
BEFORE: dict[State, Sequence[Event]] = {
    State.OFFERED: [Came(0)],
    State.JUDGING: [Came(0), Came(2)],
    State.WAITING: [Came(0), Came(2), Judged(BOTH)],
    State.DECIDED: [Came(0), Came(2), Judged(BOTH), Have(BOTH)],
}


def reached(state: State) -> Swap:
    swap = Swap((0, 2))
    for event in BEFORE[state]:
        swap.handle(event)
    assert swap.state is state
    return swap


@pytest.mark.parametrize(
    ("state", "event", "effects", "then"),
    [
        (State.OFFERED, Came(2), [Judge()], State.JUDGING),
        (State.OFFERED, Have(BOTH), [], State.OFFERED),
        (State.OFFERED, Failed("late"), [Decided(frozenset(), "late")], State.DECIDED),
        (State.JUDGING, Judged(frozenset({2})), [SendHave(frozenset({2}))], State.WAITING),
        (State.JUDGING, Have(BOTH), [], State.JUDGING),
        (State.JUDGING, Failed("late"), [Decided(frozenset(), "late")], State.DECIDED),
        (State.WAITING, Have(frozenset({0})), [Decided(frozenset({0}))], State.DECIDED),
        (State.WAITING, Have(frozenset()), [Decided(frozenset())], State.DECIDED),
        (State.WAITING, Failed("late"), [Decided(frozenset(), "late", in_doubt=True)], State.DECIDED),
        (State.DECIDED, Have(frozenset()), [], State.DECIDED),
        (State.DECIDED, Failed("late"), [], State.DECIDED),
        (State.DECIDED, Came(0), [], State.DECIDED),
    ],
)
def test_the_table(state: State, event: Event, effects: list[Effect], then: State) -> None:
    swap = reached(state)
    assert swap.handle(event) == effects and swap.state is then


@pytest.mark.parametrize("early", [State.OFFERED, State.JUDGING])
def test_a_have_that_comes_early_counts_once_the_offer_is_judged(early: State) -> None:
    swap = reached(early)
    swap.handle(Have(frozenset({0})))
    if early is State.OFFERED:
        assert swap.handle(Came(2)) == [Judge()]
    assert swap.handle(Judged(BOTH)) == [SendHave(BOTH), Decided(frozenset({0}))]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Came(0), Came(0)], "offered fragment 0, which is not due or was offered before"),
        ([Came(1)], "offered fragment 1, which is not due or was offered before"),
        ([Came(0), Came(2), Came(2)], "offered fragment 2, which is not due or was offered before"),
        ([Have(frozenset({0, 1}))], "found good what is not due"),
        ([Have(BOTH), Have(frozenset())], "said twice what it found good"),
    ],
)
def test_who_breaks_the_rules_is_left(events: Sequence[Event], reason: str) -> None:
    swap = Swap((0, 2))
    assert [effect for event in events for effect in swap.handle(event)][-1] == Decided(frozenset(), reason)


def test_nothing_found_good_leaves_no_doubt() -> None:
    swap = reached(State.JUDGING)
    swap.handle(Judged(frozenset()))
    assert swap.handle(Failed("late")) == [Decided(frozenset(), "late", in_doubt=False)]


def line(seed: int) -> tuple[dict[str, Decided], bool]:
    """Two sides over a line drawn from the seed; what each decided, and whether it lost or delayed anything too long."""
    drawn = random.Random(seed)
    loses, due = drawn.choice([0.0, 0.1, 0.5]), frozenset(range(drawn.randint(1, 4)))
    good = {side: frozenset(i for i in due if drawn.random() < 0.8) for side in "ab"}
    sides, decided = {side: Swap(due) for side in "ab"}, dict[str, Decided]()
    way: list[tuple[str, Event]] = [(side, Came(i)) for side in "ab" for i in due]
    clean = True
    while way:
        side, event = way.pop(drawn.randrange(len(way)))
        if not isinstance(event, Judged) and drawn.random() < loses:
            clean = False
            continue
        if drawn.random() < loses / 10:
            clean, event = False, Failed("broken")
        for effect in sides[side].handle(event):
            match effect:
                case Judge():
                    way.append((side, Judged(good[side])))
                case SendHave(found):
                    way.append(("b" if side == "a" else "a", Have(found)))
                case Decided():
                    assert side not in decided, "once"
                    decided[side] = effect
    for side, swap in sides.items():  # the deadline
        for effect in swap.handle(Failed("late")):
            assert isinstance(effect, Decided)
            decided[side] = effect
    for effect in decided.values():
        assert effect.together in (frozenset(), good["a"] & good["b"])
    return decided, clean


def test_both_decide_always_alike_unless_one_is_in_doubt() -> None:
    differed = 0
    for seed in range(2000):
        decided, clean = line(seed)
        assert decided.keys() == {"a", "b"}
        if decided["a"].together != decided["b"].together:
            differed += 1
            (alone,) = [effect for effect in decided.values() if not effect.together]
            assert alone.in_doubt and not clean
        elif clean:
            assert not any(effect.in_doubt or effect.reason for effect in decided.values())
    assert 20 < differed < 500


@pytest.mark.parametrize("lost", [False, True])
def test_where_the_last_have_is_lost_the_mean_moves_by_what_one_gained(lost: bool) -> None:
    """Real states, phi apart by 2: together their mean follows the mean contribution; else one is pulled, and one is not."""
    schema = Schema((FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="f.w", shape=(8,)),)),))
    config = RunConfig(outer=OuterConfig(algorithm="gossip"), penalty=PenaltyConfig(enabled=False))
    states = {
        "a": GossipState("a", schema, config, [torch.zeros(8)]),
        "b": GossipState("b", schema, config, [torch.full((8,), 2.0)]),
    }
    payload = codec("fp32").encode(torch.zeros(8), schema.fragments[0])
    offers = {p: Offer(Measured(p, 1, 1, measure(payload), payload), states[p].offered(0)) for p in states}
    partners, decided = {"a": "b", "b": "a"}, dict[str, Decided]()
    sides = {p: Swap((0,)) for p in states}
    way: list[tuple[str, Event]] = [("a", Came(0)), ("b", Came(0))]
    while way:
        side, event = way.pop(0)
        for effect in sides[side].handle(event):
            if isinstance(effect, Judge):
                good = states[side].judge(0, offers[side], offers[partners[side]]).good
                way.append((side, Judged(frozenset({0} if good else ()))))
            elif isinstance(effect, SendHave):
                if not (lost and side == "b"):
                    way.append((partners[side], Have(effect.good)))
            else:
                decided[side] = effect
    if lost:
        (late,) = sides["a"].handle(Failed("no answer"))
        assert isinstance(late, Decided)
        decided["a"] = late
    assert [decided[p].in_doubt for p in "ab"] == [lost, False]
    for p, state in states.items():
        other = offers[partners[p]] if decided[p].together else None
        state.commit([state.stage(0, offers[p], other)], "")
    mean = (states["a"].theta[0] + states["b"].theta[0]) / 2
    torch.testing.assert_close(mean, torch.full((8,), 1.0 - 0.35 if lost else 1.0))
