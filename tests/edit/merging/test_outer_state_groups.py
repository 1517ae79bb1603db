"""Streaming groups in the outer state: an outer step moves the fragments that are due and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.detector import NormStatistics
from edit.merging.merge import Measured, Merged, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from tests.support.encoded import encode

NUMELS = (300, 7, 40, 256, 1)
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(numel,)),))
        for i, numel in enumerate(NUMELS)
    )
)


def configured(groups: int, pattern: str = "strided", optimizer: str = "nesterov", down: str = "int8") -> RunConfig:
    return RunConfig(
        sync=SyncConfig(every=60, groups=groups, pattern=pattern),
        penalty=PenaltyConfig(norm="raw"),
        outer=OuterConfig(optimizer=optimizer),
        codec=CodecConfig(up="fp32", down=down),
    )


def fresh(config: RunConfig) -> OuterState:
    generator = torch.Generator().manual_seed(7)
    return OuterState(SCHEMA, config, [torch.randn(numel, generator=generator) for numel in NUMELS])


def merged(state: OuterState, fragment_ids: tuple[int, ...]) -> list[Merged]:
    results = []
    for i in fragment_ids:
        generator = torch.Generator().manual_seed(100 * state.outer_step + i)
        payloads = {p: encode("fp32", torch.randn(NUMELS[i], generator=generator)) for p in "ab"}
        results.append(state.reduce(i, [Measured(p, 1, 1, measure(payload), payload) for p, payload in payloads.items()]))
    return results


def advance(state: OuterState) -> tuple[Commit, list[MergeRecord]]:
    records = [state.record(one) for one in merged(state, state.due)]
    return state.commit(state.outer_step + 1, "in", list(reversed(records))), records


def of_fragment(state: OuterState, i: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.to_tensors().items() if name.split(".")[1] == str(i)}


def learned(state: OuterState) -> list[dict[str, NormStatistics]]:
    """The norm statistics of each fragment by peer_id, as a checkpoint has them."""
    return [
        {peer_id: NormStatistics.from_json(written) for peer_id, written in fragment.items()}
        for fragment in state.metadata()["statistics"]
    ]


@pytest.mark.parametrize("pattern", ["sequential", "strided"])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_as_many_commits_as_groups_move_each_fragment_once_and_leave_the_others_alone(groups: int, pattern: str) -> None:
    state = fresh(configured(groups, pattern))
    for _ in range(groups):
        advance(state)
    moved: list[int] = []
    for _ in range(groups):
        due, step = state.due, state.outer_step
        before = [of_fragment(state, i) for i in range(len(NUMELS))]
        statistics = learned(state)
        commit, _ = advance(state)
        assert tuple(part.fragment_id for part in commit.fragments) == due and list(due) == sorted(due)
        assert commit.outer_step == state.outer_step == step + 1
        for i in range(len(NUMELS)):
            after, known = of_fragment(state, i), learned(state)[i]
            if i in due:
                assert all(not torch.equal(after[name], before[i][name]) for name in before[i] if "residual" not in name)
                assert all(known[p].count == statistics[i][p].count + 1 for p in "ab")
            else:
                assert after.keys() == before[i].keys() and all(torch.equal(after[name], before[i][name]) for name in after)
                assert known == statistics[i]
        assert commit.digest == state.digest == digest(state.theta), "of all fragments, not only of those that moved"
        moved += due
    assert sorted(moved) == list(range(len(NUMELS)))


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_run_in_groups_is_replayed_and_restored_to_the_bit(optimizer: str) -> None:
    config = configured(3, "sequential", optimizer)
    state = fresh(config)
    for _ in range(4):
        advance(state)
    tensors = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    restored = OuterState.restore(SCHEMA, config, tensors, json.loads(json.dumps(state.metadata())))
    assert restored.due == state.due and restored.outer_step == 4
    for _ in range(5):
        commit, recorded = advance(state)
        again = restored.commit(commit.round_id, commit.reason, list(recorded))
        assert again.digest == commit.digest
    assert restored.metadata() == state.metadata()
    ours, theirs = state.to_tensors(), restored.to_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_each_fragment_of_a_run_in_groups_moves_as_in_a_run_without() -> None:
    """Same merges per fragment, in another order among fragments: the same bits."""
    whole, grouped = fresh(configured(1)), fresh(configured(5))
    deltas = [
        Merged(i, torch.randn(n, generator=torch.Generator().manual_seed(i)), (), {}, 1.0, 1.0) for i, n in enumerate(NUMELS)
    ]
    for _ in range(2):
        whole.commit(1, "", [whole.record(one) for one in deltas])
        for _ in range(5):
            grouped.commit(1, "", [grouped.record(deltas[i]) for i in grouped.due])
    assert whole.digest == grouped.digest and (whole.outer_step, grouped.outer_step) == (2, 10)


def test_a_commit_takes_the_fragments_that_are_due_and_no_others() -> None:
    state = fresh(configured(2))
    assert state.due == (0, 2, 4)
    before = state.metadata()
    for wrong in ((0, 1, 2, 3, 4), (1, 3), (0, 2), (0, 2, 2, 4)):
        with pytest.raises(LocalProtocolError, match=r"outer step 1 needs fragments \[0, 2, 4\], each once"):
            state.commit(1, "", [state.record(one) for one in merged(state, wrong)])
    assert state.metadata() == before
    late = [state.record(one) for one in merged(state, (1, 3))]
    advance(state)
    assert state.due == (1, 3)
    with pytest.raises(LocalProtocolError, match="another outer step"):
        state.commit(2, "", late)


def test_more_groups_than_fragments_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"sync.groups = 6: the model has 5 fragments, so at most 5 groups"):
        fresh(configured(6))
