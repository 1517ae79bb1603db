"""The seams before and in a merge: admission, the choice of the merger, what is injected from a run above."""

import torch
from torch import Tensor

from edit.config.run import OuterConfig, PenaltyConfig, RunConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.injection import Injected, Injection
from edit.merging.merge import Measured, measure
from edit.merging.mergers import Admitted, EditMerger, admission, merger
from edit.merging.outer_state import OuterState
from tests.support.encoded import encode

SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"t{i}", shape=(numel,)),))
        for i, numel in enumerate((3, 5))
    )
)
CONFIG = RunConfig(penalty=PenaltyConfig(enabled=False), outer=OuterConfig(optimizer="sgd", lr=1.0))
ABOVE = Injected("above", 4, 0)


def contribution(delta: Tensor, peer_id: str = "a") -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id=peer_id, inner_steps=1, tokens=1, norm=measure(payload), payload=payload)


def state() -> OuterState:
    return OuterState(SCHEMA, CONFIG, [torch.full((fragment.numel,), 10.0) for fragment in SCHEMA.fragments])


def injection(fragments: dict[int, Tensor], replaces: bool = False, brings: Injected = ABOVE) -> Injection:
    return Injection(brings=brings, base=None, replaces=replaces, fragments=fragments)


def test_the_configuration_chooses_the_penalty_and_admits_everybody() -> None:
    assert merger(CONFIG) == EditMerger(CONFIG.penalty)
    one = contribution(torch.ones(3))
    assert admission(CONFIG).admit(SCHEMA.fragments[0], one) == Admitted(one)


def test_what_is_injected_moves_theta_beside_the_optimizer_and_is_in_with_the_commit() -> None:
    outer, given = state(), injection({1: torch.full((5,), 2.0)})
    records = [outer.record(outer.reduce(i, [contribution(torch.ones(f.numel))])) for i, f in enumerate(SCHEMA.fragments)]
    assert outer.injected is None
    outer.commit(1, "all in", records, given)
    assert [theta.unique().item() for theta in outer.theta] == [9.0, 11.0]
    assert outer.injected == ABOVE


def test_what_replaces_is_what_theta_becomes_whatever_was_contributed() -> None:
    outer, target = state(), {i: torch.full((f.numel,), 7.0) for i, f in enumerate(SCHEMA.fragments)}
    given = injection(target, replaces=True)
    records = [outer.record(outer.reduce(i, [contribution(torch.ones(f.numel))])) for i, f in enumerate(SCHEMA.fragments)]
    outer.commit(1, "", records, given)
    assert [theta.unique().item() for theta in outer.theta] == [7.0, 7.0]


def test_with_a_rollback_the_injection_comes_in_alone() -> None:
    outer, given = state(), injection({0: torch.full((3,), 2.0)})
    broken = [outer.reduce(i, [contribution(torch.full((f.numel,), torch.nan))]) for i, f in enumerate(SCHEMA.fragments)]
    commit = outer.commit(1, "", [outer.record(one) for one in broken], given)
    assert [theta.unique().item() for theta in outer.theta] == [12.0, 10.0]
    assert [part.payload is None for part in commit.fragments] == [False, True]


def test_what_is_injected_is_in_also_when_no_fragment_changes_by_it() -> None:
    outer = state()
    records = [outer.record(outer.reduce(i, [contribution(torch.ones(f.numel))])) for i, f in enumerate(SCHEMA.fragments)]
    outer.commit(1, "", records, injection({}))
    assert outer.injected == ABOVE
