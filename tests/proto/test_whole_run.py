"""Several aggregators' statuses as one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from edit.plain_text import json_text
from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb.run_status import (
    KEPT_EVENTS,
    KEPT_ROUNDS,
    CouncilMember,
    CouncilPart,
    CouncilStatus,
    Curve,
    Event,
    MemberStatus,
    RoundReport,
    RunStatus,
)
from editpb.whole_run import continued, merged_rounds, whole_run
from tests.support.statuses import busy_run

GRANT = 1_000_000


def a_round(
    step: int, *, grant: int = 1, t: float = 0.0, norm: float = 3.0, verdict: Verdict = Verdict.OK, reason: str = "all are in"
) -> RoundReport:
    """A round of one fragment to which only `ada` contributed."""
    told = PeerVerdict(peer_id="ada", verdict=verdict, norm=norm, weight=1.0)
    return RoundReport(
        round_id=grant * GRANT + step,
        outer_step=step,
        committed=True,
        reason=reason,
        seconds=2.0 + norm,
        bytes_in=100,
        bytes_out=10,
        missing=("bob",),
        digest="aa",
        fragments=(FragmentCommit(fragment_id=0, payload=None, verdicts=(told,), merged_norm=norm, clip=1.0),),
        t=t or float(step),
    )


def aborted(step: int, t: float, reason: str = "too few") -> RoundReport:
    return replace(a_round(step), round_id=7, committed=False, fragments=(), missing=(), digest="", t=t, reason=reason)


def a_part(*rounds: RoundReport, **more: object) -> RunStatus:
    steps = [report.outer_step for report in rounds if report.committed]
    status = replace(
        busy_run(1),
        outer_step=max(steps, default=0),
        rounds=rounds,
        members=(),
        curves=(),
        events=(),
        reason="",
        waiting_for="",
        warnings=(),
    )
    return replace(status, **more)  # type: ignore[arg-type]


def member(**more: object) -> MemberStatus:
    return replace(MemberStatus(peer_id="ada", role="peer", state="training", reason="it trains"), **more)  # type: ignore[arg-type]


def test_a_row_is_an_outer_step_that_all_parts_have_taken() -> None:
    rounds = merged_rounds([a_part(a_round(1), a_round(2)), a_part(a_round(1, norm=4.0, t=9.0))])
    (one,) = rounds
    assert (one.round_id, one.number, one.outer_step, one.t) == (1, 1, 1, 9.0)
    assert (one.bytes_in, one.bytes_out, one.seconds, one.missing) == (200, 20, 6.0, ("bob",))
    assert [each.fragment_id for each in one.fragments] == [0, 1]
    assert one.norm == pytest.approx(5.0), "of the whole pseudo-gradient"
    assert one.reason == "all are in" and one.digest == ""


def test_fragments_have_their_ids_in_the_whole_model_and_those_that_no_part_has_are_left_out() -> None:
    odd = replace(a_round(1), fragments=(*a_round(1).fragments, replace(a_round(1).fragments[0], fragment_id=5)))
    (one,) = merged_rounds([a_part(odd), a_part(a_round(1))], [range(2, 4), range(0, 2)])
    assert [each.fragment_id for each in one.fragments] == [0, 2]


def test_a_step_that_only_some_owners_know_says_so() -> None:
    (first, second) = merged_rounds([a_part(a_round(1), a_round(2)), a_part(a_round(2, grant=2))])
    assert first.reason == "all are in; nothing is known of part 1: who served it then does not answer"
    assert second.reason == "all are in"


def test_aborted_rounds_are_of_their_part_and_every_id_is_another() -> None:
    parts = [a_part(a_round(1), aborted(2, 1.5), a_round(2)), a_part(a_round(1), aborted(2, 1.2), aborted(2, 1.7), a_round(2))]
    rounds = merged_rounds(parts)
    assert [(each.outer_step, each.committed) for each in rounds] == [(1, True), (2, False), (2, False), (2, False), (2, True)]
    assert [each.reason for each in rounds[1:4]] == ["part 1: too few", "part 0: too few", "part 1: too few"]
    assert len({each.round_id for each in rounds}) == 5 and all(each.number == each.outer_step for each in rounds)


def test_one_part_is_itself() -> None:
    status = a_part(a_round(1), aborted(2, 3.0))
    assert whole_run([status]) == replace(status, round_id=2, curves=status.curves)


def test_nothing_is_told_before_anybody_has_answered_and_then_what_is_known() -> None:
    assert whole_run([None, None]) is None
    told = whole_run([None, a_part(a_round(1), waiting_for="ada (0 in, quorum 1)")])
    assert told is not None and told.waiting_for == "part 1: ada (0 in, quorum 1)"


def test_a_member_has_its_last_word_the_worst_verdict_and_the_sum_of_its_bytes() -> None:
    one = member(
        silent_s=0.5, loss=2.0, bytes_sent=10, contributions=4, verdict="ok", verdict_reason="merged", phase="compute",
        outer_step=4, computing=0.5, upload_bytes=1, upload_total_bytes=4,
    )  # fmt: skip
    other = member(
        silent_s=0.1, loss=1.9, bytes_sent=20, contributions=3, rejections=1, verdict="nonfinite", verdict_reason="NaN",
        phase="upload", outer_step=3, computing=0.7, upload_bytes=3, upload_total_bytes=4,
    )  # fmt: skip
    told = whole_run([a_part(members=(one,)), a_part(members=(other,))])
    assert told is not None
    (row,) = told.members
    assert (row.loss, row.bytes_sent, row.contributions, row.rejections) == (1.9, 30, 4, 1)
    assert (row.verdict, row.verdict_reason, row.phase, row.outer_step) == ("nonfinite", "NaN", "upload", 3)
    for verdict in Verdict:
        told = whole_run([a_part(members=(one,)), a_part(members=(replace(other, verdict=verdict.value),))])
        assert told is not None and told.members[0].verdict == verdict.value, "whatever is wrong in one part is said"
    assert row.computing == pytest.approx(0.6) and (row.upload_bytes, row.upload_total_bytes) == (4, 8)


def test_a_member_that_one_owner_has_lost_is_still_here() -> None:
    gone = member(state="lost", reason="its connection broke", silent_s=0.0)
    for rows in ((gone, member(silent_s=1.0)), (member(silent_s=1.0), gone)):
        told = whole_run([a_part(members=(row,)) for row in rows])
        assert told is not None and told.members[0].state == "training"
    told = whole_run([a_part(members=(gone,))] * 2)
    assert told is not None and told.members[0].state == "lost"


def test_an_owner_that_never_saw_a_member_does_not_hide_what_became_of_it() -> None:
    left = member(state="left", reason="the run has finished", silent_s=9.0, loss=2.0)
    unseen = MemberStatus(peer_id="ada", role="peer", state="invited", reason="has not attended since the aggregator started")
    for rows in ((left, unseen), (unseen, left)):
        told = whole_run([a_part(members=(row,)) for row in rows])
        assert told is not None and (told.members[0].state, told.members[0].loss) == ("left", 2.0)


def test_an_owner_invents_no_members() -> None:
    strangers = tuple(member(peer_id=f"stranger-{i}") for i in range(50))
    loss = Curve(kind="loss", peer_id="stranger-1", x=(1.0,), t=(1.0,), y=(1.0,))
    lying = a_part(members=(*strangers, member()), curves=(loss,), expected=("ada", "stranger-1"))
    told = whole_run([lying, a_part(members=(member(),))], members={"ada"})
    assert told is not None
    assert [row.peer_id for row in told.members] == ["ada"] and told.curves == () and "stranger-1" not in told.expected


def test_arrived_is_who_is_complete_in_every_part() -> None:
    parts = [a_part(expected=("ada", "bob"), arrived=("ada", "bob")), a_part(expected=("ada", "bob"), arrived=("ada",))]
    told = whole_run(parts)
    assert told is not None and (told.expected, told.arrived) == (("ada", "bob"), ("ada",))


def test_curves_whose_points_were_thinned_at_other_steps_are_joined_where_both_are() -> None:
    """Each aggregator drops every second point when a curve is full: from its own first one on."""

    def thinned(first: int, every: int, last: int) -> RunStatus:
        x = (*map(float, range(first, last, every)), float(last))
        return a_part(curves=(Curve(kind="bytes_in", x=x, t=x, y=x), Curve(kind="norm", x=x, t=x, y=(3.0,) * len(x))))

    told = whole_run([thinned(1, 8, 100), thinned(7, 8, 99)])
    assert told is not None
    for curve in told.curves:
        assert len(curve.x) >= 12 and (curve.x[0], curve.x[-1]) == (7.0, 99.0) and curve.t == curve.x
        assert curve.y == pytest.approx([2 * x if curve.kind == "bytes_in" else math.hypot(3, 3) for x in curve.x])
    alone = whole_run([thinned(1, 8, 20), thinned(30, 8, 99)])
    assert alone is not None and all(curve.x == () for curve in alone.curves)


def test_curves_of_the_run_are_at_the_steps_that_all_parts_have() -> None:
    def part(*ys: float) -> RunStatus:
        x = tuple(float(i) for i in range(1, len(ys) + 1))
        kinds = ("norm", "bytes_in", "cosine", "round_s")
        return a_part(curves=tuple(Curve(kind=kind, x=x, t=x, y=ys) for kind in kinds))

    told = whole_run([part(3.0, 6.0, 1.0), part(4.0, 8.0)])
    assert told is not None
    ys = {curve.kind: curve.y for curve in told.curves}
    assert ys == {"norm": (5.0, 10.0), "bytes_in": (7.0, 14.0), "cosine": (3.5, 7.0), "round_s": (4.0, 8.0)}
    assert all(curve.x == (1.0, 2.0) for curve in told.curves)


def test_what_all_owners_say_of_a_member_is_said_once() -> None:
    lost = Event(number=9, t=5.0, kind="member", peer_id="bob", text="bob: lost (silent)", tone="bad")
    own = Event(number=2, t=6.0, kind="round", peer_id="", text="round 3 aborted: too few")
    again = replace(lost, t=5000.0)
    told = whole_run([a_part(events=(lost, own)), a_part(events=(replace(lost, t=5.2), again))])
    assert told is not None
    assert [(each.number, each.text) for each in told.events] == [
        (1, "bob: lost (silent)"),
        (2, "part 0: round 3 aborted: too few"),
        (3, "bob: lost (silent)"),
    ]


def test_another_owner_goes_on_where_the_one_before_stopped() -> None:
    before = a_part(
        a_round(1),
        a_round(2),
        events=(Event(number=1, t=1.0, kind="run", peer_id="", text="founded"),),
        curves=(
            Curve(kind="bytes_in", x=(1.0, 2.0), t=(1.0, 2.0), y=(10.0, 20.0)),
            Curve(kind="norm", x=(1.0, 2.0), t=(1.0, 2.0), y=(5.0, 4.0)),
        ),
    )
    now = a_part(
        a_round(3, grant=2),
        t=3.5,
        events=(Event(number=1, t=3.0, kind="member", peer_id="ada", text="ada is back"),),
        curves=(
            Curve(kind="bytes_in", x=(3.0,), t=(3.0,), y=(10.0,)),
            Curve(kind="norm", x=(3.0,), t=(3.0,), y=(3.0,)),
        ),
    )
    told = continued(before, now)
    assert [report.outer_step for report in told.rounds] == [1, 2, 3]
    assert [each.text for each in told.events] == ["founded", "ada is back"]
    assert {curve.kind: curve.y for curve in told.curves} == {"bytes_in": (10.0, 20.0, 30.0), "norm": (5.0, 4.0, 3.0)}
    assert continued(told, now).rounds == told.rounds, "what is told again is there once"
    assert continued(replace(before, run_id="another"), now) == now


def test_whatever_an_owner_says_what_is_kept_is_bounded() -> None:
    many = a_part(
        *(a_round(i + 1) for i in range(3000)),
        events=tuple(Event(number=i + 1, t=float(i), kind="run", peer_id="", text=str(i)) for i in range(2000)),
        curves=(Curve(kind="norm", x=tuple(map(float, range(9000))), t=tuple(map(float, range(9000))), y=(1.0,) * 9000),),
    )
    told = continued(many, many)
    assert len(told.rounds) == KEPT_ROUNDS and len(told.events) <= KEPT_EVENTS + 2000
    assert len(told.curves[0].x) <= 1024 and told.curves[0].x[-1] == 8999.0
    whole = whole_run([many, many], members={"ada"})
    assert whole is not None and len(whole.rounds) == KEPT_ROUNDS and len(whole.events) == KEPT_EVENTS


def test_what_is_not_finite_spoils_nobody_elses_numbers() -> None:
    told = whole_run([a_part(members=(member(computing=math.nan),)), a_part(members=(member(computing=0.5),))])
    assert told is not None and told.members[0].computing == 0.5


def test_a_council_is_the_same_through_json() -> None:
    council = CouncilStatus(
        leader="ada",
        quorum="2 of 3 here, 2 needed",
        lost=False,
        term=4,
        version=9,
        parts=(CouncilPart(part=0, owner="bob", outer_step=7, held_by=2, waiting_for="waits for ada"),),
        members=(CouncilMember(peer_id="bob", votes=True, state="here", owns=(0,), why=""),),
        notes=("bob is leaving",),
    )
    status = replace(a_part(a_round(1)), council=council)
    assert RunStatus.from_json(json.loads(json_text(status.as_json()))).council == council
    assert RunStatus.from_json(a_part().as_json()).council is None
