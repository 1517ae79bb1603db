"""The robust rules: byzfl's values, the oracle's, what no hostile third can do, and the same bits whatever the order."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit import reference
from edit.codecs.base import PIECE, parts
from edit.config.robust import RobustConfig
from edit.kernels import load
from edit.merging.gram import LANES, gram
from edit.merging.robust import Combination, by_rank, coefficients, copies, mixed, shared_prior
from tests.support.exhaustive import examples

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "byzfl.json").read_text())["cases"]
PLAIN: dict[str, Any] = {"mixing": "none", "equalise": False}


def exact(rows: Tensor) -> list[list[float]]:
    return [[float(x.double() @ y.double()) for y in rows] for x in rows]


def uniform(n: int) -> list[float]:
    return [1 / n] * n


def combined(rows: Tensor, found: Combination) -> Tensor:
    factors = [a * s for a, s in zip(found.weights, found.scales, strict=True)]
    return (torch.tensor(factors, dtype=torch.float64)[:, None] * rows.double()).sum(dim=0)


def merged(rows: Tensor, rule: str, hostile: int = 1, **more: Any) -> Tensor:
    config = RobustConfig(rule=rule, hostile=hostile if rule != "clip" else 0, **more)
    inner = exact(rows)
    if rule == "centered_clip":
        inner = [[*row, 0.0] for row in inner] + [[0.0] * (len(rows) + 1)]
    return combined(rows, coefficients(inner, uniform(len(rows)), config))


def close(a: Tensor, b: Any) -> bool:
    return torch.allclose(a.double(), torch.as_tensor(b, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"f{case['hostile']}")
def test_the_rules_compute_what_byzfl_computes(case: dict[str, Any]) -> None:
    f, rows = case["hostile"], torch.tensor(case["rows"])
    n = len(rows)
    assert close(by_rank(rows.clone(), (n - 1) // 2), case["median"])
    assert close(by_rank(rows.clone(), f), case["trimmed_mean"])
    assert close(merged(rows, "geometric_median", f, **PLAIN), case["geometric_median"])
    assert close(merged(rows, "centered_clip", f, radius=1.5, **PLAIN), case["centered_clip"])
    assert close(merged(rows, "geometric_median", f, equalise=False), case["nnm geometric_median"])
    mixing = torch.tensor(mixed(exact(rows), uniform(n), f), dtype=torch.float64)
    assert close(mixing @ rows.double(), case["nnm"])
    if "multi_krum" in case:
        assert close(merged(rows, "multi_krum", f, **PLAIN), case["multi_krum"])


@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (9, 3), (12, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_rules_compute_what_the_oracle_computes(n: int, f: int, seed: int) -> None:
    rows = torch.randn(n, 40, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.5, 3, n)[:, None]
    equal = reference.equalised(rows)
    assert close(merged(rows, "geometric_median", f), reference.geometric_median(reference.nearest_neighbour_mixing(equal, f)))
    assert close(merged(rows, "geometric_median", f, mixing="none"), reference.geometric_median(equal))
    assert close(merged(rows, "multi_krum", f, **PLAIN), reference.multi_krum(rows, f))
    clipped = reference.centered_clip(rows, torch.zeros(40), 2.0)
    assert close(merged(rows, "centered_clip", f, radius=2.0, **PLAIN), clipped)
    assert close(by_rank(rows.clone(), f), rows.sort(dim=0).values[f : n - f].mean(dim=0))


@pytest.mark.parametrize("length", [1e3, 1e9, 1e15])
def test_the_geometric_median_of_rows_as_they_are_sent_stays_where_it_is_however_long_one_of_them_is(length: float) -> None:
    """32 steps from the mean of all would leave it further away the longer that row is."""
    rows = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)) + 1
    rows[0] *= length / rows[0].norm()
    found = merged(rows, "geometric_median", **PLAIN)
    assert (found - reference.geometric_median(rows.double(), steps=1000)).norm() < 1e-3 * rows[1:].norm(dim=1).min()
    assert torch.allclose(found, reference.geometric_median(rows.double()), atol=1e-4)


def test_centered_clip_starts_from_what_was_merged_last() -> None:
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    last = rows.mean(dim=0) + 0.5
    config = RobustConfig(rule="centered_clip", hostile=1, radius=1.0, **PLAIN)
    found = coefficients(exact(torch.cat([rows, last[None]])), uniform(5), config)
    assert close(combined(rows, found) + found.last * last, reference.centered_clip(rows, last, 1.0))
    assert math.isclose(math.fsum(found.weights) + found.last, 1)


def test_clip_shortens_what_is_longer_than_the_median() -> None:
    rows = torch.eye(3) * torch.tensor([1.0, 2.0, 8.0])
    assert coefficients(exact(rows), uniform(3), RobustConfig(rule="clip")).weights == pytest.approx([1 / 3, 1 / 3, 1 / 12])


@pytest.mark.parametrize("rule", ["geometric_median", "centered_clip", "multi_krum", "clip"])
def test_equal_contributions_are_merged_as_they_are_and_zeros_as_zeros(rule: str) -> None:
    rows = torch.ones(7, 6)
    assert close(merged(rows, rule, 2), torch.ones(6))
    assert close(merged(torch.zeros(7, 6), rule, 2), torch.zeros(6))


@settings(max_examples=examples(60), deadline=None)
@given(
    honest=st.integers(5, 9),
    scale=st.sampled_from([1e-6, 1.0, 1e3, 1e15]),
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(["geometric_median", "multi_krum", "median", "trimmed_mean"]),
    alike=st.booleans(),
    more=st.sampled_from([{}, {"equalise": False}, PLAIN]),
)
def test_a_hostile_minority_of_any_length_moves_the_result_at_most_into_the_honest_ball(
    honest: int, scale: float, seed: int, rule: str, alike: bool, more: dict[str, Any]
) -> None:
    """Its distance from the honest mean stays below 6 times their largest distance from it."""
    random = torch.Generator().manual_seed(seed)
    f = (honest - 3) // 2 if rule == "multi_krum" else (honest - 1) // 2
    good = torch.randn(honest, 24, generator=random) + 2
    bad = scale * torch.randn(1 if alike else f, 24, generator=random).expand(f, 24)
    rows = torch.cat([bad, good])
    if rule in ("median", "trimmed_mean"):
        found = by_rank(rows.clone(), f if rule == "trimmed_mean" else (len(rows) - 1) // 2).double()
    else:
        found = merged(rows, rule, f, **more)
    middle = good.mean(dim=0)
    assert (found - middle).norm() <= 6 * (good - middle).norm(dim=1).max()


def test_a_network_sorts_every_number_of_rows_and_their_order_changes_no_bit() -> None:
    for n in range(1, 20):
        rows = torch.randn(n, 50, generator=torch.Generator().manual_seed(n))
        for drop in range((n + 1) // 2):
            found = by_rank(rows.clone(), drop)
            assert torch.allclose(found, rows.sort(dim=0).values[drop : n - drop].mean(dim=0), atol=1e-6)
            assert torch.equal(found, by_rank(rows.flip(0).clone(), drop))


def test_copies_share_one_weight_and_who_repeats_the_last_update_has_none() -> None:
    one, other, third = torch.eye(3, 8)
    last = torch.ones(8)
    rows = torch.stack([one, other, one * 2 + 0.01, third, last + 0.1 * one, last])
    inner = exact(rows)
    assert copies(inner, 5, 4, 1) == ([[0, 2]], [4])
    assert copies(inner, 5, 3, 1) == ([[0, 2]], [])
    weights = shared_prior([0.2] * 5, [[0, 2]], [4])
    assert weights == pytest.approx([1 / 6, 1 / 3, 1 / 6, 1 / 3, 0.0])
    slightly = exact(torch.stack([one, one + 0.3 * other, third, other - third]))
    assert copies(slightly, 4, 0, 1) == ([], []) and copies(slightly, 4, 4, 1) == ([[0, 1]], [])


def test_a_row_too_short_to_be_measured_is_no_copy_of_another() -> None:
    """Its squares are too small for fp32, its products with others are not: the cosine would come out above 1."""
    inner = [[1.0, 1e-23, 0.3, 0.2], [1e-23, 1e-50, 0.0, 0.0], [0.3, 0.0, 1.0, 0.1], [0.2, 0.0, 0.1, 1.0]]
    for outer_step in (0, 9):
        assert copies(inner, 4, outer_step, 1) == ([], [])


def test_chains_of_copies_are_one_group() -> None:
    angles = torch.tensor([0.0, 0.8, 0.4])  # the outer two are copies of the middle one, not of each other
    rows = torch.zeros(8, 8)
    rows[:3, 0], rows[:3, 1] = angles.cos(), angles.sin()
    rows[3:, 3:] = torch.eye(5)
    assert copies(exact(rows), 8, 4, 2) == ([[0, 1, 2]], [])


@pytest.mark.parametrize("reversed_", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_honest_contributions_that_are_all_alike_are_no_copies_whatever_the_others_send(seed: int, reversed_: bool) -> None:
    """As those of norms and biases are, also to the last update; the hostile third sends copies of one, or reverses them."""
    random = torch.Generator().manual_seed(seed)
    direction = torch.randn(40, generator=random)
    honest = direction + 0.2 * torch.randn(6, 40, generator=random)
    hostile = -honest[:3] if reversed_ else honest[:1] + 0.001 * torch.randn(3, 40, generator=random)
    last = direction + 0.2 * torch.randn(1, 40, generator=random)
    groups, replayed = copies(exact(torch.cat([honest, hostile, last])), 9, 9, 3)
    assert groups == ([] if reversed_ else [[0, 6, 7, 8]]) and replayed == []


def test_the_rows_may_come_in_any_order() -> None:
    rows = torch.randn(6, 30, generator=torch.Generator().manual_seed(9))
    wanted = merged(rows, "geometric_median", 2)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        assert torch.allclose(merged(rows[list(order)], "geometric_median", 2), wanted, atol=1e-12)


def pieces(row: Tensor) -> Any:
    return (row[part] for part in parts(row.numel()))


@pytest.mark.parametrize("numel", [1, 7, LANES, LANES + 1, 9 * LANES + 3, PIECE + 5, 2 * PIECE])
def test_the_gram_matrix_is_that_of_the_vectors_with_the_same_bits_from_kernels_and_torch(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(4, numel, generator=torch.Generator().manual_seed(numel))
    with monkeypatch.context() as patch:
        patch.setattr("edit.kernels._compiled", None)
        of_torch = gram([pieces(row) for row in rows], numel)
    assert torch.allclose(torch.tensor(of_torch), rows @ rows.T, rtol=1e-4, atol=1e-4 * numel**0.5)
    load()
    assert gram([pieces(row) for row in rows], numel) == of_torch
