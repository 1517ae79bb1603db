"""The oracle itself: small cases worked out by hand, so that it is not merely another copy of the code it checks."""

import math

import pytest
import torch

from edit.reference import Edit, diloco, nesterov


def test_nesterov_by_hand() -> None:
    theta, momentum = torch.tensor([1.0]), torch.tensor([0.0])
    theta, momentum = nesterov(theta, momentum, torch.tensor([0.5]), lr=0.5, mu=0.5)
    assert (theta.item(), momentum.item()) == (1 - 0.5 * (0.5 + 0.25), 0.5)
    theta, momentum = nesterov(theta, momentum, torch.tensor([0.0]), lr=0.5, mu=0.5)
    assert (theta.item(), momentum.item()) == (0.625 - 0.5 * 0.125, 0.25)


def test_diloco_with_lr_one_and_no_momentum_is_the_mean_of_the_peers() -> None:
    local = {"b": torch.tensor([1.0, 3.0]), "a": torch.tensor([3.0, 5.0])}
    theta, _ = diloco(torch.tensor([4.0, 4.0]), torch.zeros(2), local, lr=1.0, mu=0.0)
    assert theta.tolist() == [2.0, 4.0]


def test_edit_weighs_by_the_exponential_of_minus_the_norm() -> None:
    edit = Edit(theta=torch.zeros(1), lr=1.0, mu=0.0)
    weights = edit.round({"slow": torch.tensor([1.0]), "fast": torch.tensor([3.0])})
    assert weights["slow"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert edit.theta.item() == pytest.approx(weights["slow"] * 1.0 + weights["fast"] * 3.0)


def test_edit_clips_the_merged_norm() -> None:
    edit = Edit(theta=torch.zeros(2), lr=1.0, mu=0.0, clip=1.0)
    edit.round({"a": torch.tensor([30.0, 40.0])})
    assert edit.theta.tolist() == pytest.approx([0.6, 0.8])


def test_edit_rolls_back_when_all_are_bad_and_keeps_the_momentum() -> None:
    edit = Edit(theta=torch.ones(2))
    edit.round({"a": torch.tensor([0.5, 0.5])})
    theta, momentum = edit.theta.clone(), edit.momentum.clone()
    assert edit.round({"a": torch.tensor([math.nan, 0.0])}) == {"a": 0.0}
    assert torch.equal(edit.theta, theta) and torch.equal(edit.momentum, momentum)


def test_edit_flags_an_outlier_after_its_observations_and_forgets_it() -> None:
    edit = Edit(theta=torch.zeros(1), lr=1e-9, mu=0.0)
    for _ in range(10):
        assert edit.round({"a": edit.theta - 1.0})["a"] == 1.0
    for _ in range(3):
        assert edit.round({"a": edit.theta - 1.2})["a"] == 0.0
    assert edit.round({"a": edit.theta - 1.0})["a"] == 1.0
