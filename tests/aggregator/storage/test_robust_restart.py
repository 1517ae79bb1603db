"""A restart of an aggregator that merges by a robust rule: the rule compares with the last merge, which is recovered too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aggregator.storage.store import Store
from edit.config.robust import RobustConfig
from edit.config.run import CodecConfig, PenaltyConfig, RoundsConfig, RunConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from tests.support.encoded import encode

NUMEL = 600
SCHEMA = Schema((FragmentSpec(fragment_id=0, name="layer", tensors=(TensorSpec(name="layer.weight", shape=(NUMEL,)),)),))


def config(rule: str) -> RunConfig:
    anchored = RobustConfig(trust="anchors", anchors=("peer-1",))
    rule, _, scope = rule.partition(" by ")
    robust = anchored if rule == "anchors" else RobustConfig(rule=rule, hostile=1, scope=scope or "fragment")
    return RunConfig(
        penalty=PenaltyConfig(enabled=False),
        robust=robust,
        rounds=RoundsConfig(quorum=5),
        codec=CodecConfig(up="fp32", down="int8"),
    )


def merged(outer: OuterState) -> MergeRecord:
    random = torch.Generator().manual_seed(100 + outer.outer_step)
    direction = torch.randn(NUMEL, generator=random)
    deltas = [encode("fp32", 0.01 * (direction + torch.randn(NUMEL, generator=random))) for _ in range(5)]
    sent = [Measured(f"peer-{i}", 1, 1, measure(each), each) for i, each in enumerate(deltas)]
    of_model = outer.config.robust.of_model
    return outer.record(outer.reduce_chosen(0, sent, outer.choose({0: sent})) if of_model else outer.reduce(0, sent))


def commit(store: Store | None, outer: OuterState) -> Commit:
    record = merged(outer)
    if store is None:
        return outer.commit(7, "all in", [record])
    store.begin_fragment(7, record).result()
    store.append_commit(7, outer.outer_step + 1, "all in", 0, base=outer.digest)
    done = outer.commit(7, "all in", [record])
    store.applied(done)
    return done


@pytest.mark.parametrize("rule", ["centered_clip", "centered_clip by model", "geometric_median", "median", "anchors"])
@pytest.mark.parametrize("checkpoint", [0, 2, 4])
def test_what_the_rule_compares_with_is_recovered_from_checkpoint_and_journal(
    tmp_path: Path, rule: str, checkpoint: int
) -> None:
    store = Store(tmp_path, config(rule), "run")
    outer = OuterState(SCHEMA, config(rule), [torch.zeros(NUMEL)])
    store.found(outer)
    for number in range(1, 6):
        commit(store, outer)
        if number == checkpoint:
            store.checkpoint(outer)
    store.close()
    again = Store(tmp_path, config(rule), "run")
    recovered = again.recover()
    assert recovered is not None and recovered.digest == outer.digest
    assert torch.equal(recovered.to_tensors()["last.0"], outer.to_tensors()["last.0"])
    assert commit(again, recovered) == commit(None, outer)
    again.close()
