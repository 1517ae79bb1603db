"""How contributions become one pseudo-gradient besides the plain mean: RDA, HeLoCo, staleness; against the oracle."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from edit.config.run import PenaltyConfig
from edit.fragments.shards import Shard
from edit.merging.heloco import Momentum
from edit.merging.merge import Measured, Merged, MergeRule, ShardPayload, measure
from edit.merging.mergers import EditMerger
from edit.reference import heloco, rda
from tests.support.encoded import encode
from tests.support.layouts import fragment, rows

OFF = PenaltyConfig(enabled=False)
RAW = PenaltyConfig(norm="raw", clip=0.0)
PLAIN = MergeRule()


def random_vector(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def measured(peer_id: str, delta: Tensor) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id=peer_id, inner_steps=1, tokens=1, norm=measure(payload), payload=payload)


def merge(numel: int, contributions: Sequence[Measured], config: PenaltyConfig, rule: MergeRule = PLAIN) -> Merged:
    return EditMerger(config).merge(fragment((numel,)), contributions, {}, rule)


def test_rda_keeps_the_length_that_a_mean_of_random_directions_loses() -> None:
    deltas = {peer_id: random_vector(3000, seed, 1.0 + seed) for seed, peer_id in enumerate("abcd")}
    contributions = [measured(peer_id, delta) for peer_id, delta in deltas.items()]
    mean, radial = (merge(3000, contributions, OFF, MergeRule(direction)).merged_norm for direction in ("mean", "rda"))
    lengths = [float(delta.norm()) for delta in deltas.values()]
    assert radial == pytest.approx(sum(lengths) / 4, rel=1e-5)
    assert mean < 0.6 * radial, "four orthogonal directions: the mean is about half as long"


@pytest.mark.parametrize("config", [OFF, RAW, PenaltyConfig(clip=0.0)])
def test_rda_follows_the_oracle_with_the_weights_of_the_rule(config: PenaltyConfig) -> None:
    deltas = [random_vector(300, seed, 0.1 + seed / 10) for seed in range(4)]
    contributions = [
        dataclasses.replace(measured(p, d), staleness=s) for s, (p, d) in enumerate(zip("abcd", deltas, strict=True))
    ]
    result = merge(300, contributions, config, MergeRule("rda"))
    assert result.merged is not None
    assert torch.allclose(result.merged, rda(deltas, [verdict.weight for verdict in result.verdicts]), atol=1e-5)


def test_rda_of_one_is_that_one_and_of_nothing_is_nothing() -> None:
    delta = random_vector(300)
    alone = merge(300, [measured("a", delta)], OFF, MergeRule("rda")).merged
    assert alone is not None and torch.allclose(alone, delta, atol=1e-6)
    nothing = merge(300, [measured(p, torch.zeros(300)) for p in "ab"], OFF, MergeRule("rda")).merged
    assert nothing is not None and not nothing.any()
    opposed = merge(300, [measured("a", delta), measured("b", -delta)], OFF, MergeRule("rda")).merged
    assert opposed is not None and not opposed.any()


@pytest.mark.parametrize("direction", ["mean", "rda"])
def test_every_contribution_is_corrected_before_the_average(direction: str) -> None:
    reference = random_vector(300, 9)
    deltas = [-reference, reference, random_vector(300, 1)]
    corrected = [
        torch.cat([heloco(part, 0.5 * m) for part, m in zip(d.split(150), reference.split(150), strict=True)]) for d in deltas
    ]
    rule = MergeRule(direction, Momentum(reference, 0.5, (150, 150)))
    result = merge(300, [measured(p, d) for p, d in zip("abc", deltas, strict=True)], OFF, rule)
    expected = rda(corrected, [1 / 3] * 3) if direction == "rda" else sum(corrected, torch.zeros(300)) / 3
    assert result.merged is not None and torch.allclose(result.merged, expected, atol=1e-5)
    assert [verdict.norm for verdict in result.verdicts] == [measured("a", d).norm for d in deltas], "judged as contributed"


def test_what_comes_alone_and_stale_counts_less_only_where_arrivals_are_merged() -> None:
    delta = random_vector(300)
    alone = [dataclasses.replace(measured("a", delta), staleness=3)]
    full = merge(300, alone, OFF).merged
    config = dataclasses.replace(OFF, damping=0.5)
    damped = merge(300, alone, config, MergeRule(damped=True)).merged
    assert full is not None and torch.equal(full, delta)
    assert damped is not None and torch.equal(damped, delta * 0.5)


def test_a_sharded_contribution_is_corrected_as_a_whole() -> None:
    whole = fragment((4, 6), (5,))
    delta, reference = random_vector(whole.numel, 1), random_vector(whole.numel, 2)
    shards = [Shard(whole, boxes) for boxes in rows(whole, 3)]
    parts = tuple(ShardPayload(shard, encode("fp32", shard.take(delta))) for shard in shards)
    rule = MergeRule("mean", Momentum(reference, 0.9, [24, 5]))
    sharded = merge(whole.numel, [dataclasses.replace(measured("a", delta), payload=parts)], OFF, rule).merged
    together = merge(whole.numel, [measured("a", delta)], OFF, rule).merged
    assert sharded is not None and together is not None and torch.equal(sharded, together)
    assert not torch.equal(together, delta)
