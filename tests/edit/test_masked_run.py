"""Runs with secure aggregation in one process: the oracle's sums, verdicts and weights by what peers say, residuals, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edit import reference
from edit.config.run import (
    CodecConfig,
    OuterConfig,
    PenaltyConfig,
    RoundsConfig,
    RunConfig,
    SecaggConfig,
    SyncConfig,
)
from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.local import LocalCollective, LocalRun
from edit.merging.masked import weight_of
from edit.merging.outer_state import OuterState
from edit.records import Contribution, Verdict
from edit.worker.config import WorkerConfig
from edit.worker.worker import EditWorker

PEERS, LR, MU, MOST = "abcd", 0.7, 0.6, 8
EXACT = CodecConfig(down="fp32")


def config(*, penalty: PenaltyConfig | None = None, bits: int = 16, steps: int = 100, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "secagg": SecaggConfig(enabled=True, bits=bits, min_peers=3, max_peers=MOST),
        "rounds": RoundsConfig(start_peers=3, quorum=3),
        "penalty": penalty or PenaltyConfig(enabled=False),
        "outer": OuterConfig(optimizer="nesterov", lr=LR, momentum=MU),
        "codec": EXACT,
        "sync": SyncConfig(every=1, outer_steps=steps),
    }
    return RunConfig(**values | sections)


class Peer:
    """A peer whose gradients a test chooses: one parameter of 600 elements, plain SGD with rate 1."""

    def __init__(self, run: LocalRun, settings: RunConfig, peer_id: str) -> None:
        self.model = nn.ParameterDict({"weight": nn.Parameter(torch.linspace(-1, 1, 600))})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.worker = EditWorker(self.model, self.optimizer, run.collective(peer_id), WorkerConfig.of(settings))

    @property
    def weight(self) -> Tensor:
        return self.model["weight"].detach()

    def step(self, gradient: Tensor) -> None:
        self.model["weight"].grad = gradient.clone()
        self.optimizer.step()


def gradients(step: int, count: int = len(PEERS)) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    common = torch.randn(600, generator=draw) * 0.01
    return [common + 0.01 * torch.randn(600, generator=draw) for _ in range(count)]


def started(settings: RunConfig) -> tuple[LocalRun, list[Peer]]:
    run = LocalRun(settings, PEERS)
    peers = [Peer(run, settings, name) for name in PEERS]
    for peer in peers:
        peer.worker.__enter__()
    return run, peers


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_run_is_the_oracles_to_the_bit(bits: int) -> None:
    run, peers = started(config(bits=bits))
    theta, momentum, merged = torch.linspace(-1, 1, 600), torch.zeros(600), None
    owed = [torch.zeros(600) for _ in PEERS]
    for step in range(6):
        us, drawn = [], gradients(step)
        for peer, gradient, e in zip(peers, drawn, owed, strict=True):
            peer.step(gradient)
            us.append(theta - (theta - gradient) + e)
        width = bits if merged is not None else 32
        steps = (
            reference.masked_steps(merged, bits, MOST)
            if merged is not None
            else [2.0 ** math.ceil(math.log2(10 / ((2**31 - 1) // MOST)))] * 600
        )
        integers = [reference.masked_integers(u, steps, 1.0, width, MOST) for u in us]
        mean = reference.masked_mean(integers, steps, [1.0] * 4)
        owed = [u - (torch.tensor(steps).double() * q).float() for u, q in zip(us, integers, strict=True)]
        theta, momentum = reference.nesterov(theta, momentum, mean, LR, MU)
        merged = mean.bfloat16().float()
        assert torch.equal(run.state.theta[0], theta), step
    for peer in peers:
        peer.worker.__exit__(None, None, None)
        assert torch.equal(peer.weight, run.state.theta[0])


def test_what_the_grid_leaves_out_is_sent_later() -> None:
    """With the clamp at its narrowest, the sum of what was merged and of what is owed is what was computed."""
    sgd = OuterConfig(optimizer="sgd", lr=1.0)
    run, peers = started(config(bits=8, outer=sgd))
    wanted = torch.zeros(600, dtype=torch.float64)
    for step in range(12):
        drawn = gradients(step)
        for peer, gradient in zip(peers, drawn, strict=True):
            peer.step(gradient)
            wanted += gradient.double() / 4
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    residuals = [exchange.feedback.residuals()[0].tensor for peer in peers for exchange in peer.worker._exchanges]
    got = torch.linspace(-1, 1, 600).double() - run.state.theta[0].double() + sum(each.double() for each in residuals) / 4
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    assert all(bool(each.any()) for each in residuals)


def test_weights_follow_the_norms_that_peers_say_relative_to_those_of_the_step_before() -> None:
    penalty = PenaltyConfig(clip=0.0)
    run, peers = started(config(penalty=penalty))
    for step, sizes in enumerate([(1, 1, 1, 1), (0.8, 1, 1, 1.3)]):
        for peer, gradient, size in zip(peers, gradients(step), sizes, strict=True):
            peer.step(gradient * size)
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    first, second = (commit.fragments[0].verdicts for commit in run._commits)
    assert [each.weight for each in first] == [0.25] * 4
    ranked = sorted(each.norm for each in first)
    middle = (ranked[1] + ranked[2]) / 2
    raw = [math.exp(-(each.norm / middle - 1)) for each in second]
    assert [each.weight for each in second] == pytest.approx([w / sum(raw) for w in raw])
    assert second[0].weight > 0.25 > second[3].weight


def test_the_weight_of_a_peer_is_bounded_whatever_it_says() -> None:
    penalty = PenaltyConfig(temperature=0.1)
    assert weight_of(0.0, 1.0, penalty) == penalty.max_share
    assert weight_of(1e30, 1.0, penalty) == 1 / 16
    assert weight_of(1.0, 0.0, penalty) == 1.0
    assert weight_of(math.nan, 1.0, penalty) == weight_of(math.inf, 1.0, penalty) == 0.0
    assert weight_of(5.0, 1.0, PenaltyConfig(enabled=False)) == 1.0
    assert weight_of(1.5, 1.0, replace(penalty, temperature=1.0)) == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize(("factor", "verdict"), [(math.nan, Verdict.NONFINITE), (50.0, Verdict.ANOMALOUS), (0.0, Verdict.IDLE)])
def test_who_is_not_sound_is_no_part_of_the_sum(factor: float, verdict: Verdict) -> None:
    run, peers = started(config(penalty=PenaltyConfig()))
    for peer, gradient in zip(peers, gradients(0), strict=True):
        peer.step(gradient)
    before = run.state.theta[0].clone()
    for i, (peer, gradient) in enumerate(zip(peers, gradients(1), strict=True)):
        peer.step(gradient * factor if i == 1 else gradient)
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    verdicts = run._commits[-1].fragments[0].verdicts
    assert [each.verdict for each in verdicts] == [Verdict.OK, verdict, Verdict.OK, Verdict.OK]
    assert verdicts[1].weight == 0 and sum(each.weight for each in verdicts) == pytest.approx(1)
    assert torch.isfinite(run.state.theta[0]).all() and not torch.equal(before, run.state.theta[0])


def test_too_few_sound_contributions_are_never_summed_up() -> None:
    run, peers = started(config(penalty=PenaltyConfig()))
    for peer, gradient in zip(peers, gradients(0), strict=True):
        peer.step(gradient)
    for i, peer in enumerate(peers[:3]):
        peer.step(gradients(1)[i] * (math.nan if i < 2 else 1))
    theta = run.state.theta[0].clone()
    peers[3].step(gradients(1)[3])
    for peer in peers:
        peer.worker.synchronize()
        assert torch.equal(peer.weight, theta)
    assert run.state.outer_step == 2 and torch.equal(run.state.theta[0], theta)
    verdicts = [each.verdict for each in run._commits[-1].fragments[0].verdicts]
    assert verdicts == [Verdict.NONFINITE, Verdict.NONFINITE, Verdict.REJECTED, Verdict.REJECTED]
    for peer, gradient in zip(peers, gradients(2), strict=True):
        peer.step(gradient)
    assert run.state.outer_step == 3 and not torch.equal(run.state.theta[0], theta)


class Lying(LocalCollective):
    """Says another norm than it has."""

    def contribute(self, contribution: Contribution) -> None:
        assert contribution.norm is not None
        super().contribute(replace(contribution, norm=contribution.norm / 3))


def test_a_sum_that_is_longer_than_its_peers_say_is_not_merged() -> None:
    settings = config()
    run = LocalRun(settings, PEERS)
    peers = [Peer(run, settings, name) for name in PEERS]
    for name, peer in zip(PEERS, peers, strict=True):
        peer.worker._collectives = (Lying(run, name),)
        peer.worker.__enter__()
    common = torch.full((600,), 0.01)
    for peer in peers[:3]:
        peer.step(common)
    with pytest.raises(RemoteProtocolError, match="one of them does not send what it says"):
        peers[3].step(common)
    assert run.state.outer_step == 0


def test_the_grid_goes_on_to_the_bit_from_a_checkpoint() -> None:
    settings = config(penalty=PenaltyConfig())
    run, peers = started(settings)
    for step in range(3):
        for peer, gradient in zip(peers, gradients(step), strict=True):
            peer.step(gradient)
    state = run.state
    again = OuterState.restore(state.schema, settings, state.to_tensors(), state.metadata())
    assert again.plan(0) == state.plan(0) and state.plan(0).bits == 16 and state.plan(0).reference > 0
    damaged = {**state.metadata(), "references": [-1.0]}
    with pytest.raises(Exception, match="references is not a list of 1 norms"):
        OuterState.restore(state.schema, settings, state.to_tensors(), damaged)


def test_a_peer_goes_on_from_a_checkpoint_with_its_contribution_pending() -> None:
    settings = config(penalty=PenaltyConfig(), sync=SyncConfig(every=1, outer_steps=50))
    run, peers = started(settings)
    for peer, gradient in zip(peers, gradients(0), strict=True):
        peer.step(gradient)
    for peer in peers:
        peer.worker.synchronize()
    peers[0].step(gradients(1)[0])
    saved = peers[0].worker.state_dict()
    weight = peers[0].weight.clone()
    resumed = Peer(run, settings, PEERS[0])
    with torch.no_grad():
        resumed.model["weight"].copy_(weight)
    resumed.worker.load_state_dict(saved)
    resumed.worker.__enter__()
    for peer, gradient in zip(peers[1:], gradients(1)[1:], strict=True):
        peer.step(gradient)
    for peer in (resumed, *peers[1:]):
        peer.worker.synchronize()
    assert run.state.outer_step == 2
    for one, other in zip([resumed], [peers[1]], strict=True):
        assert one.worker.digest == other.worker.digest
    norms = {each.peer_id: each.norm for each in run._commits[-1].fragments[0].verdicts}
    assert norms["a"] == pytest.approx(float(gradients(1)[0].norm()), rel=0.01)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rounds": {"quorum": 2, "start_peers": 3}}, "rounds.quorum = 2: must be at least secagg.min_peers"),
        ({"rounds": {"quorum": 9, "start_peers": 9}, "secagg": {"max_peers": 8}}, "must not exceed secagg.max_peers"),
        ({"rounds": {"quorum": 3, "max_staleness": 1}}, "rounds.max_staleness = 1: must be 0 with secagg.enabled"),
        ({"robust": {"rule": "geometric_median", "hostile": 1}}, "robust.rule = 'geometric_median'"),
        ({"sync": {"mode": "eager"}}, "sync.mode = 'eager'"),
        ({"sync": {"strict": True}}, "sync.strict = True: must be false with secagg.enabled"),
        ({"outer": {"direction": "rda"}}, "outer.direction = 'rda'"),
        ({"outer": {"correct": "heloco"}}, "outer.correct = 'heloco'"),
        ({"aggregators": {"addresses": ["127.0.0.1:9"]}}, "aggregators.addresses"),
        ({"swarm": {}}, "must be absent with secagg.enabled"),
        ({"codec": {"up": "int8"}}, "codec.up has no effect with secagg.enabled = true"),
        ({"codec": {"fragments": {"embedding*": {"up": "fp32"}}}}, "must not choose up with secagg.enabled"),
        ({"penalty": {"norm": "per_sqrt_step"}}, "penalty.norm = 'per_sqrt_step'"),
        ({"penalty": {"temperature": 0.4}}, "penalty.temperature = 0.4: must be at least 0.5 with secagg.enabled"),
        ({"penalty": {"enabled": False, "weighting": "tokens"}}, "penalty.weighting = 'tokens'"),
        ({"secagg": {"bits": 12}}, "secagg.bits = 12: must be 8, 16 or 32"),
        ({"secagg": {"max_peers": 2}}, "secagg.max_peers = 2: must not be below secagg.min_peers"),
        ({"secagg": {"enabled": False, "bits": 8}}, "secagg.bits has no effect with secagg.enabled = false"),
    ],
)
def test_what_cannot_be_masked_is_refused(sections: dict[str, dict[str, Any]], message: str) -> None:
    mapping: dict[str, Any] = {"rounds": {"start_peers": 3, "quorum": 3}, **sections}
    mapping["secagg"] = {"enabled": True, **sections.get("secagg", {})}
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping(mapping)
    assert message in str(error.value)


def test_buffers_fit_no_grid() -> None:
    spec = FragmentSpec(fragment_id=0, name="buffers", tensors=(TensorSpec(name="mean", shape=(2,)),), buffers=True)
    with pytest.raises(ConfigError, match=r"secagg.enabled = True: must be false for a model whose buffers are averaged"):
        OuterState(Schema((spec,)), config(), [torch.zeros(2)])
    with pytest.raises(ConfigError, match="they fit no grid"):
        replace(WorkerConfig.of(config()), buffers="average")


def test_without_secagg_the_configuration_is_what_it_was() -> None:
    assert "secagg" not in RunConfig().to_json()
    on = config()
    assert RunConfig.from_json(on.to_json()) == on
