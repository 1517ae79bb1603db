import math

import pytest

from edit.view.state import RunState, Steps, Total


def peer_line(t: float, **fields: object) -> dict[str, object]:
    line = {"kind": "peer", "t": t, "peer_id": "peer-0", "state": "training", "outer_step": 1, "inner_steps": 10, "loss": 3.0}
    return {**line, "tokens_per_s": 900.0, "bytes_sent": 0, "bytes_received": 0, "digest": "d1", **fields}


def round_line(outer_step: int, peers: list[dict[str, list[object]]], **fields: object) -> dict[str, object]:
    line = {"kind": "round", "t": 5.0, "round_id": 1_000_000 + outer_step, "outer_step": outer_step, "committed": True}
    line |= {"reason": "all in", "seconds": 1.5, "bytes_in": 100, "bytes_out": 40, "missing": [], "digest": f"d{outer_step}"}
    verdicts = [{"fragment_id": i, "merged_norm": 1.0, "clip": 1.0, "peers": each} for i, each in enumerate(peers)]
    return {**line, "verdicts": verdicts, **fields}


@pytest.fixture
def state() -> RunState:
    return RunState(["peer-0", "peer-1"], outer_steps=10, sync_every=30)


def test_a_counter_goes_on_after_its_process_started_again():
    total = Total()
    seen = []
    for count in (5, 9, 2, 2, 7, 0):
        total.update(count)
        seen.append(total.value)
    assert seen == [5, 9, 11, 11, 16, 16]


def test_a_killed_peers_steps_go_on_where_they_were_whether_from_a_checkpoint_or_from_none():
    steps = Steps()
    assert [steps.update(count) for count in (50, 95, 91, 92, 100, 1, 11)] == [50, 95, 95, 96, 104, 104, 114]


def test_a_peers_line_gives_its_row_rates_and_curve(state):
    state.apply(peer_line(10.0, bytes_sent=1000))
    state.apply(peer_line(12.0, bytes_sent=5000, bytes_received=600, inner_steps=14, loss=2.5))
    row = state.peers["peer-0"]
    assert (row.sent_rate, row.received_rate, row.sent) == (2000.0, 300.0, 5000)
    assert (row.loss, row.steps.value) == (2.5, 14)
    assert state.digest_reports == {("peer-0", 0, 1, "d1")}


def test_a_restarted_peer_keeps_its_bytes_and_its_steps_and_has_no_negative_rate(state):
    state.apply(peer_line(10.0, bytes_sent=1000, inner_steps=50))
    state.apply(peer_line(15.0, bytes_sent=0, inner_steps=1, loss=None))
    row = state.peers["peer-0"]
    assert (row.sent, row.steps.value, row.sent_rate) == (1000, 50, 0.0)
    assert row.loss == 3.0


def test_a_peers_own_file_gives_its_curve_and_the_digest_of_every_outer_step(state):
    steps = [(10, 3.0), (20, 2.5), (10, None), (20, 2.0)]  # it was started again after 20 steps
    for t, (step, loss) in enumerate(steps):
        state.apply({"kind": "step", "t": t, "peer_id": "peer-1", "step": step, "loss": loss, "outer_step": 1})
    state.apply({"kind": "outer", "t": 5.0, "peer_id": "peer-1", "outer_step": 2, "digest": "d2", "reason": "all in"})
    state.apply({"kind": "outer", "t": 5.0, "peer_id": "stranger", "outer_step": 2, "digest": "d2", "reason": "all in"})
    assert [(point.step, point.loss) for point in state.peers["peer-1"].curve] == [(10, 3.0), (20, 2.5), (30, 2.0)]
    assert state.digest_reports == {("peer-1", 0, 2, "d2")}


def test_a_lost_peer_sends_nothing(state):
    state.apply(peer_line(10.0))
    state.apply(peer_line(11.0, bytes_sent=1000))
    state.apply({"kind": "member", "t": 12.0, "peer_id": "peer-0", "state": "lost", "reason": "stream closed"})
    row = state.peers["peer-0"]
    assert (row.state, row.reason, row.tokens_per_s, row.sent_rate) == ("lost", "stream closed", 0.0, 0.0)


def test_a_round_shows_the_worst_verdict_the_mean_weight_and_the_whole_norm(state):
    fragments = [
        {"peer-0": ["ok", 3.0, 1.0], "peer-1": ["nonfinite", None, 0.0]},
        {"peer-0": ["ok", 4.0, 0.5], "peer-1": ["ok", 1.0, 0.5]},
    ]
    state.apply(round_line(1, fragments))
    cells = state.rounds[0].cells
    assert (cells["peer-0"].verdict, cells["peer-0"].weight, cells["peer-0"].norm) == ("ok", 0.75, 5.0)
    assert (cells["peer-1"].verdict, cells["peer-1"].weight, cells["peer-1"].norm) == ("nonfinite", 0.25, math.inf)
    assert (cells["peer-1"].bad, cells["peer-1"].fragments) == (1, 2)
    assert [(row.merged, row.rejected) for row in state.peers.values()] == [(1, 0), (1, 1)]


def test_an_aborted_round_does_not_advance(state):
    state.apply(round_line(1, [{"peer-0": ["ok", 1.0, 1.0]}]))
    state.apply(round_line(2, [], committed=False, reason="too few"))
    assert state.outer_step == 1
    assert state.digests == {(0, 1): "d1"}


def test_lines_of_the_lab_and_of_the_lone_peer(state):
    state.apply({"kind": "event", "t": 1.0, "text": "peer-2 is gone", "tone": "fault"})
    state.apply({"kind": "lone", "t": 1.0, "step": 30, "loss": 2.0})
    state.apply({"kind": "validation", "t": 2.0, "who": "outer", "step": 30, "loss": 2.1})
    assert [event.text for event in state.events] == ["peer-2 is gone"]
    assert state.lone[0].step == 30
    assert state.validation["outer"][0].loss == 2.1


@pytest.mark.parametrize(
    "line", [{}, {"kind": "future"}, {"kind": "peer"}, {"kind": "round", "t": "x"}, {"kind": "member", "peer_id": "operator"}]
)
def test_a_line_that_says_nothing_changes_nothing(state, line):
    state.apply(line)
    assert not state.rounds
    assert [row.state for row in state.peers.values()] == ["invited", "invited"]


def test_the_parts_of_a_swarm_have_connections_of_their_own_and_a_late_line_of_a_former_owner_counts_nothing(state):
    state.apply(peer_line(10.0, part=0, bytes_sent=500, digest="d0.1"))
    state.apply(peer_line(10.1, part=1, bytes_sent=700, digest="d1.1"))
    state.apply(peer_line(11.0, part=0, bytes_sent=900, digest="d0.1"))
    state.apply(peer_line(10.5, part=0, bytes_sent=600, inner_steps=5, digest="d0.1"))  # it was read late
    row = state.peers["peer-0"]
    assert (row.sent, row.steps.value, row.sent_rate) == (1600, 10, 1100.0)
    assert state.digest_reports == {("peer-0", 0, 1, "d0.1"), ("peer-0", 1, 1, "d1.1")}
