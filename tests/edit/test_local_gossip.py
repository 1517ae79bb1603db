"""LocalGossip: peers that train, meet in pairs and settle; against the oracle, and without each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from edit.codecs import codec
from edit.config.algorithm import GossipConfig
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.errors import ConfigError, LocalProtocolError, RefusedError
from edit.fragments.digest import digest
from edit.fragments.schema import plan_fragments
from edit.fragments.shards import Box, Shard
from edit.local import LocalGossip, LocalRun
from edit.merging.gossip import pairs
from edit.records import Contribution, Verdict
from edit.reference import Gossip
from edit.replica.flat import load_fragment
from edit.worker.config import WorkerConfig
from edit.worker.worker import EditWorker
from tests.support.models import TinyTransformer, regression_batches, small_mlp, train_step
from tests.support.scripted_peer import flat

OFF = PenaltyConfig(enabled=False)


def config(
    outer_steps: int = 8, *, up: str = "fp32", penalty: PenaltyConfig = OFF, sync: SyncConfig | None = None, **gossip: object
) -> RunConfig:
    return RunConfig(
        seed=3,
        sync=sync or SyncConfig(every=3, outer_steps=outer_steps),
        penalty=penalty,
        outer=OuterConfig(algorithm="gossip"),
        gossip=GossipConfig(**gossip),  # type: ignore[arg-type]
        codec=CodecConfig(up=up),
    )


class Trainee:
    """One peer of a LocalGossip with its own data."""

    def __init__(self, run: LocalGossip, peer_id: str, run_config: RunConfig, seed: int) -> None:
        self.model = small_mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.worker = EditWorker(self.model, self.optimizer, run.collective(peer_id), WorkerConfig.of(run_config))
        self.batches = regression_batches(seed)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            train_step(self.model, self.optimizer, next(self.batches))


def entered(run_config: RunConfig, names: str) -> tuple[LocalGossip, dict[str, Trainee]]:
    run = LocalGossip(run_config, list(names))
    peers = {name: Trainee(run, name, run_config, seed) for seed, name in enumerate(names)}
    for peer in peers.values():
        peer.worker.__enter__()
    return run, peers


def train(peers: Sequence[Trainee], steps: int) -> None:
    for _ in range(steps):
        for peer in peers:
            peer.step()


def ended(peers: Sequence[Trainee]) -> None:
    for peer in peers:
        peer.worker.__exit__(None, None, None)


def naive(run_config: RunConfig, names: str) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Every peer's parameters after all outer steps by the oracle, and the one model that they settle on."""
    models = {name: small_mlp() for name in names}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in models.items()}
    streams = {name: regression_batches(seed) for seed, name in enumerate(names)}
    settings = run_config.gossip
    oracles = [
        Gossip(
            dict.fromkeys(names, part),
            run_config.seed,
            settings.lr,
            settings.momentum,
            settings.mixing,
            (lambda tensor: tensor.bfloat16().float()) if settings.codec == "bf16" else (lambda tensor: tensor),
        )
        for part in flat(small_mlp())
    ]
    for outer_step in range(1, run_config.sync.outer_steps + 1):
        for name, model in models.items():
            for oracle, layer in zip(oracles, [model[0], model[2]], strict=True):
                load_fragment(oracle.phi[name], list(layer.parameters()))
            for _ in range(run_config.sync.every):
                train_step(model, optimizers[name], next(streams[name]))
        local = {name: flat(model) for name, model in models.items()}
        for i, oracle in enumerate(oracles):
            oracle.round({name: fragments[i] for name, fragments in local.items()})
        if settings.settle_every and outer_step % settings.settle_every == 0:
            for oracle in oracles:
                oracle.settle()
    before = {name: [oracle.phi[name] for oracle in oracles] for name in names}
    return before, [oracle.settle() for oracle in oracles]


def apart(theta: Sequence[Sequence[Tensor]]) -> float:
    """The largest distance between two that are neighbours in the list."""
    vectors = [torch.cat(list(one)) for one in theta]
    return max(float((a - b).norm()) for a, b in pairwise(vectors))


@pytest.mark.covering
@pytest.mark.parametrize("settle_every", [0, 3, 4])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_the_oracles_parameters_and_the_one_model_at_the_end_to_the_bit(names: str, codec: str, settle_every: int) -> None:
    run_config = config(codec=codec, settle_every=settle_every)
    run, peers = entered(run_config, names)
    train(list(peers.values()), 8 * 3)
    for peer in peers.values():
        assert peer.worker.finished or peer.worker.synchronize()
    ended(list(peers.values()))
    _, model = naive(run_config, names)
    assert run.finished and run.swapped > 0 and (run.refused, run.unpaired) == (0, 0)
    expected = digest(model)
    for name, peer in peers.items():
        assert peer.worker.digest == run.states[name].digest == expected and peer.worker.outer_step == 8


def test_before_they_settle_each_peer_has_the_oracles_own_parameters() -> None:
    run, peers = entered(config(7), "abcd")
    train(list(peers.values()), 6 * 3)
    before, _ = naive(config(6), "abcd")
    assert len({state.digest for state in run.states.values()}) == 4
    for name, state in run.states.items():
        assert state.outer_step == 6 and state.digest == digest(before[name])
        assert peers[name].worker.synchronize() and peers[name].worker.digest == state.digest


@pytest.mark.exhaustive
def test_mixing_holds_peers_together() -> None:
    distances = []
    for mixing in (1e-6, 0.2, 0.7):
        run, peers = entered(config(30, mixing=mixing), "abcd")
        train(list(peers.values()), 29 * 3)
        distances.append(apart([state.theta for state in run.states.values()]))
    assert distances[0] > 1.5 * distances[1] > 1.5 * distances[2]


def test_two_peers_are_always_one_model_and_that_of_sgd_with_momentum() -> None:
    """Of two the mean is everybody's: phi stays equal, and d is heavy-ball momentum (torch.optim.SGD, dampening 0)."""
    run, peers = entered(config(6, codec="fp32", lr=0.6, momentum=0.3), "ab")
    parameter = torch.nn.Parameter(torch.cat(flat(small_mlp())))
    theirs = torch.optim.SGD([parameter], lr=0.6, momentum=0.3, foreach=False)
    for outer_step in range(5):
        train(list(peers.values()), 3)
        local = [torch.cat(flat(peer.model)) for peer in peers.values()]
        parameter.grad = parameter.detach() - (local[0] + local[1]) / 2
        theirs.step()
        states = list(run.states.values())
        assert states[0].digest == states[1].digest and states[0].outer_step == outer_step + 1
        torch.testing.assert_close(torch.cat(list(states[0].theta)), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("up", ["int8", "topk", "bf16"])
def test_with_a_lossy_codec_peers_still_settle_on_one_model(up: str) -> None:
    run, peers = entered(config(up=up, penalty=PenaltyConfig(), settle_every=4), "abcd")
    train(list(peers.values()), 8 * 3)
    ended(list(peers.values()))
    assert run.finished and len({peer.worker.digest for peer in peers.values()}) == 1


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["forward", "delayed"])
@pytest.mark.parametrize("groups", [1, 2])
def test_peers_that_overlap_training_with_a_swap_settle_on_one_model(mode: str, groups: int) -> None:
    sync = SyncConfig(every=4, outer_steps=8, mode=mode, groups=groups)
    run, peers = entered(config(sync=sync, settle_every=4), "abc")
    train(list(peers.values()), 8 * 4 // groups + 2)
    ended(list(peers.values()))
    assert run.finished and {peer.worker.digest for peer in peers.values()} == {run.states["a"].digest}
    assert all(peer.worker.outer_step == 8 for peer in peers.values())


def test_a_contribution_in_shards_counts_as_a_whole_one_to_the_bit() -> None:
    """Two ranks of a: the first four rows of its first matrix, and the rest of that fragment."""
    first, second = (Box(0, (0, 0), (4, 4)),), (Box(0, (4, 0), (2, 4)), Box(1, (0,), (6,)))
    digests = set()
    for ranks in ([None], [first, second], [second, first]):
        run, schema = LocalGossip(config(), ["a", "b"]), plan_fragments(small_mlp().named_parameters())
        for name in "ab":
            run.join(name, schema, lambda: flat(small_mlp()))
        for name, seed in (("b", 1), ("a", 0)):
            for spec, delta in zip(schema.fragments, flat(small_mlp(seed=seed)), strict=True):
                for boxes in ranks if (name, spec.fragment_id) == ("a", 0) else [None]:
                    payload = codec("fp32").encode(Shard(spec, boxes).take(delta), spec)
                    one = Contribution(
                        outer_step=0, fragment_id=spec.fragment_id, inner_steps=3, tokens=10, payload=payload, boxes=boxes
                    )
                    assert run.swapped == 0 and run.contribute(name, one)
        assert run.swapped == 2 and run.sent["a"] == run.sent["b"] == (4 + 2) * schema.numel
        digests.add((run.states["a"].digest, run.states["b"].digest))
    assert len(digests) == 1


# Peers that are away, or wrong.


def verdicts(peer: Trainee) -> dict[str, Verdict]:
    commit = peer.worker.last_commit
    assert commit is not None
    return {one.peer_id: one.verdict for one in commit.fragments[0].verdicts}


def test_a_peer_whose_partner_does_not_answer_goes_alone() -> None:
    run_config = config()
    run, peers = entered(run_config, "ab")
    peers["a"].step(3)
    with pytest.raises(LocalProtocolError, match="peer a waits at outer step 0, but b must contribute first"):
        peers["a"].worker.synchronize()
    run.close("a")
    assert peers["a"].worker.synchronize() and verdicts(peers["a"]) == {"a": Verdict.OK, "b": Verdict.UNPAIRED}
    assert run.unpaired == 1 and peers["a"].worker.last_reason == "alone: b did not answer"
    with pytest.raises(LocalProtocolError, match="peer a has no complete contribution"):
        run.close("a")
    peers["b"].step(3)
    assert peers["b"].worker.synchronize() and verdicts(peers["b"]) == {"a": Verdict.UNPAIRED, "b": Verdict.OK}
    assert peers["b"].worker.last_reason == "alone: a went on alone" and run.unpaired == 2
    train(list(peers.values()), 3)
    assert peers["a"].worker.synchronize() and verdicts(peers["a"]) == {"a": Verdict.OK, "b": Verdict.OK}


def test_who_leaves_is_waited_for_no_longer_and_begins_where_the_others_are() -> None:
    run_config = config(codec="fp32")
    run, peers = entered(run_config, "abcd")
    train(list(peers.values()), 3)
    ended([peers["c"]])
    partner = pairs(3, 1, "abcd")["c"]
    assert partner is not None
    rest = [peers[name] for name in "abd"]
    train(rest, 3)
    run.leave("c")
    assert peers[partner].worker.synchronize() and peers[partner].worker.last_reason == "alone: c has left"
    train(rest, 3)
    assert all(peer.worker.synchronize() and peer.worker.outer_step == 3 for peer in rest)
    back = Trainee(run, "c", run_config, seed=9)
    back.worker.__enter__()
    assert back.worker.outer_step == 3 and back.worker.digest in {peer.worker.digest for peer in rest}
    everybody = [*rest, back]
    train(everybody, 5 * 3)
    ended(everybody)
    assert run.finished and len({peer.worker.digest for peer in everybody}) == 1


def test_who_comes_back_while_the_others_wait_to_settle_settles_with_them() -> None:
    run_config = config(3)
    run, peers = entered(run_config, "abc")
    train(list(peers.values()), 2 * 3)
    train([peers["a"], peers["b"]], 3)
    if (waiting := pairs(3, 2, "abc")["c"]) is not None:
        run.close(waiting)
    with pytest.raises(LocalProtocolError, match="peer a waits at outer step 2, but c must contribute first"):
        peers["a"].worker.synchronize()
    peers["c"] = Trainee(run, "c", run_config, seed=9)
    peers["c"].worker.__enter__()
    assert run.finished and peers["c"].worker.outer_step == 3
    assert all(peer.worker.synchronize() for peer in peers.values())
    assert {peer.worker.digest for peer in peers.values()} == {run.states["a"].digest}


def test_of_three_the_odd_one_goes_alone_and_nobody_is_unpaired() -> None:
    run, peers = entered(config(), "abc")
    train(list(peers.values()), 3)
    alone = next(name for name, partner in pairs(3, 0, "abc").items() if partner is None)
    for name, peer in peers.items():
        assert peer.worker.synchronize()
        assert verdicts(peer) == ({name: Verdict.OK} if name == alone else dict.fromkeys(set("abc") - {alone}, Verdict.OK))
    assert run.unpaired == 0 and peers[alone].worker.last_reason == "drawn without a partner"


@pytest.mark.parametrize("penalty", [OFF, PenaltyConfig()], ids=["off", "on"])
def test_a_peer_that_sends_nan_is_cured_and_harms_nobody(penalty: PenaltyConfig) -> None:
    run, peers = entered(config(penalty=penalty), "ab")
    train(list(peers.values()), 2 * 3 + 2)
    with torch.no_grad():
        peers["b"].model[0].weight.fill_(math.nan)
    train(list(peers.values()), 1)
    for peer in peers.values():
        assert peer.worker.synchronize()
    assert verdicts(peers["a"]) == {"a": Verdict.OK, "b": Verdict.NONFINITE}
    assert verdicts(peers["b"])["b"] is Verdict.NONFINITE and run.refused == 2, "NaN is in both by then"
    train(list(peers.values()), 3)
    assert peers["b"].worker.synchronize() and run.states["b"].outer_step == 4
    assert all(bool(part.isfinite().all()) for state in run.states.values() for part in state.theta)


@pytest.mark.parametrize(("slow", "fast"), ["ab", "ba"])
def test_a_pair_takes_a_fragment_together_only_if_both_find_it_good(slow: str, fast: str) -> None:
    """One moves a thirtieth as far: to it, the contribution of the other is anomalous; the other finds no fault with its."""
    run, peers = entered(config(penalty=PenaltyConfig()), "ab")
    peers[slow].optimizer.param_groups[0]["lr"] /= 30
    train(list(peers.values()), 3)
    assert all(peer.worker.synchronize() for peer in peers.values())
    assert verdicts(peers[slow]) == {slow: Verdict.OK, fast: Verdict.ANOMALOUS}
    assert verdicts(peers[fast]) == {slow: Verdict.UNPAIRED, fast: Verdict.OK}
    assert (run.swapped, run.refused, run.unpaired) == (0, 2, 0)


def test_what_was_contributed_before_settling_is_dropped() -> None:
    run_config = config(4, settle_every=1)
    run, peers = entered(run_config, "abc")
    (alone,) = [name for name, partner in pairs(3, 0, "abc").items() if partner is None]
    peers[alone].step(3)
    payload = codec("fp32").encode(torch.zeros(30), run.states["a"].schema.fragments[0])
    early = Contribution(outer_step=1, fragment_id=0, inner_steps=1, tokens=0, payload=payload)
    assert run.states[alone].outer_step == 1 and not run.contribute(alone, early), "the others have a step to go"
    rest = [peer for name, peer in peers.items() if name != alone]
    train(rest, 3)
    assert not run.contribute(alone, early), "it has yet to take the common model"
    assert peers[alone].worker.synchronize() and run.contribute(alone, early)


# What does not fit.


def test_another_model_and_other_peers_are_refused() -> None:
    run = LocalGossip(config(), ["a", "b"])
    run.join("a", plan_fragments(small_mlp().named_parameters()), lambda: flat(small_mlp()))
    with pytest.raises(RefusedError, match="peer b has another model"):
        run.join("b", plan_fragments(TinyTransformer().named_parameters()), lambda: [])
    with pytest.raises(LocalProtocolError, match="peer z is not one of a, b"):
        run.collective("z")
    with pytest.raises(LocalProtocolError, match="distinct peers"):
        LocalGossip(config(), ["a", "a"])


def test_each_kind_of_run_takes_its_own_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"outer\.algorithm = 'mean': must be gossip in a LocalGossip"):
        LocalGossip(RunConfig(), ["a"])
    run = LocalRun(config(), ["a"])
    with pytest.raises(ConfigError, match=r"outer\.algorithm = 'gossip'"):
        run.join("a", plan_fragments(small_mlp().named_parameters()), lambda: flat(small_mlp()))
