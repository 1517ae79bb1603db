import pytest

from edit.lab.demo.event_messages import EventMessages
from edit.lab.demo.recorder import Recorder
from edit.view.state import RunState


@pytest.fixture
def state():
    return RunState(["peer-0", "peer-1"], outer_steps=10, sync_every=30)


def texts_of(state, *records):
    messages, texts = EventMessages(), []
    for record in records:
        state.apply(record)
        texts += [event.text for event in messages.events_of(record, state)]
    return texts


def round_line(peers, **fields):
    line = {"kind": "round", "t": 5.0, "round_id": 1_000_007, "outer_step": 3, "committed": True, "reason": "all in"}
    fragment = {"fragment_id": 0, "merged_norm": 1.0, "clip": 1.0, "peers": peers}
    return {**line, "seconds": 1.0, "bytes_in": 1, "bytes_out": 1, "verdicts": [fragment], **fields}


def test_a_round_without_trouble_is_not_worth_a_line(state):
    assert texts_of(state, round_line({"peer-0": ["ok", 1.0, 0.5], "peer-1": ["ok", 1.0, 0.5]})) == []


def test_damage_is_named_with_its_size(state):
    huge = round_line({"peer-0": ["ok", 2.0, 1.0], "peer-1": ["anomalous", 2000.0, 0.0]})
    assert texts_of(state, huge) == [
        "outer step 3: peer-1 sent a pseudo-gradient of 1e+03 times the others' norm: weight 0, the others' are merged"
    ]
    half = round_line({})
    peers = [{"peer-0": ["ok", 1.0, 1.0], "peer-1": [verdict, None, 0.0]} for verdict in ("nonfinite", "ok", "ok")]
    half["verdicts"] = [{"fragment_id": i, "merged_norm": 1.0, "clip": 1.0, "peers": each} for i, each in enumerate(peers)]
    assert texts_of(state, half)[0].endswith("NaN or infinite values: weight 0 in 1 of 3 fragments, the others' are merged")
    nan = round_line({"peer-0": ["ok", 2.0, 1.0], "peer-1": ["nonfinite", None, 0.0]})
    assert "peer-1 sent NaN or infinite values" in texts_of(state, nan)[0]


@pytest.mark.parametrize(
    ("verdict", "norm", "tone"), [("anomalous", 2000.0, "good"), ("anomalous", 4.0, "info"), ("nonfinite", None, "good")]
)
def test_only_real_damage_is_marked(state, verdict, norm, tone):
    line = round_line({"peer-0": ["ok", 2.0, 1.0], "peer-1": [verdict, norm, 0.0]})
    state.apply(line)
    assert [event.tone for event in EventMessages().events_of(line, state)] == [tone]


def test_when_nobody_is_ok_there_is_nothing_to_compare_with(state):
    texts = texts_of(state, round_line({"peer-0": ["anomalous", 9.0, 0.0], "peer-1": ["idle", 0.0, 0.0]}))
    assert len(texts) == 2
    assert "an anomalous pseudo-gradient" in texts[0]


def test_an_aborted_round_gives_its_reason(state):
    assert texts_of(state, round_line({}, committed=False, verdicts=[], reason="1 of 2 needed")) == [
        "round 7 aborted: 1 of 2 needed"
    ]


def test_a_peer_goes_and_comes_back(state):
    lost = {"kind": "member", "t": 6.0, "peer_id": "peer-1", "state": "lost", "reason": "its stream closed"}
    starting = {"kind": "member", "t": 8.0, "peer_id": "peer-1", "state": "starting", "reason": ""}
    back = {"kind": "peer", "t": 9.0, "peer_id": "peer-1", "state": "training", "outer_step": 4, "loss": 2.0}
    assert texts_of(state, back, lost, starting, back, back) == [
        "peer-1 is lost: its stream closed",
        "peer-1 is back at outer step 4, training on",
    ]


def test_strangers_are_nobodys_business(state):
    assert texts_of(state, {"kind": "member", "t": 6.0, "peer_id": "operator", "state": "lost", "reason": "x"}) == []


def test_the_recorder_gives_the_lone_peers_lines_a_wall_clock(tmp_path, state):
    (tmp_path / "alone.jsonl").write_text('{"kind": "alone", "step": 10, "loss": 3.0, "t": 2.5}\n')
    with Recorder(state, tmp_path / "merged.jsonl", unix=lambda: 1000.0) as recorder:
        recorder.follow("lone", tmp_path / "alone.jsonl")
        recorder.poll()
        recorder.poll()
    assert [(point.t, point.step, point.loss) for point in state.lone] == [(1002.5, 10, 3.0)]
    assert '"source": "lone"' in (tmp_path / "merged.jsonl").read_text()
