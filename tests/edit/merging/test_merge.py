"""The merge: norms of what was decoded, the mean in peer_id order, clip and rollback; nothing bad touches the sum."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit.codecs import PIECE, codec_names, decode
from edit.config.run import PenaltyConfig
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured, Merged, MergeRule, ShardPayload, measure
from edit.merging.mergers import EditMerger
from edit.merging.norms import norm, whole_norm
from edit.merging.penalty import NormStatistics
from edit.records import EncodedTensor, Verdict
from tests.support.encoded import encode
from tests.support.exhaustive import examples
from tests.support.layouts import fragment, partitions, rows

OFF = PenaltyConfig(enabled=False)
RAW = PenaltyConfig(norm="raw", clip=0.0)


def random_vector(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def measured(peer_id: str, delta: Tensor, codec_name: str = "fp32", tokens: int = 1) -> Measured:
    payload = encode(codec_name, delta)
    return Measured(peer_id=peer_id, inner_steps=1, tokens=tokens, norm=measure(payload), payload=payload)


def merged_of(contributions: Sequence[Measured], config: PenaltyConfig = OFF, numel: int = 300) -> Merged:
    return EditMerger(config).merge(fragment((numel,)), contributions, {}, MergeRule())


def learned(mean: float) -> NormStatistics:
    return NormStatistics(mean=mean, variance=(0.1 * mean) ** 2, count=50)


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, PIECE, PIECE + 1, 2 * PIECE + 1500])
def test_measure_is_the_norm_of_what_is_decoded(name: str, numel: int) -> None:
    encoded = encode(name, random_vector(numel))
    exact = math.sqrt(float(decode(encoded).double().square().sum()))
    assert measure(encoded) == pytest.approx(exact, rel=1e-6)
    assert measure(encoded) == norm(decode(encoded))


def test_measure_does_not_depend_on_the_number_of_threads() -> None:
    encoded = [encode("int8", random_vector(numel, seed)) for seed, numel in enumerate((40_000, PIECE, 3 * PIECE + 777))]
    before = torch.get_num_threads()
    try:
        norms = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            norms.append([measure(one) for one in encoded])
    finally:
        torch.set_num_threads(before)
    assert norms[1:] == norms[:-1]


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, PIECE + 1100])
def test_t2_one_broken_element_makes_the_norm_not_finite(name: str, value: float, where: int) -> None:
    delta = random_vector(PIECE + 1101)
    delta[where] = value
    assert not math.isfinite(measure(encode(name, delta)))


def test_a_norm_that_overflows_is_not_finite_and_bytes_of_another_length_are_refused() -> None:
    assert measure(encode("fp32", torch.full((4,), 3e38))) == math.inf
    with pytest.raises(RemoteProtocolError):
        measure(EncodedTensor("int8", 300, b"too short"))
    assert measure(encode("fp32", torch.zeros(5))) == 0.0


@pytest.mark.parametrize("name", codec_names())
def test_the_mean_is_taken_in_peer_id_order_to_the_bit_whatever_the_order_of_arrival(name: str) -> None:
    contributions = [measured(peer_id, random_vector(300, seed), name) for seed, peer_id in enumerate("dbac")]
    expected = torch.zeros(300)
    for contribution in sorted(contributions, key=lambda one: one.peer_id):
        expected += decode(contribution.payload) * 0.25
    for order in (contributions, contributions[::-1], contributions[2:] + contributions[:2]):
        result = merged_of(order)
        assert result.merged is not None and torch.equal(result.merged, expected)
        assert [verdict.peer_id for verdict in result.verdicts] == list("abcd")


@pytest.mark.parametrize("config", [OFF, RAW])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_t2_a_broken_contribution_leaves_no_trace_in_the_mean(config: PenaltyConfig, value: float) -> None:
    broken = random_vector(300, 9)
    broken[3] = value
    good = [measured("a", random_vector(300, 1)), measured("c", random_vector(300, 2))]
    result, without = merged_of([*good, measured("b", broken)], config), merged_of(good, config)
    assert result.merged is not None and without.merged is not None
    assert torch.equal(result.merged, without.merged)
    assert [(v.verdict, v.weight > 0) for v in result.verdicts] == [
        (Verdict.OK, True),
        (Verdict.NONFINITE, False),
        (Verdict.OK, True),
    ]
    assert math.isfinite(result.merged_norm)


def test_a_contribution_of_weight_zero_is_not_even_read_back() -> None:
    def unread() -> EncodedTensor:
        raise AssertionError("read back from the spill")

    good = measured("a", random_vector(300))
    result = merged_of([good, Measured("b", 1, 1, math.nan, unread)])
    assert result.merged is not None


def test_payloads_may_be_read_back_from_a_spill() -> None:
    here = [measured("a", random_vector(300, 1)), measured("b", random_vector(300, 2))]
    spilled = [Measured(m.peer_id, m.inner_steps, m.tokens, m.norm, lambda m=m: m.payload) for m in here]
    one, other = merged_of(here, RAW), merged_of(spilled, RAW)
    assert one.merged is not None and other.merged is not None
    assert torch.equal(one.merged, other.merged)


@pytest.mark.parametrize("config", [OFF, RAW])
def test_all_bad_is_a_rollback(config: PenaltyConfig) -> None:
    result = merged_of([measured("a", torch.full((300,), math.nan)), measured("b", torch.full((300,), math.inf))], config)
    assert result.merged is None and (result.merged_norm, result.clip) == (0.0, 1.0)
    assert [verdict.weight for verdict in result.verdicts] == [0.0, 0.0]


def test_a_sum_that_overflows_is_a_rollback() -> None:
    """Each finite and so unflagged, yet the mean's norm is not: nothing of it may reach theta."""
    huge = torch.zeros(300)
    huge[0] = 1e19
    peers = [Measured(p, 1, 1, 1e19, encode("fp32", huge * 2)) for p in "ab"]
    assert merged_of(peers).merged is None


def test_the_clip_bounds_the_norm_and_names_both() -> None:
    delta = random_vector(300, scale=10.0)
    result = merged_of([measured("a", delta)], PenaltyConfig(clip=2.0))
    assert result.merged is not None
    assert result.merged_norm == pytest.approx(float(delta.norm()))
    assert result.clip == 2.0 / (result.merged_norm + 1e-6)
    assert norm(result.merged) == pytest.approx(2.0, rel=1e-5)
    assert torch.equal(result.merged, delta * result.clip)


@pytest.mark.parametrize("config", [PenaltyConfig(clip=0.0), PenaltyConfig(clip=1e9), OFF])
def test_without_need_or_leave_nothing_is_clipped(config: PenaltyConfig) -> None:
    delta = random_vector(300, scale=10.0)
    result = merged_of([measured("a", delta)], config)
    assert result.clip == 1.0 and result.merged is not None and torch.equal(result.merged, delta)


def test_statistics_advance_for_the_good_ones_only() -> None:
    before = {peer_id: learned(17.0) for peer_id in "abd"}
    deltas = {"a": random_vector(300, 1), "b": random_vector(300, 2, scale=100.0), "c": random_vector(300, 3)}
    contributions = [measured(p, delta) for p, delta in deltas.items()]
    result = EditMerger(RAW).merge(fragment((300,)), contributions, before, MergeRule())
    assert [verdict.verdict for verdict in result.verdicts] == [Verdict.OK, Verdict.ANOMALOUS, Verdict.OK]
    assert set(result.statistics) == set("abc"), "of this round's contributors"
    assert result.statistics["a"].count == 51 and result.statistics["c"].count == 1
    assert result.statistics["b"] == before["b"]
    assert before == {peer_id: learned(17.0) for peer_id in "abd"}


def test_a_free_rider_weighs_nothing_and_is_named() -> None:
    scales = {"a": 1.0, "b": 1.0, "c": 0.0}
    result = merged_of([measured(p, random_vector(300, i, scale=scales[p])) for i, p in enumerate(scales)], RAW)
    assert [verdict.verdict for verdict in result.verdicts] == [Verdict.OK, Verdict.OK, Verdict.IDLE]
    assert result.verdicts[2].weight == 0.0 and result.statistics["c"].count == 0


def test_tokens_weigh_when_the_configuration_says_so() -> None:
    contributions = [measured("a", random_vector(300, 1), tokens=3), measured("b", random_vector(300, 2), tokens=1)]
    result = merged_of(contributions, PenaltyConfig(enabled=False, weighting="tokens"))
    assert [verdict.weight for verdict in result.verdicts] == [0.75, 0.25]


def test_a_peer_twice_is_our_bug_and_another_length_is_theirs() -> None:
    one = measured("a", random_vector(300))
    with pytest.raises(LocalProtocolError, match="twice"):
        merged_of([one, one])
    with pytest.raises(RemoteProtocolError, match="fragment 0 of peer b has 299 elements, not 300"):
        merged_of([one, measured("b", random_vector(299))])


@given(
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=5, unique=True),
    scales=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 1e4, math.nan, math.inf]), min_size=5, max_size=5),
    config=st.sampled_from([OFF, RAW, PenaltyConfig(), PenaltyConfig(norm="per_sqrt_step", clip=0.5)]),
)
@settings(deadline=None, max_examples=examples(150))
def test_the_result_is_finite_or_a_rollback(seeds: list[int], scales: list[float], config: PenaltyConfig) -> None:
    contributions = [measured(f"p{i}", random_vector(300, i, scales[k])) for k, i in enumerate(seeds)]
    result = merged_of(contributions, config)
    good = [verdict for verdict in result.verdicts if verdict.verdict is Verdict.OK]
    assert (result.merged is None) == (not good)
    if result.merged is not None:
        assert bool(result.merged.isfinite().all())
        assert sum(verdict.weight for verdict in good) == pytest.approx(1.0)
        assert not config.enabled or config.clip == 0 or norm(result.merged) <= config.clip * (1 + 1e-5)


# Sharded replicas.


def sharded(
    peer_id: str, spec: FragmentSpec, delta: Tensor, shares: Sequence[Sequence[Box]], codec_name: str = "fp32"
) -> Measured:
    shards = [Shard(spec, boxes) for boxes in shares if boxes]
    parts = tuple(ShardPayload(shard, encode(codec_name, shard.take(delta))) for shard in shards)
    size = whole_norm(measure(part.payload) for part in parts if isinstance(part.payload, EncodedTensor))
    return Measured(peer_id, 1, 1, size, parts)


@given(layout=partitions(), weights=st.lists(st.integers(1, 9), min_size=3, max_size=3))
@settings(deadline=None, max_examples=examples(100))
def test_with_a_lossless_codec_no_bit_of_the_mean_depends_on_the_layout(
    layout: tuple[FragmentSpec, list[list[Box]]], weights: list[int]
) -> None:
    spec, shares = layout
    config = PenaltyConfig(enabled=False, weighting="tokens")
    deltas = [random_vector(spec.numel, seed) for seed in range(3)]
    whole = [measured(p, delta, tokens=w) for p, delta, w in zip("abc", deltas, weights, strict=True)]
    other = [[share for boxes in shares for share in ([box] for box in boxes)], rows(spec, 3), rows(spec, 2, 1)]
    parts = [sharded(p, spec, delta, layout) for p, delta, layout in zip("abc", deltas, other, strict=True)]
    parts = [Measured(m.peer_id, 1, w, m.norm, m.payload) for m, w in zip(parts, weights, strict=True)]
    expected, result = merged_of(whole, config, spec.numel), merged_of(parts, config, spec.numel)
    assert expected.merged is not None and result.merged is not None
    assert torch.equal(result.merged, expected.merged)
    mixed = merged_of([parts[0], whole[1], parts[2]], config, spec.numel)
    assert mixed.merged is not None and torch.equal(mixed.merged, expected.merged)


@pytest.mark.parametrize("name", codec_names())
def test_a_sharded_contribution_is_the_sum_of_its_decoded_parts(name: str) -> None:
    spec = fragment((40, 50), (300,), ())
    delta = random_vector(spec.numel)
    one = sharded("a", spec, delta, rows(spec, 3, 1), name)
    result = merged_of([one], OFF, spec.numel)
    expected = torch.zeros(spec.numel)
    assert isinstance(one.payload, tuple)
    for part in one.payload:
        assert isinstance(part.payload, EncodedTensor)
        part.shard.put(decode(part.payload), expected)
    assert result.merged is not None and torch.equal(result.merged, expected)
    assert one.norm == pytest.approx(float(expected.double().norm()), rel=1e-6)


def test_parts_of_weight_zero_are_not_read_back_and_others_are_one_by_one() -> None:
    spec, read = fragment((30,)), []

    def spilled(shard: Shard) -> EncodedTensor:
        read.append(shard.span)
        return encode("fp32", shard.take(torch.ones(30)))

    def peer(peer_id: str, size: float) -> Measured:
        shards = [Shard(spec, boxes) for boxes in rows(spec, 2)]
        return Measured(peer_id, 1, 1, size, tuple(ShardPayload(r, lambda r=r: spilled(r)) for r in shards))

    result = merged_of([peer("a", 1.0), peer("b", math.nan)], OFF, 30)
    assert result.merged is not None and torch.equal(result.merged, torch.ones(30))
    assert read == [(0, 15), (15, 30)]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0, 10), (12, 18)], "fragment 0 of peer a: tensor t0: the shards cover 28 of 30 elements"),
        ([(0, 20), (10, 20)], "fragment 0 of peer a: tensor t0: two shards overlap"),
        ([], "fragment 0 of peer a: its shards are not of one fragment of 30 elements"),
    ],
)
def test_parts_that_do_not_make_up_the_fragment_are_the_peers_fault(boxes: list[tuple[int, int]], message: str) -> None:
    spec = fragment((30,))
    shares = [[Box(0, (start,), (size,))] for start, size in boxes]
    with pytest.raises(RemoteProtocolError, match=message):
        merged_of([sharded("a", spec, torch.ones(30), shares)], OFF, 30)


def test_a_part_of_another_length_or_fragment_is_the_peers_fault() -> None:
    spec = fragment((30,))
    whole = Shard(spec)
    with pytest.raises(RemoteProtocolError, match="fragment 0 of peer a has 29 elements, not 30"):
        merged_of([Measured("a", 1, 1, 1.0, (ShardPayload(whole, encode("fp32", torch.ones(29))),))], OFF, 30)
    strided = [Shard(spec, boxes) for boxes in ([Box(0, (0,), (5,)), Box(0, (20,), (10,))], [Box(0, (5,), (15,))])]
    with pytest.raises(RemoteProtocolError, match="fragment 0 of peer a has 14 elements, not 15"):
        merged_of([Measured("a", 1, 1, 1.0, tuple(ShardPayload(r, encode("fp32", torch.ones(14))) for r in strided))], OFF, 30)
    with pytest.raises(RemoteProtocolError, match="not of one fragment of 31 elements"):
        merged_of([Measured("a", 1, 1, 1.0, (ShardPayload(whole, encode("fp32", torch.ones(30))),))], OFF, 31)


def test_the_norm_of_the_whole_is_that_of_its_parts() -> None:
    assert whole_norm([3.0, 4.0]) == 5.0 and whole_norm([]) == 0.0 and whole_norm([0.1]) == 0.1
    assert whole_norm(iter([1e19, 1e-19, 1.0])) == 1e19
    assert math.isnan(whole_norm([1.0, math.nan])) and math.isnan(whole_norm([math.inf, math.nan]))
    assert whole_norm([1.0, math.inf]) == math.inf == whole_norm([1e200]) == whole_norm([1.2e154, 1.2e154])


@given(norms=st.lists(st.floats(0, 1e30), max_size=8), data=st.data())
@settings(deadline=None)
def test_the_norm_of_the_whole_does_not_depend_on_the_order_of_the_parts(norms: list[float], data: st.DataObject) -> None:
    assert whole_norm(data.draw(st.permutations(norms))) == whole_norm(norms)
