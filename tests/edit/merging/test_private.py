"""Clipped sums with noise: against the oracle, and that nobody changes them by more than the clip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit import LocalRun, reference
from edit.codecs.base import PIECE
from edit.config.gaussian import composed_multiplier, gaussian_delta, gaussian_multiplier, noise_length
from edit.config.run import RunConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured, ShardPayload, measure
from edit.merging.norms import norm
from edit.merging.outer_state import OuterState
from edit.merging.private import clip_contributions, clip_of_norms, noise_line
from edit.records import Verdict
from edit.trust.noise import SecretNoise
from tests.support.encoded import encode
from tests.support.exhaustive import examples

SIZES = (4, 300)
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"t{i}", shape=(numel,)),))
        for i, numel in enumerate(SIZES)
    )
)
PRIVACY = {"level": "organisation", "delta": 1e-5, "epsilon_max": 50.0, "noise_multiplier": 2.0, "clip": 5.0, "denominator": 4}


def configured(**privacy: Any) -> RunConfig:
    return RunConfig.from_mapping({"penalty": {"enabled": False}, "privacy": {**PRIVACY, **privacy}})


def state(config: RunConfig | None = None) -> OuterState:
    return OuterState(SCHEMA, config or configured(), [torch.zeros(numel) for numel in SIZES])


def contribution(peer_id: str, delta: Tensor) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id=peer_id, inner_steps=1, tokens=1, norm=measure(payload), payload=payload)


def given_by(whole: Mapping[str, Tensor]) -> dict[int, list[Measured]]:
    """Of vectors over both fragments."""
    cut = {peer_id: delta.split(SIZES) for peer_id, delta in whole.items()}
    return {i: [contribution(peer_id, parts[i].clone()) for peer_id, parts in cut.items()] for i in range(len(SIZES))}


def silent(count: int) -> npt.NDArray[np.float64]:
    return np.zeros(count)


def merged(whole: Mapping[str, Tensor], noise: Any = silent, outer: OuterState | None = None, **privacy: Any) -> Tensor:
    """D over both fragments."""
    outer, contributions = outer or state(configured(**privacy)), given_by(whole)
    clipped = outer.clip(contributions)
    found = [outer.reduce_private(i, each, clipped, noise).merged for i, each in contributions.items()]
    return torch.cat([part for part in found if part is not None])


def vectors(seed: int, *lengths: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(sum(SIZES), generator=generator) for _ in lengths]
    return [length * one / one.norm() for one, length in zip(drawn, lengths, strict=True)]


def test_it_is_the_oracles_with_the_norm_over_all_fragments() -> None:
    deltas = vectors(1, 3.0, 5.0, 80.0, 0.0)
    drawn = torch.from_numpy(SecretNoise().normal(sum(SIZES)))
    stream = iter(drawn.split(SIZES))
    found = merged(dict(zip("abcd", deltas, strict=True)), lambda count: next(stream).clone().numpy())
    expected = reference.private_mean(deltas[:3], clip_of_norms(5.0, max(SIZES)), 10.0 * drawn, 4)
    assert torch.allclose(found.double(), expected.double(), rtol=1e-6, atol=1e-7)
    long_in_one = torch.cat([torch.full((4,), 1.5), torch.full((300,), 4 / 300**0.5)])  # 3 and 4: 5 in all
    assert torch.allclose(merged({"a": long_in_one}), long_in_one / 4)
    assert torch.allclose(merged({"a": long_in_one}, clip=2.5), long_in_one / 8)


scaled = st.tuples(st.integers(0, 1 << 30), st.floats(0, 1e30)).map(lambda drawn: vectors(drawn[0], drawn[1])[0])


@settings(max_examples=examples(40), deadline=None)
@given(scaled, st.integers(0, 5))
def test_one_organisation_more_changes_the_sum_by_at_most_the_clip(other: Tensor, others: int) -> None:
    rest = {f"p{i}": delta for i, delta in enumerate(vectors(2, *[7.0] * others))}
    without = merged({**rest, "x": torch.zeros(304)}).double()
    with_it = merged({**rest, "x": other}).double()
    assert float((4 * (with_it - without)).norm()) <= 5.0 * (1 + 1e-5)


def test_contributions_of_one_organisation_count_as_one() -> None:
    long = vectors(3, 50.0, 50.0, 50.0)
    found = merged({"acme.gpu1": long[0], "acme.gpu2": long[1], "b": long[2]})
    acme = (long[0] / 10 + long[1] / 10) / 2
    assert torch.allclose(4 * found, acme + long[2] / 10, atol=1e-6)
    same = merged({"acme.gpu1": long[0], "acme.gpu2": long[0], "acme.gpu3": long[0]})
    assert float(4 * same.norm()) == pytest.approx(5.0, rel=1e-5)


def test_what_is_published_of_a_contribution_does_not_follow_its_length() -> None:
    outer = state()
    contributions = given_by({"acme.1": vectors(1, 1e-6)[0], "acme.2": vectors(1, 1e6)[0], "b": vectors(1, 3.0)[0]})
    for i, each in contributions.items():
        result = outer.reduce_private(i, each, outer.clip(contributions), silent)
        said = [(v.peer_id, v.verdict, v.weight, math.isnan(v.norm)) for v in result.verdicts]
        ok = Verdict.OK
        assert said == [("acme.1", ok, 1 / 8, True), ("acme.2", ok, 1 / 8, True), ("b", ok, 1 / 4, True)]
        assert result.statistics == {}, "and nothing of it is kept"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_anywhere_counts_nowhere(bad: float) -> None:
    good, other = vectors(4, 3.0, 3.0)
    other[7] = bad
    outer, contributions = state(), given_by({"a": good, "b": other})
    clipped = outer.clip(contributions)
    assert clipped.verdicts == {"b": Verdict.NONFINITE} and clipped.factors == {"a": 1.0}
    assert torch.allclose(merged({"a": good, "b": other}), good / 4)
    assert outer.clip(contributions, {"a", "b"}).verdicts == {"a": Verdict.REJECTED, "b": Verdict.NONFINITE}
    alone = merged({"b": other}, lambda count: np.ones(count))
    assert torch.allclose(alone, torch.full((304,), 10.0 / 4)), "nobody counts, and the noise is there"


def test_a_sharded_contribution_is_merged_to_the_same_bits() -> None:
    outer, delta = state(), vectors(5, 20.0)[0]
    contributions = given_by({"a": delta, "b": vectors(6, 2.0)[0]})
    clipped, fragment = outer.clip(contributions), SCHEMA.fragments[1]
    shards = [Shard(fragment, [Box(0, (start,), (size,))]) for start, size in ((0, 130), (130, 170))]
    whole, other = contributions[1]
    payloads = tuple(ShardPayload(shard, encode("fp32", shard.take(delta[4:]))) for shard in shards)
    parts = Measured(peer_id="a", inner_steps=1, tokens=1, norm=whole.norm, payload=payloads)
    one, two = (outer.reduce_private(1, [each, other], clipped, silent).merged for each in (whole, parts))
    assert one is not None and two is not None and torch.equal(one, two)


def test_a_merge_without_noise_and_one_of_a_part_are_bugs() -> None:
    outer, contributions = state(), given_by({"a": vectors(1, 1.0)[0]})
    with pytest.raises(LocalProtocolError, match="a merge without noise"):
        outer.reduce(0, contributions[0])
    for wrong in ({0: contributions[0], 1: []}, {0: contributions[0] * 2, 1: contributions[1]}):
        with pytest.raises(LocalProtocolError, match="each fragment of each contribution, once"):
            outer.clip(wrong)


def test_a_run_in_one_process_and_a_model_with_buffers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.level = 'organisation': needs a coordinator"):
        LocalRun(configured(), ["a"])
    buffers = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="t", shape=(2,)),), buffers=True)
    with pytest.raises(ConfigError, match=r"privacy\.level = 'organisation': must not be organisation .* buffers"):
        OuterState(Schema((buffers,)), configured(), [torch.zeros(2)])


def lengths(numel: int, *targets: tuple[int, float]) -> Sequence[tuple[float, float]]:
    noise = gaussian_multiplier(4.0, 1e-5, 100)
    return [(noise_length(noise, numel, n0), expected) for n0, expected in targets]


def test_how_long_the_noise_is_is_the_specified_table() -> None:
    """eps 4 at delta 1e-5 over 100 outer steps, for 10,000 and 50,331,648 parameters."""
    for found, expected in (
        *lengths(10_000, (16, 68), (64, 17), (1000, 1.1)),
        *lengths(50_331_648, (16, 4773), (64, 1193), (1000, 76)),
    ):
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("steps", "z"), [(1, 1.0), (10, 2.0), (100, 10.8), (1000, 32.0)])
def test_delta_is_the_oracles_and_sums_with_other_noise_add_up(steps: int, z: float) -> None:
    for epsilon in (0.1, 1.0, 4.0):
        assert gaussian_delta(epsilon, steps, z) == pytest.approx(reference.gaussian_privacy(epsilon, steps, z), rel=1e-6)
    assert gaussian_delta(1.0, 1, composed_multiplier([(z, steps)])) == pytest.approx(gaussian_delta(1.0, steps, z))
    twice = composed_multiplier([(z, steps), (2 * z, 4 * steps)])
    assert gaussian_delta(1.0, 1, twice) == pytest.approx(gaussian_delta(1.0, 2 * steps, z))
    assert composed_multiplier([]) == math.inf and gaussian_delta(0.0, 1, math.inf) == 0.0


def test_noise_above_the_contributions_is_a_warning_and_far_above_an_error() -> None:
    usual, much, too_much = (configured(denominator=n0) for n0 in (100, 30, 3))  # 2 sqrt(304) = 34.9
    said = (
        "the noise of an outer step is {} times as long as the longest contribution (z sqrt(d) / n0, z = 2, d = 304, n0 = {})"
    )
    assert noise_line(usual, SCHEMA) == (said.format(0.349, 100), False)
    line, warns = noise_line(much, SCHEMA)
    assert warns and line.startswith(said.format(1.16, 30) + ": expect to learn little")
    with pytest.raises(ConfigError, match=r"^privacy\.noise_multiplier = 2: the noise .* 11\.6 times .*privacy\.accept_noise"):
        noise_line(too_much, SCHEMA)
    assert noise_line(configured(denominator=3, accept_noise=True), SCHEMA)[1]
    groups = RunConfig.from_mapping(
        {"penalty": {"enabled": False}, "sync": {"every": 4, "groups": 2}, "privacy": {**PRIVACY, "denominator": 100}}
    )
    assert "d = 300," in noise_line(groups, SCHEMA)[0], "an outer step exchanges one group"


@pytest.mark.parametrize("rows", [1, 40])
def test_no_clipped_contribution_is_longer_than_the_clip_whatever_its_norm_was_rounded_to(rows: int) -> None:
    """Norms are summed in fp32: what is small beside a first large row is lost in each lane."""
    for seed in range(20):
        vector = torch.full((rows, PIECE), 2.0**-13 * 0.99)
        vector[0] = torch.randn(PIECE, generator=torch.Generator().manual_seed(seed)).abs()
        flat = vector.flatten()
        one = Measured("a", 1, 1, norm(flat), encode("fp32", flat))
        factor = clip_contributions({0: [one]}, 0.5, 4, numel=flat.numel()).factors["a"]
        length = float(flat.double().square().sum().sqrt())
        assert 0.5 * (1 - 1e-5) < factor * length <= 0.5
