"""HeLoCo against its oracle and against what it promises: tensor by tensor, aligned stays, opposed shrinks, the rest turns."""

import pytest
import torch
from torch import Tensor

from edit.merging.heloco import C_OK, Momentum, correct
from edit.merging.norms import dot, norm
from edit.reference import heloco


def vector(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def at_cosine(reference: Tensor, c: float, seed: int, length: float = 1.0) -> Tensor:
    """A vector of that length and that cosine to `reference`."""
    v = reference / reference.norm()
    across = vector(reference.numel(), seed)
    across = across - (across @ v) * v
    return length * (c * v + (1 - c * c) ** 0.5 * across / across.norm())


def corrected(delta: Tensor, momentum: Tensor, mu: float = 0.9, numels: tuple[int, ...] | None = None) -> Tensor:
    result = delta.clone()
    correct(result, Momentum(momentum, mu, numels or (delta.numel(),)))
    return result


@pytest.mark.parametrize("c", [-1.0, -0.7, -0.1, 0.0, 0.05, 0.19, 0.21, 0.9, 1.0])
@pytest.mark.parametrize("length", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_it_is_the_papers_correction(c: float, length: float, mu: float) -> None:
    momentum = vector(3000, 1)
    delta = at_cosine(momentum, c, 2, length)
    expected = heloco(delta.double(), (1 - mu) * momentum.double()).float()
    assert torch.allclose(corrected(delta, momentum, mu), expected, rtol=1e-4, atol=1e-6 * length)


@pytest.mark.parametrize("c", [C_OK + 1e-3, 0.5, 1.0])
def test_what_is_aligned_passes_to_the_bit(c: float) -> None:
    momentum = vector(500, 1)
    delta = at_cosine(momentum, c, 2)
    assert torch.equal(corrected(delta, momentum), delta)


@pytest.mark.parametrize("c", [-1.0, -0.5, -0.01])
def test_what_is_opposed_is_shrunk_along_the_momentum_only(c: float) -> None:
    momentum = vector(500, 1)
    v, delta = momentum / momentum.norm(), at_cosine(momentum, c, 2)
    result = corrected(delta, momentum)
    assert norm(result) < norm(delta) and dot(delta, v) < dot(result, v) <= 1e-6
    assert torch.allclose(result - (result @ v) * v, delta - (delta @ v) * v, atol=1e-6)


@pytest.mark.parametrize("c", [0.01, 0.1, 0.19])
def test_what_is_between_is_turned_and_as_long_as_before(c: float) -> None:
    momentum = vector(500, 1)
    delta = at_cosine(momentum, c, 2, 3.0)
    result = corrected(delta, momentum)
    assert norm(result) == pytest.approx(3.0, rel=1e-5) and dot(result, momentum) > dot(delta, momentum)


def test_each_tensor_is_compared_with_its_own_momentum() -> None:
    momentum = vector(700, 1)
    aligned, opposed = momentum[:300].clone(), -momentum[300:]
    result = corrected(torch.cat([aligned, opposed]), momentum, numels=(300, 400))
    assert torch.equal(result[:300], aligned)
    assert torch.equal(result[300:], corrected(opposed, momentum[300:])) and not torch.equal(result[300:], opposed)


@pytest.mark.parametrize(
    ("delta", "momentum"),
    [
        (vector(20, 1), torch.zeros(20)),
        (torch.zeros(20), vector(20, 1)),
        (torch.tensor([3e38, -3e38]), torch.tensor([-3e38, -3e38])),
    ],
)
def test_without_a_direction_to_compare_everything_stays(delta: Tensor, momentum: Tensor) -> None:
    assert torch.equal(corrected(delta, momentum), delta)
