"""Gossip's outer step: the oracle's bits, pairs, what one gains the other loses, and partners that lie."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edit.codecs import decode
from edit.config.algorithm import GossipConfig
from edit.config.run import OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.gossip import GossipState, Judged, Offer, pairs, settle, settling
from edit.merging.merge import Measured, Merged, measure
from edit.merging.outer_state import OuterState
from edit.records import EncodedTensor, Verdict
from edit.reference import Edit, Gossip, gossip_pairs
from tests.support.encoded import encode

NUMEL = 140_000  # more than one piece
LEVEL = PenaltyConfig(clip=0.0, temperature=1e9)  # verdicts; weights that fp32 rounds to one half
OFF = PenaltyConfig(enabled=False)


def schema(*numels: int, buffers: bool = False) -> Schema:
    return Schema(
        tuple(
            FragmentSpec(
                fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(numel,)),), buffers=buffers and i == 0
            )
            for i, numel in enumerate(numels)
        )
    )


def config(penalty: PenaltyConfig = OFF, gossip: GossipConfig | None = None, groups: int = 1) -> RunConfig:
    return RunConfig(
        seed=5,
        sync=SyncConfig(every=60, groups=groups),
        penalty=penalty,
        outer=OuterConfig(algorithm="gossip"),
        gossip=gossip or GossipConfig(),
    )


def drawn(seed: int, numel: int = NUMEL, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def offer(state: GossipState, delta: Tensor, inner_steps: int = 7, outer: EncodedTensor | None = None, i: int = 0) -> Offer:
    payload = encode("fp32", delta)
    contribution = Measured(state.peer_id, inner_steps, 100, measure(payload), payload)
    return Offer(contribution, outer or state.offered(i))


def swap(one: GossipState, other: GossipState, deltas: Mapping[str, Tensor], i: int = 0) -> tuple[Judged, Judged]:
    """Fragment i of both states, together if both find it good; commits where that is the only fragment that is due."""
    offers = {state.peer_id: offer(state, deltas[state.peer_id], i=i) for state in (one, other)}
    judged = (
        one.judge(i, offers[one.peer_id], offers[other.peer_id]),
        other.judge(i, offers[other.peer_id], offers[one.peer_id]),
    )
    together = all(each.good for each in judged)
    for state, partner, said in zip((one, other), (other, one), judged, strict=True):
        theirs = offers[partner.peer_id] if together else None
        state.commit([state.stage(i, offers[state.peer_id], theirs, said)], "")
    return judged


def states(names: str, run_config: RunConfig, numel: int = NUMEL, apart: float = 0.0) -> dict[str, GossipState]:
    theta = drawn(0, numel)
    return {
        name: GossipState(name, schema(numel), run_config, [theta + drawn(seed, numel, apart)])
        for seed, name in enumerate(names, 1)
    }


# Pairs.


@pytest.mark.parametrize("count", range(1, 9))
def test_everybody_has_the_oracles_partner_and_the_odd_one_none(count: int) -> None:
    live = [f"peer-{i}" for i in range(count)]
    for outer_step in range(50):
        found = pairs(3, outer_step, reversed(live))
        assert found.keys() == set(live)
        for group in gossip_pairs(3, outer_step, live):
            assert [found[peer_id] for peer_id in group] == ([None] if len(group) == 1 else group[::-1])


def test_everybody_meets_everybody_about_as_often_and_another_seed_draws_others() -> None:
    live, met = "abcde", dict[tuple[str, str | None], int]()
    for outer_step in range(1000):
        for peer_id, partner in pairs(0, outer_step, live).items():
            met[peer_id, partner] = met.get((peer_id, partner), 0) + 1
    assert len(met) == 5 * 5 and all(140 < count < 260 for count in met.values())
    assert [pairs(0, t, live) for t in range(20)] != [pairs(1, t, live) for t in range(20)]


# The formulas.


def lossy_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def common(
    model: Schema, run_config: RunConfig, base: Sequence[Tensor], theta: Mapping[str, Sequence[Tensor]]
) -> Sequence[Tensor]:
    """The one model that peers settle on. base: the one before."""
    outer = OuterState(model, settling(run_config), [part.clone() for part in base])
    outer.commit(1, "settled", settle(outer, theta))
    return outer.theta


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_outer_steps_and_settling_have_the_oracles_bits(codec: str, names: str) -> None:
    gossip = GossipConfig(lr=0.6, momentum=0.4, mixing=0.9, codec=codec)
    run_config = config(gossip=gossip)
    ours = states(names, run_config, apart=0.1)
    oracle = Gossip(
        {name: state.theta[0].clone() for name, state in ours.items()}, run_config.seed, lr=0.6, momentum=0.4, mixing=0.9
    )
    first = [next(iter(oracle.phi.values()))]
    for t in range(6):
        deltas = {name: drawn(100 * t + i, scale=0.1) for i, name in enumerate(names)}
        local = {name: state.theta[0] - deltas[name] for name, state in ours.items()}
        deltas = {name: state.theta[0] - local[name] for name, state in ours.items()}  # as a peer computes them
        oracle.lossy = lossy_bf16 if codec == "bf16" else lambda tensor: tensor
        oracle.round(local)
        for name, partner in pairs(run_config.seed, t, names).items():
            if partner is None:
                ours[name].commit([ours[name].stage(0, offer(ours[name], deltas[name]))], "")
            elif name < partner:
                swap(ours[name], ours[partner], deltas)
        for name, state in ours.items():
            assert torch.equal(state.theta[0], oracle.phi[name]) and state.digest == digest(state.theta)
    settled = common(schema(NUMEL), run_config, first, {name: state.theta for name, state in ours.items()})
    assert torch.equal(settled[0], oracle.settle())


def test_verdicts_by_the_papers_detector_are_the_oracles_and_give_its_bits() -> None:
    """Spikes of a, b and a NaN of c: who met them goes alone, and the bad one stays where it is."""
    penalty = PenaltyConfig(detector="edit", clip=0.0, temperature=1e9, idle_ratio=0.0, observations=3)
    run_config, names = config(penalty, GossipConfig(codec="fp32")), "abc"
    ours = states(names, run_config, numel=500)
    judges = {name: Edit(torch.zeros(()), observations=3) for name in names}
    oracle = Gossip({name: state.theta[0].clone() for name, state in ours.items()}, run_config.seed, edit=judges)
    apart = 0
    for t in range(40):
        scale = {"a": 50.0 if t == 25 else 1.0, "b": 50.0 if t == 31 else 1.0, "c": math.nan if t == 34 else 1.0}
        local = {
            name: state.theta[0] - drawn(100 * t + i, 500, 0.01 * scale[name]) for i, (name, state) in enumerate(ours.items())
        }
        deltas = {name: state.theta[0] - local[name] for name, state in ours.items()}
        oracle.round(local)
        for name, partner in pairs(run_config.seed, t, names).items():
            if partner is None:
                ours[name].commit([ours[name].stage(0, offer(ours[name], deltas[name]))], "")
            elif name < partner:
                judged = swap(ours[name], ours[partner], deltas)
                apart += not all(each.good for each in judged)
        for name, state in ours.items():
            assert torch.equal(state.theta[0], oracle.phi[name]), (t, name)
    assert apart >= 1


def test_what_one_of_a_pair_gains_by_mixing_the_other_loses() -> None:
    """With equal contributions of zero the two d are each other's negative, to the bit, whatever bf16 makes of phi."""
    both = states("ab", config(), apart=3.0)
    before = {name: state.theta[0].clone() for name, state in both.items()}
    swap(both["a"], both["b"], dict.fromkeys("ab", torch.zeros(NUMEL)))
    moved = {name: state.theta[0] - before[name] for name, state in both.items()}
    assert float(moved["a"].norm()) > 100
    torch.testing.assert_close(moved["a"], -moved["b"], rtol=1e-4, atol=1e-5)


def test_two_that_are_equal_stay_equal_and_move_as_one() -> None:
    both = states("ab", config())
    for t in range(4):
        delta = drawn(t, scale=0.1)
        swap(both["a"], both["b"], dict.fromkeys("ab", delta))
        assert both["a"].digest == both["b"].digest


def test_buffers_become_the_mean_of_the_pairs_own() -> None:
    theta = drawn(0, 300).abs()
    run_config = config()
    both = {name: GossipState(name, schema(300, buffers=True), run_config, [theta]) for name in "ab"}
    local = {"a": theta + 1, "b": theta + 4}
    for _ in range(3):
        deltas = {name: state.theta[0] - local[name] for name, state in both.items()}
        swap(both["a"], both["b"], deltas)
        for state in both.values():
            torch.testing.assert_close(state.theta[0], theta + 2.5)


def test_of_groups_the_one_that_is_due_moves() -> None:
    run_config = config(groups=2)
    state = GossipState("a", schema(40, 50, 60), run_config, [drawn(i, n) for i, n in enumerate((40, 50, 60))])
    assert state.due == (0, 2)
    before = [part.clone() for part in state.theta]
    staged = [state.stage(i, offer(state, drawn(9, state.theta[i].numel()), i=i)) for i in state.due]
    with pytest.raises(LocalProtocolError, match=r"outer step 1 needs fragments \[0, 2\]"):
        state.commit(staged[:1], "")
    commit = state.commit(staged[::-1], "why")
    assert [part.fragment_id for part in commit.fragments] == [0, 2] and (commit.outer_step, commit.reason) == (1, "why")
    assert [torch.equal(a, b) for a, b in zip(before, state.theta, strict=True)] == [False, True, False]
    assert state.due == (1,) and commit.digest == state.digest == digest(state.theta)


def test_the_update_leads_a_trainer_to_the_same_bits() -> None:
    both = states("ab", config(), apart=0.3)
    before = both["a"].theta[0].clone()
    offers = {name: offer(state, drawn(9)) for name, state in both.items()}
    commit = both["a"].commit([both["a"].stage(0, offers["a"], offers["b"])], "")
    payload = commit.fragments[0].payload
    assert payload is not None and torch.equal(before - decode(payload), both["a"].theta[0])


# Drifting apart.


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_mixing_is_bounded_where_peers_begin_to_drift_apart(momentum: float) -> None:
    """The bound of the configuration is that of the second moments of phi_i - mean(phi) and d_i, of many peers in random pairs.

    The paper's own, equation 74, is sqrt(2 + momentum^2), which it derives for an approximation.
    """

    def growth(mixing: float) -> float:
        """The spectral radius of what E[x^2], E[x d], E[d^2] become, x and d of mean 0, those of a partner independent."""
        a, g = momentum, mixing
        step = torch.tensor(
            [
                [1 - g + g * g / 2, 2 * a - a * g, a * a],
                [-g / 2 + g * g / 2, a - a * g, a * a],
                [g * g / 2, -a * g, a * a],
            ],
            dtype=torch.float64,
        )
        return float(torch.linalg.eigvals(step).abs().max())

    most = 2 * (1 - momentum**2)
    assert growth(0.99 * most) < 1 < growth(1.01 * most)
    GossipConfig(momentum=momentum, mixing=0.99 * most)
    with pytest.raises(ConfigError, match=r"gossip\.mixing = .*gossip\.momentum"):
        GossipConfig(momentum=momentum, mixing=1.01 * most)


# Partners that lie.


def acquainted(penalty: PenaltyConfig = LEVEL, rounds: int = 30, codec: str = "bf16") -> dict[str, GossipState]:
    both = states("ab", config(penalty, GossipConfig(codec=codec)), numel=2000)
    for t in range(rounds):
        judged = swap(both["a"], both["b"], {name: drawn(2 * t + i, 2000, 0.01) for i, name in enumerate("ab")})
        assert all(each.good for each in judged), t
    return both


LIES = {
    "nan": lambda delta, outer: (delta * math.nan, outer),
    "inf in one element": lambda delta, outer: (delta.index_fill(0, torch.tensor([3]), math.inf), outer),
    "a huge contribution": lambda delta, outer: (delta * 1e6, outer),
    "a spike": lambda delta, outer: (delta * 30, outer),
    "nan parameters": lambda delta, outer: (delta, outer * math.nan),
    "huge parameters": lambda delta, outer: (delta, outer * 1e6),
    "parameters that overflow": lambda delta, outer: (delta, outer * 1e38),
}


@pytest.mark.covering
@pytest.mark.parametrize("rounds", [1, 30])
@pytest.mark.parametrize("lie", LIES)
def test_who_meets_a_liar_goes_alone_and_learns_nothing_from_it(lie: str, rounds: int) -> None:
    """From the first swap on, and as often as it lies; a's step is the one that it would have taken alone."""
    both = acquainted(rounds=rounds)
    a, b = both["a"], both["b"]
    for t in range(8):
        delta = drawn(1000 + t, 2000, 0.01)
        told, parameters = LIES[lie](delta, b.theta[0])
        own, other = offer(a, delta), offer(b, told, outer=encode("bf16", parameters))
        judged = a.judge(0, own, other)
        assert not judged.good and judged.own is Verdict.OK
        assert judged.partner.verdict in (Verdict.ANOMALOUS, Verdict.NONFINITE)
        alone = a.stage(0, own)
        staged = a.stage(0, own, None, judged)
        assert staged.theta_hash == alone.theta_hash and staged.commit.payload is not None
        assert [v.verdict for v in staged.commit.verdicts] == [Verdict.OK, judged.partner.verdict]
        a.commit([staged], "")
        assert bool(a.theta[0].isfinite().all())
    met = [swap(a, b, {name: drawn(20 + 2 * t + i, 2000, 0.01) for i, name in enumerate("ab")}) for t in range(4)]
    assert all(each.good for each in met[-1]), "and the honest one is met again, however far a has gone meanwhile"


def test_a_distance_that_is_held_is_learned_up_to_a_bound() -> None:
    """As after a partition: both sides have moved, and have to come together again. What no path leads to never counts."""
    both = acquainted()
    a, b = both["a"], both["b"]
    found = []
    for shift in [0.5] * 6 + [20.0] * 6:
        delta = drawn(len(found), 2000, 0.01)
        judged = a.judge(0, offer(a, delta), offer(b, delta, outer=encode("bf16", b.theta[0] + shift)))
        found.append(judged.good)
        a.commit([a.stage(0, offer(a, delta), None, judged)], "")
    assert found == [False] * 3 + [True] * 3 + [False] * 6


def test_with_the_penalty_off_only_what_is_not_finite_is_refused() -> None:
    both = acquainted(OFF)
    a, b, delta = both["a"], both["b"], drawn(1, 2000, 0.01)
    assert a.judge(0, offer(a, delta), offer(b, delta * 1e6)).good
    assert a.judge(0, offer(a, delta), offer(b, delta * math.nan)).partner.verdict is Verdict.NONFINITE
    judged = a.judge(0, offer(a, delta), offer(b, delta, outer=encode("bf16", b.theta[0] * math.inf)))
    assert judged.partner.verdict is Verdict.NONFINITE
    assert a.judge(0, offer(a, delta * math.nan), offer(b, delta)).own is Verdict.NONFINITE


def test_many_steps_claimed_do_not_make_a_spike_usual() -> None:
    both = acquainted(rounds=1)
    a, b, delta = both["a"], both["b"], drawn(1, 2000, 0.01)
    spike = replace(offer(b, delta * 60).contribution, inner_steps=1 << 40)
    assert not a.judge(0, offer(a, delta), Offer(spike, b.offered(0))).good


@pytest.mark.parametrize("numel", [1999, 2001, 0])
def test_parameters_of_another_size_or_codec_are_the_partners_fault(numel: int) -> None:
    both = acquainted(rounds=1)
    a, b, delta = both["a"], both["b"], drawn(1, 2000, 0.01)
    with pytest.raises(RemoteProtocolError, match=rf"fragment 0 of peer b: outer parameters of {numel} elements"):
        a.judge(0, offer(a, delta), offer(b, delta, outer=encode("bf16", torch.zeros(numel))))
    with pytest.raises(RemoteProtocolError, match="in fp32, not 2000 in bf16"):
        a.judge(0, offer(a, delta), offer(b, delta, outer=encode("fp32", b.theta[0])))


@pytest.mark.parametrize("penalty", [OFF, LEVEL], ids=["off", "on"])
def test_a_bad_contribution_of_ones_own_is_rolled_back_and_the_partner_goes_alone(penalty: PenaltyConfig) -> None:
    both = acquainted(penalty)
    a, b = both["a"], both["b"]
    before = a.theta[0].clone(), b.theta[0].clone()
    judged = swap(a, b, {"a": torch.full((2000,), math.nan), "b": drawn(1, 2000, 0.01)})
    assert [each.good for each in judged] == [False, False]
    assert torch.equal(a.theta[0], before[0]) and not torch.equal(b.theta[0], before[1])
    assert bool(b.theta[0].isfinite().all())


def test_a_step_that_overflows_is_rolled_back() -> None:
    a = states("a", config(), numel=10)["a"]
    before = a.digest
    commit = a.commit(
        [
            a.stage(0, offer(a, torch.full((10,), 3e38))),
        ],
        "",
    )
    assert commit.fragments[0].payload is None and a.digest == before == commit.digest and a.outer_step == 1


# Settling, joining.


def test_settling_leaves_out_what_is_not_finite_and_keeps_the_mean() -> None:
    theta = {name: [drawn(i, 300)] for i, name in enumerate("abc")}
    theta["b"] = [theta["b"][0] * math.inf]
    settled = common(schema(300), config(), theta["c"], theta)
    torch.testing.assert_close(settled[0], (theta["a"][0] + theta["c"][0]) / 2)


@pytest.mark.parametrize("known", [False, True])
def test_who_joins_is_where_its_donor_is_without_momentum(known: bool) -> None:
    """known: it has been there before. It meets one that is as far away as its donor is."""
    both = acquainted(rounds=3)
    for t, state in enumerate([both["a"], both["a"], both["b"], both["b"]]):
        state.commit([state.stage(0, offer(state, drawn(50 + t, 2000, 0.01)))], "")
    late = GossipState("c", both["a"].schema, both["a"].config, [torch.zeros(2000)])
    if known:
        late.commit([late.stage(0, offer(late, drawn(60, 2000, 0.01)))], "")
    late.join(both["a"])
    assert (late.outer_step, late.digest) == (5, both["a"].digest)
    still = late.commit([late.stage(0, offer(late, torch.zeros(2000)))], "")
    assert torch.equal(decode(still.fragments[0].payload), torch.zeros(2000))  # type: ignore[arg-type]
    offers = offer(both["b"], drawn(1, 2000, 0.01)), offer(late, drawn(2, 2000, 0.01))
    assert both["b"].judge(0, *offers).good and late.judge(0, *offers[::-1]).good


def test_after_settling_nobody_is_far_away() -> None:
    both = acquainted(rounds=3, codec="fp32")
    a, b, delta = both["a"], both["b"], drawn(1, 2000, 0.01)
    far = offer(b, delta, outer=encode("fp32", b.theta[0] + 0.01))
    assert a.judge(0, offer(a, delta), far).good
    before = a.digest
    a.take(b.theta)
    assert a.digest == before and a.judge(0, offer(a, delta), offer(b, delta)).good
    assert a.judge(0, offer(a, delta), far).partner.verdict is Verdict.ANOMALOUS


def test_what_bf16_rounds_is_no_distance() -> None:
    """Steps far below bf16's: a few elements cross to the next number, each by more than the whole path."""
    theta = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 1
    both = {name: GossipState(name, schema(2000), config(LEVEL), [theta]) for name in "ab"}
    a, b = both["a"], both["b"]
    for t in range(3):
        for i, state in enumerate((a, b)):
            state.commit([state.stage(0, offer(state, drawn(2 * t + i, 2000, 1e-5)))], "")
        judged = a.judge(0, offer(a, drawn(1, 2000, 1e-5)), offer(b, drawn(2, 2000, 1e-5)))
        assert judged.good and judged.distance > 0
    assert judged.distance > 10 * float((a.theta[0] - theta).norm())


def saved(state: GossipState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return {name: tensor.clone() for name, tensor in state.to_tensors().items()}, json.loads(json.dumps(state.metadata()))


@pytest.mark.parametrize("rounds", [0, 3, 30])
def test_a_restored_state_goes_on_to_the_bit(rounds: int) -> None:
    both = acquainted(rounds=rounds)
    again = {name: GossipState.restore(state.schema, state.config, *saved(state)) for name, state in both.items()}
    for t in range(100, 104):
        deltas = {name: drawn(2 * t + i, 2000, 0.01 * (30 if t == 102 else 1)) for i, name in enumerate("ab")}
        assert swap(both["a"], both["b"], deltas) == swap(again["a"], again["b"], deltas)
        for name, state in both.items():
            assert (again[name].digest, again[name].metadata()) == (state.digest, state.metadata())
            assert torch.equal(again[name].to_tensors()["momentum.0"], state.to_tensors()["momentum.0"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("outer_step", "x", "damaged"),
        ("outer_step", None, "damaged"),
        ("peer_id", ..., "damaged"),
        ("digest", "00", "does not match its digest"),
        ("fragments", [], "damaged"),
        ("fragments", [{}], "damaged"),
        ("fragments", 7, "damaged"),
        ("theta.0", torch.zeros(1999), r"theta\.0 is missing or not 2000 fp32 elements"),
        ("momentum.0", ..., r"momentum\.0 is missing"),
        ("momentum.0", torch.zeros(2000, dtype=torch.float64), r"momentum\.0 is missing or not 2000 fp32"),
    ],
)
def test_a_damaged_state_is_refused(key: str, value: object, message: str) -> None:
    state = acquainted(rounds=1)["a"]
    tensors, metadata = saved(state)
    target: dict[str, Any] = tensors if key in tensors else metadata
    target[key] = value
    if value is ...:
        del target[key]
    with pytest.raises(StorageError, match=message):
        GossipState.restore(state.schema, state.config, tensors, metadata)


def test_a_state_of_another_model_is_refused() -> None:
    state = acquainted(rounds=1)["a"]
    with pytest.raises(ConfigError, match="another model"):
        GossipState.restore(schema(2000, 1), state.config, *saved(state))


def test_a_common_outer_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outer\.algorithm = 'gossip'"):
        OuterState(schema(3), config(), [torch.zeros(3)])


def test_what_peers_settle_on_is_computed_of_one_peer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner holds what each has sent, and no other copy of it."""
    base = OuterState(schema(300), settling(config()), [torch.zeros(300)])
    reduce, read = base.reduce, list[bool]()

    def noted(i: int, contributions: Sequence[Measured]) -> Merged:
        read.extend(callable(one.payload) for one in contributions)
        return reduce(i, contributions)

    monkeypatch.setattr(base, "reduce", noted)
    records = settle(base, {name: [torch.full((300,), float(i))] for i, name in enumerate("abc")})
    assert read == [True] * 3
    base.commit(1, "settled", records)
    assert torch.equal(base.theta[0], torch.ones(300))
