"""What a coordinator's trackers are told: a committed round's values, in which a peer that lies about its loss counts once."""

from __future__ import annotations

import math

from aggregator.run_feed import PeerReported, RoundReport
from aggregator.tracking import Tracking
from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb.messages import Heartbeat, PeerState


class Recorder:
    def __init__(self) -> None:
        self.said: list[tuple[int, dict[str, float | str]]] = []

    def log(self, step: int, values: dict[str, float | str]) -> None:
        self.said.append((step, values))


def verdicts(**norms: float) -> tuple[FragmentCommit, ...]:
    each = tuple(
        PeerVerdict(peer_id=peer_id, verdict=Verdict.OK if weight else Verdict.ANOMALOUS, norm=norm, weight=weight)
        for peer_id, norm in norms.items()
        for weight in [0.0 if norm > 100 else 1 / 3]
    )
    return (FragmentCommit(fragment_id=0, payload=None, verdicts=each, merged_norm=1.5, clip=1.0),)


def report(outer_step: int, *, committed: bool = True, **norms: float) -> RoundReport:
    return RoundReport(
        round_id=outer_step,
        outer_step=outer_step,
        committed=committed,
        reason="",
        seconds=2.5,
        bytes_in=3_000_000,
        bytes_out=500_000,
        missing=("e",),
        digest="",
        fragments=verdicts(**norms) if committed else (),
    )


def test_a_round_that_commits_is_told_with_the_median_of_the_losses_behind_it() -> None:
    recorder = Recorder()
    tracking = Tracking(recorder)
    losses = {"a": 2.0, "b": 3.0, "c": -1e30, "d": 9.0, "x": 1.0}
    for peer_id, loss in losses.items():
        tracking.on_event(PeerReported(peer_id, Heartbeat(state=PeerState.TRAINING, loss=loss)), 0.0)
    tracking.on_event(report(1, committed=False), 0.0)
    tracking.on_event(report(1, a=1.0, b=2.0, c=3.0, d=1e6), 0.0)
    ((step, values),) = recorder.said
    assert step == 1 and values["loss"] == 2.0 and values["edit/norm"] == 2.0 and values["edit/merged_norm"] == 1.5
    counts = {name: values[f"edit/{name}"] for name in ("merged", "rejected", "missing", "aborted")}
    assert counts == {"merged": 3, "rejected": 1, "missing": 1, "aborted": 1}
    assert (values["edit/received_mb"], values["edit/update_mb"], values["edit/round_s"]) == (3.0, 0.5, 2.5)


def test_where_no_peer_says_a_finite_loss_there_is_none() -> None:
    recorder = Recorder()
    tracking = Tracking(recorder)
    tracking.on_event(PeerReported("a", Heartbeat(state=PeerState.TRAINING, loss=math.nan)), 0.0)
    tracking.on_event(report(4, a=1.0, b=2.0), 0.0)
    assert "loss" not in recorder.said[0][1] and recorder.said[0][0] == 4
