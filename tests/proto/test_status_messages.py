"""A run's status as a record, a message and JSON: the same facts in each, and names that scripts may rely on.

A loss that is not known is NaN, which from Python 3.13 on makes a record unequal to itself: their `repr` is compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest

from edit.errors import RemoteProtocolError
from edit.plain_text import json_text
from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb import control_pb2 as cpb
from editpb.run_status import Curve, Event, MemberStatus, RoundReport, RunStatus, Setting
from editpb.status_messages import status_from_pb, status_to_pb

VERDICT = PeerVerdict(peer_id="a", verdict=Verdict.ANOMALOUS, norm=2.5, weight=0.0, staleness=2)
FRAGMENT = FragmentCommit(fragment_id=1, payload=None, verdicts=(VERDICT,), merged_norm=0.5, clip=0.25)
ROUND = RoundReport(
    round_id=1_000_001,
    outer_step=4,
    committed=True,
    reason="quorum and grace",
    seconds=2.5,
    bytes_in=100,
    bytes_out=50,
    missing=("b",),
    digest="e" * 64,
    fragments=(FRAGMENT,),
    carried=("c",),
    t=1.7e9,
    every=8,
    batch=4,
    outer_lr=0.7,
    outer_momentum=0.6,
)
MEMBER = MemberStatus(
    peer_id="a",
    role="peer",
    state="training",
    reason="heartbeat",
    silent_s=0.5,
    outer_step=4,
    inner_steps=40,
    loss=2.25,
    tokens_per_s=1000.0,
    step_s=0.125,
    bytes_sent=7,
    bytes_received=8,
    contributions=3,
    rejections=2,
    absences=1,
    deadline_s=30.0,
    phase="upload",
    upload_bytes=5,
    upload_total_bytes=10,
    download_s=1.0,
    compute_s=2.0,
    upload_s=3.0,
    optional=True,
    quarantined_s=59.5,
    expires=1.8e9,
    device="NVIDIA H200",
    computing=0.5,
    exchanging=0.25,
    waiting=0.125,
    verdict="anomalous",
    verdict_reason="norm 40 times that of the others",
    consented=True,
    metrics={"accuracy": 0.5},
)
LOSTLESS = dataclasses.replace(MEMBER, loss=math.nan)
STATUS = RunStatus(
    run_id="run",
    phase="collecting",
    outer_step=4,
    outer_steps=100,
    round_id=1_000_002,
    reason="rounds.quorum = 2, but only 1 peer has joined the run",
    waiting_for="b (1 in, quorum 2)",
    warnings=("the certificate of this server expires in 6 days",),
    draining=True,
    last_step=6,
    tokens=640,
    stop_tokens=1000,
    digest="e" * 64,
    parameters=12,
    peak_memory_bytes=1 << 30,
    expected=("a", "b"),
    arrived=("a",),
    deadline_in_s=12.5,
    members=(
        MEMBER,
        MemberStatus(peer_id="b", role="peer", state="invited", reason="has not attended since the coordinator started"),
    ),
    rounds=(ROUND,),
    t=1.75e9,
    eta_s=90.0,
    curves=(Curve(kind="loss", peer_id="a", x=(1.0, 2.0), t=(1.7e9, 1.71e9), y=(3.0, 2.5)),),
    events=(Event(number=7, t=1.7e9, kind="member", peer_id="b", text="b: lost (silent)", tone="bad"),),
    settings=(Setting(name="sync.every", value="100", default="50"),),
    masks="collecting masked vectors",
    privacy="organisation-level, eps 1.53",
    epsilon=1.53,
    audit="12 entries, head 0123456789abcdef",
    governance="waiting for 1 more approval of configuration sha256:ab: approvers bob; ann approved it",
)


@pytest.mark.parametrize("phase", ["founding", "gathering", "collecting", "committing", "paused", "finished"])
def test_a_status_survives_the_wire(phase: str) -> None:
    status = dataclasses.replace(STATUS, phase=phase)
    message = cpb.StatusReply.FromString(status_to_pb(status).SerializeToString())
    assert repr(status_from_pb(message)) == repr(status)
    assert repr(status_from_pb(message, aggregator=2)) == repr(dataclasses.replace(status, aggregator=2))


def test_no_deadline_survives_the_wire() -> None:
    status = dataclasses.replace(STATUS, deadline_in_s=None, eta_s=None, epsilon=None)
    assert repr(status_from_pb(status_to_pb(status))) == repr(status) == repr(RunStatus.from_json(status.as_json()))
    assert status.as_json()["deadline_in_s"] == status.as_json()["eta_s"] == -1.0


def test_a_member_that_never_attended_has_no_loss_whatever_earlier_software_says() -> None:
    message = cpb.StatusReply.FromString(status_to_pb(STATUS).SerializeToString())
    message.members[1].heartbeat.loss = 0.0
    assert math.isnan(status_from_pb(message).members[1].loss)
    assert json.loads(json_text(STATUS.members[1].as_json()))["loss"] is None


def test_no_field_is_left_out_anywhere() -> None:
    """Every value of the samples differs from its default, so a mapping that forgets one cannot pass above."""
    defaults = MemberStatus(peer_id="", role="", state="", reason="")
    same = [one.name for one in dataclasses.fields(MEMBER) if getattr(MEMBER, one.name) == getattr(defaults, one.name)]
    assert same == []
    assert set(MEMBER.as_json()) == {one.name for one in dataclasses.fields(MEMBER)}
    shown = {one.name for one in dataclasses.fields(STATUS)} - {"aggregator", "council"}  # which is of a whole swarm only
    assert set(STATUS.as_json()) == shown
    assert set(ROUND.as_json()) == {one.name for one in dataclasses.fields(ROUND)} - {"fragments", "t"} | {"verdicts"}


def test_a_status_survives_json() -> None:
    further = dataclasses.replace(STATUS, aggregator=1)
    status = dataclasses.replace(STATUS, aggregators=(further,))
    assert repr(RunStatus.from_json(json.loads(json_text(status.as_json())))) == repr(status)
    absent = RunStatus.from_json(json.loads(json_text(dataclasses.replace(STATUS, members=(LOSTLESS,)).as_json())))
    assert math.isnan(absent.members[0].loss)


def test_a_round_says_what_became_of_each_peer_and_how_much_they_agree() -> None:
    """Two peers at a right angle, equal norms and weights: the mean is 1/sqrt(2) as long, the cosine of each to it as large."""
    good = [PeerVerdict(peer_id=each, verdict=Verdict.OK, norm=2.0, weight=0.5) for each in ("a", "b")]
    bad = PeerVerdict(peer_id="d", verdict=Verdict.ANOMALOUS, norm=80.0, weight=0.0)
    first = FragmentCommit(fragment_id=0, payload=None, verdicts=(*good, bad), merged_norm=math.sqrt(2), clip=1.0)
    second = FragmentCommit(fragment_id=1, payload=None, verdicts=tuple(good), merged_norm=math.sqrt(2), clip=1.0)
    report = dataclasses.replace(ROUND, fragments=(first, second), missing=("b2",), carried=("c",))
    assert report.number == 1
    assert report.cosine == pytest.approx(math.sqrt(0.5)) and report.norm == pytest.approx(2.0)
    told = {each.peer_id: (each.verdict, each.reason, each.weight) for each in report.peers}
    assert told == {
        "a": ("ok", "merged", 0.5),
        "b": ("ok", "merged", 0.5),
        "b2": ("absent", "its contribution did not come in time", 0.0),
        "c": ("carried", "late: counts for the next round", 0.0),
        "d": ("anomalous", "norm 28.3 times that of the others", 0.0),
    }
    assert dataclasses.replace(report, fragments=()).cosine is None
    larger = dataclasses.replace(first, merged_norm=5.0)  # no mean of these is so long: another merger made it
    assert dataclasses.replace(report, fragments=(larger,)).cosine is None


def judged(fragment_id: int, verdicts: dict[str, Verdict], weight: float = 0.0) -> FragmentCommit:
    """One fragment of a round; weight: of each that is OK."""
    each = tuple(
        PeerVerdict(peer_id=peer_id, verdict=verdict, norm=1.0, weight=weight if verdict is Verdict.OK else 0.0)
        for peer_id, verdict in verdicts.items()
    )
    return FragmentCommit(fragment_id=fragment_id, payload=None, verdicts=each, merged_norm=1.0, clip=1.0)


def reasons(*fragments: FragmentCommit) -> dict[str, tuple[str, str]]:
    return {one.peer_id: (one.verdict, one.reason) for one in dataclasses.replace(ROUND, fragments=fragments, missing=()).peers}


def test_who_is_left_out_of_a_round_in_which_nothing_is_merged_reads_because_of_whom() -> None:
    """The sum of masked contributions is not opened where too few of them are sound; one that is not counts in no fragment."""
    odd, left = Verdict.ANOMALOUS, Verdict.REJECTED
    told = reasons(judged(0, {"a": left, "basel": odd, "c": left}), judged(1, {"a": left, "basel": left, "c": left}))
    assert told["a"] == told["c"] == ("rejected", "nothing was merged, too few are sound: basel is anomalous")
    assert told["basel"] == ("anomalous", "norm far above the usual")
    many = reasons(judged(0, {**dict.fromkeys("abcdef", Verdict.NONFINITE), "g": left}))
    named = ", ".join(f"{peer_id} is nonfinite" for peer_id in "abcd")
    assert many["g"] == ("rejected", f"nothing was merged, too few are sound: {named} and 2 more")
    assert reasons(judged(0, {"a": left, "c": left}))["a"][1] == "nothing was merged, the aggregator's log says why"
    some = reasons(judged(0, {"a": Verdict.OK, "c": left}, 1.0), judged(1, {"a": Verdict.OK, "c": Verdict.OK}, 0.5))
    assert some["c"] == ("rejected", "refused by the run's policy in 1 of 2 fragments")


def test_losses_of_others_are_shown_to_the_operator_or_where_the_run_shares_them() -> None:
    other = dataclasses.replace(MEMBER, peer_id="b")
    curves = (*STATUS.curves, Curve(kind="loss", peer_id="b", x=(1.0,), t=(1.7e9,), y=(3.0,)), Curve(kind="cosine"))
    status = dataclasses.replace(STATUS, members=(MEMBER, other), curves=curves)
    assert status.shown_to("operator", "op", False) == status == status.shown_to("observer", "eve", True)
    seen = status.shown_to("peer", "a", False)
    assert seen.members[0] == MEMBER and math.isnan(seen.members[1].loss)
    assert [(one.kind, one.peer_id) for one in seen.curves] == [("loss", "a"), ("cosine", "")]
    assert "2.25" not in json_text(status.shown_to("observer", "eve", False).as_json())


def test_the_news_of_a_curve_come_after_what_is_kept_of_it_and_cannot_grow_without_bound() -> None:
    before = Curve(kind="loss", peer_id="a", x=(1.0, 2.0, 3.0), t=(1.0, 2.0, 3.0), y=(5.0, 6.0, 7.0))
    status = dataclasses.replace(STATUS, curves=(before, Curve(kind="cosine", x=(1.0,), t=(1.0,), y=(0.5,))))
    news = Curve(kind="loss", peer_id="a", x=(4.0,), t=(4.0,), y=(8.0,), kept=2)
    (curve,) = status.updated(dataclasses.replace(STATUS, curves=(news,))).curves
    assert (curve.x, curve.t, curve.y, curve.kept) == ((1.0, 2.0, 4.0), (1.0, 2.0, 4.0), (5.0, 6.0, 8.0), 0)
    assert status.updated(dataclasses.replace(STATUS, curves=())).curves == status.curves
    for other in (dataclasses.replace(status, run_id="another"), dataclasses.replace(status, curves=())):
        assert other.updated(dataclasses.replace(STATUS, curves=(news,))).curves == (dataclasses.replace(news, kept=0),)
    many = (1.0,) * 1000
    lie = dataclasses.replace(STATUS, curves=(Curve(kind="loss", peer_id="a", x=many, t=many, y=many, kept=2**32 - 1),))
    for _ in range(3):
        status = status.updated(lie)
    assert [len(each) for each in (status.curves[0].x, status.curves[0].t, status.curves[0].y)] == [1024] * 3


def test_curves_whose_lists_differ_in_length_are_an_error_of_one_line() -> None:
    with pytest.raises(RemoteProtocolError, match="curve 'loss': 2, 0 and 1 values"):
        reply = status_to_pb(STATUS)
        reply.curves[0].CopyFrom(cpb.Curve(kind="loss", x=[1, 2], y=[1]))
        status_from_pb(reply)


def changed(**values: object) -> RunStatus:
    return dataclasses.replace(STATUS, **values)  # type: ignore[arg-type]


def with_member(**values: object) -> RunStatus:
    return changed(members=(dataclasses.replace(MEMBER, **values),))  # type: ignore[arg-type]


def with_curve(**values: object) -> RunStatus:
    return changed(curves=(dataclasses.replace(STATUS.curves[0], **values),))  # type: ignore[arg-type]


def with_event(**values: object) -> RunStatus:
    return changed(events=(dataclasses.replace(STATUS.events[0], **values),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (changed(t=math.nan), "t is nan, not 0 to 2.53402e+11"),
        (changed(eta_s=math.inf), "eta_s is inf, not 0 to 1e+30"),
        (changed(eta_s=math.nan), "eta_s is nan"),
        (changed(deadline_in_s=math.inf), "deadline_in_s is inf"),
        (changed(run_id="r\x1b[2J"), r"run_id 'r\x1b[2J' is not 1 to 64 of letters"),
        (changed(expected=("a b",)), "expected 'a b' is not 1 to 64"),
        (changed(arrived=("",)), "arrived '' is not 1 to 64"),
        (changed(rounds=(dataclasses.replace(ROUND, t=1e30),)), "t of a round is 1e+30"),
        (changed(rounds=(dataclasses.replace(ROUND, missing=("[/x]",)),)), "missing '[/x]' is not"),
        (changed(rounds=(dataclasses.replace(ROUND, carried=("[/x]",)),)), "carried '[/x]' is not"),
        (with_event(t=1e30), "t of an event is 1e+30"),
        (with_event(t=-1.0), "t of an event is -1.0"),
        (with_event(peer_id="[/x]"), "peer_id of an event '[/x]' is not"),
        (with_member(peer_id="[/x]"), "peer_id '[/x]' is not 1 to 64"),
        (with_member(expires=math.inf), "expires is inf"),
        (with_member(quarantined_s=math.inf), "quarantined_s is inf"),
        (with_member(computing=-1e300), "computing is -1e+300, not 0 to 1"),
        (with_member(exchanging=math.nan), "exchanging is nan, not 0 to 1"),
        (with_member(waiting=2.0), "waiting is 2.0, not 0 to 1"),
        (with_curve(x=(1.0, math.nan)), "x of a curve is nan"),
        (with_curve(x=(1.0, math.inf)), "x of a curve is inf"),
        (with_curve(t=(1e300, 1.0)), "t of a curve is 1e+300"),
        (with_curve(y=(1.0, 1e308)), "y of a curve is 1e+308, not -1e+100 to 1e+100"),
        (with_curve(y=(-math.inf, 1.0)), "y of a curve is -inf"),
        (with_curve(peer_id="[/x]"), "peer_id of a curve '[/x]' is not"),
    ],
)
def test_what_no_aggregator_says_is_an_error_of_one_line(status: RunStatus, said: str) -> None:
    message = cpb.StatusReply.FromString(status_to_pb(status).SerializeToString())
    with pytest.raises(RemoteProtocolError, match=f"^{re.escape(said)}") as found:
        status_from_pb(message)
    assert str(found.value).isprintable()


def test_what_a_run_that_diverges_says_is_shown() -> None:
    """So is a member that was never heard, and a certificate that never ends."""
    verdicts = (VERDICT, dataclasses.replace(VERDICT, peer_id="b", norm=math.inf))
    fragments = (FRAGMENT, dataclasses.replace(FRAGMENT, fragment_id=2, verdicts=verdicts, merged_norm=1e200))
    status = with_curve(y=(1e30, -1e45), peer_id="")
    for loss in (math.inf, 1.7e308):
        member = dataclasses.replace(MEMBER, loss=loss, silent_s=math.inf, expires=253_402_300_799.0)
        status = dataclasses.replace(status, members=(member,), rounds=(dataclasses.replace(ROUND, fragments=fragments),))
        assert repr(status_from_pb(cpb.StatusReply.FromString(status_to_pb(status).SerializeToString()))) == repr(status)
    assert json.loads(json_text(status.as_json()))["rounds"][0]["cosine"] is None


def test_json_of_several_aggregators() -> None:
    status = dataclasses.replace(STATUS, members=(MEMBER,))
    further = dataclasses.replace(status, aggregator=1)
    shown = dataclasses.replace(status, aggregators=(further,)).as_json()
    assert shown["aggregators"] == [further.as_json()]
    assert next(iter(further.as_json())) == "aggregator" and "aggregators" not in further.as_json()
    assert json.loads(json.dumps(shown)) == shown


def test_json_has_null_where_a_number_is_not_finite() -> None:
    diverged = dataclasses.replace(MEMBER, loss=math.inf)
    shown = json.loads(json_text(dataclasses.replace(STATUS, members=(diverged,)).as_json()), parse_constant=pytest.fail)
    assert shown["members"][0]["loss"] is None


def test_an_unknown_phase_or_verdict_is_an_error_of_one_line() -> None:
    with pytest.raises(RemoteProtocolError, match="run phase 77 is not known"):
        status_from_pb(cpb.StatusReply(view=cpb.View(phase=77)))  # type: ignore[arg-type]
    verdicts = cpb.FragmentVerdicts(verdicts=[cpb.PeerVerdict(peer_id="a", verdict="splendid")])
    reply = cpb.StatusReply(run_id="run", rounds=[cpb.RoundStatus(fragments=[verdicts])])
    with pytest.raises(RemoteProtocolError, match="verdict 'splendid' is not known"):
        status_from_pb(reply)


def test_asking_for_the_status_needs_no_torch() -> None:
    code = "import sys, aggregator.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
