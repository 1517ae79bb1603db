import json

import pytest

from edit.lab.demo.results import Losses, Restart, check_digests, collect, data_parallel_bytes


def results_of(state, **changes):
    values = {
        "run_id": "demo-1",
        "seed": 3,
        "wall_s": 61.5,
        "losses": Losses(outer_step=20, initial=5.5, outer=1.8, lone=2.0, windows=512),
        "restart": Restart(6, "d6", "d6"),
        "sample": "def f():",
    }
    return collect(state, **{**values, **changes})


def test_bytes_of_data_parallel_training():
    assert data_parallel_bytes(4, 1000, 10) == 2 * 3 * 1000 * 4 * 10 // 4
    assert data_parallel_bytes(1, 1000, 10) == 0


@pytest.mark.parametrize(("lone", "outer", "percent"), [(2.0, 1.8, 10.0), (2.0, 2.1, -5.0), (None, 1.8, None)])
def test_how_far_below_the_lone_peer(lone, outer, percent):
    got = Losses(outer_step=20, initial=5.0, outer=outer, lone=lone, windows=512).percent_below_lone
    assert got == pytest.approx(percent) if percent is not None else got is None


def test_results_of_a_whole_board(make_state):
    results = results_of(make_state())
    assert (results.complete, results.committed, results.aborted, results.steps) == (True, 10, 0, 300)
    assert results.round_s == 2.9
    assert (results.lone_steps, results.peers[0].own_steps) == (300, 300)
    damaged = results.peers[3]
    assert (damaged.merged, damaged.verdicts) == (8, {"ok": 8, "nonfinite": 1, "anomalous": 1})
    assert results.peers[2].verdicts == {"ok": 8}
    assert results.mean_sent == 8_700_000
    assert results.data_parallel_bytes == 2 * 3 * 868_000 * 300
    assert results.fewer_bytes == pytest.approx(results.data_parallel_bytes / 8_700_000)


def test_a_board_that_stopped_early_counts_the_steps_it_made(make_state):
    results = results_of(make_state(4), losses=None, restart=None)
    assert (results.complete, results.steps) == (False, 120)
    assert results.data_parallel_bytes == data_parallel_bytes(4, 868_000, 120)


def test_an_empty_board_has_results_too(make_state):
    state = make_state(0)
    state.status = None
    results = results_of(state, losses=None, restart=None)
    assert (results.committed, results.fewer_bytes, results.digests.compared) == (0, None, 0)
    json.dumps(results.as_json(), allow_nan=False)


def test_every_reported_digest_is_compared_with_the_committed_one(make_state):
    state = make_state()
    check = check_digests(state)
    assert (check.compared, check.outer_steps, check.unequal) == (9 * 4 - 2, 9, ())
    state.digest_reports.add(("peer-1", 0, 5, "other"))
    state.digest_reports.add(("peer-1", 0, 99, "not committed"))
    check = check_digests(state)
    assert (check.compared, check.unequal) == (9 * 4 - 1, (("peer-1", 5),))


def test_json_names_what_is_computed_and_what_was_compared(make_state):
    values = json.loads(json.dumps(results_of(make_state()).as_json(), allow_nan=False))
    assert values["data_parallel_bytes_per_peer_computed"] == 2 * 3 * 868_000 * 300
    assert "data_parallel_bytes" not in values
    assert values["losses"]["percent_below_lone"] == pytest.approx(10.0)
    assert values["restart"] == {"outer_step": 6, "before": "d6", "after": "d6", "equal": True}
    assert values["peers"][0]["sent"] == 8_700_000


def test_a_restart_with_another_digest_is_not_equal():
    assert not Restart(3, "a", "b").equal
