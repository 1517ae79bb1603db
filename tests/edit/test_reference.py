"""The oracle itself: small cases worked out by hand, so that it is not merely another copy of the code it checks."""

import math

import pytest
import torch
from torch import Tensor

from edit.reference import Edit, diloco, nesterov, streaming


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


def halve(own: list[Tensor], step: int) -> list[Tensor]:
    return [part / 2 for part in own]


def descend(own: list[Tensor], step: int) -> list[Tensor]:
    return [part - 1 for part in own]


def rest(own: list[Tensor], step: int) -> list[Tensor]:
    return own


def numbers(history: list[list[Tensor]]) -> list[list[float]]:
    return [[part.item() for part in theta] for theta in history]


def test_groups_are_merged_in_turn_each_once_in_h_steps() -> None:
    """One peer and lr 1: a fragment of theta is the local one at its turn."""
    theta = [torch.zeros(1) for _ in range(4)]
    history = numbers(streaming(theta, {"a": descend}, every=4, groups=2, outer_steps=3))
    assert history == [[-2, 0, -2, 0], [-2, -4, -2, -4], [-6, -4, -6, -4]]
    history = numbers(streaming(theta, {"a": descend}, every=4, groups=2, pattern="sequential", outer_steps=3))
    assert history == [[-2, -2, 0, 0], [-2, -2, -4, -4], [-6, -6, -4, -4]]


def test_without_groups_and_delay_it_is_diloco_round_after_round() -> None:
    expected, momentum = torch.tensor([8.0]), torch.zeros(1)
    history = numbers(streaming([expected], {"a": halve, "b": descend}, every=2, outer_steps=3, lr=0.7, mu=0.9))
    for (actual,) in history:
        local = {"a": expected / 4, "b": expected - 2}
        expected, momentum = diloco(expected, momentum, local, lr=0.7, mu=0.9)
        assert actual == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("mix", "alpha", "second"), [("replay", 0.5, -2.0), ("replace", 0.5, -1.5), ("lerp", 0.5, -2.0), ("lerp", 0.25, -1.75)]
)
def test_what_arrives_a_step_late_is_mixed_in_by_hand(mix: str, alpha: float, second: float) -> None:
    """At -2 theta becomes -1; at -3 that arrives: -1 + (-3 + 2), or -1, or -3 and -1 mixed; one step on it is sent again."""
    history = streaming([torch.zeros(1)], {"a": descend}, every=2, outer_steps=2, delay=1, mix=mix, alpha=alpha, lr=0.5)
    assert numbers(history) == [[-1.0], [second]]


def test_a_delay_of_a_whole_interval_arrives_before_the_next_is_sent() -> None:
    history = streaming([torch.zeros(1)], {"a": descend}, every=2, outer_steps=2, delay=2, mix="replace", lr=0.5)
    assert numbers(history) == [[-1.0], [-1.0]], "the second contribution is empty: all progress was replaced"


def test_eager_goes_on_from_the_last_outer_step_with_its_own_share_renewed() -> None:
    """a halves, b rests. theta 8, 6, 5; a sends 4 and then 2, so it goes on from 6 - 2 - (2 - 4) / 2 = 5, to 2.5."""
    peers = {"a": halve, "b": rest}
    eager = streaming([torch.tensor([8.0])], peers, every=1, outer_steps=3, delay=1, mix="eager")
    replay = streaming([torch.tensor([8.0])], peers, every=1, outer_steps=3, delay=1, mix="replay")
    assert numbers(eager) == [[6.0], [5.0], [3.75]] and numbers(replay) == [[6.0], [5.0], [4.0]]


def test_eager_with_momentum_by_hand() -> None:
    """theta 8, 5, 3; sent 4, then 2; goes on from 5 - 3 - 0.75 (2 - 4) = 3.5."""
    history = streaming([torch.tensor([8.0])], {"a": halve}, every=1, outer_steps=3, delay=1, mix="eager", lr=0.5, mu=0.5)
    assert numbers(history) == [[5.0], [3.0], [1.1875]]


@pytest.mark.parametrize("mix", ["replay", "eager"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_alone_with_outer_sgd_1_no_delay_changes_the_training(mix: str, delay: int) -> None:
    history = streaming(
        [torch.tensor([8.0]), torch.tensor([4.0])], {"a": halve}, every=6, groups=2, outer_steps=4, delay=delay, mix=mix
    )
    assert numbers(history) == [[8 / 2**3, 4], [1, 4 / 2**6], [8 / 2**9, 4 / 2**6], [8 / 2**9, 4 / 2**12]]
