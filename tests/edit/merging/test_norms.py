"""Norms and inner products add in the order that their module says, to the bit; whole_norm's tests are in test_merge.py."""

import math

import numpy as np
import pytest
import torch

from edit.codecs import PIECE, decode
from edit.merging.norms import difference_norm, dot, norm, norm_of_encoded
from tests.support.encoded import SPECS, encode


def naive_sum(products: np.ndarray) -> float:
    """The order of the module's docstring, element by element of the lanes."""
    lanes = np.zeros(max(1, min(PIECE, len(products))), np.float32)
    for start in range(0, len(products), PIECE):
        piece = products[start : start + PIECE]
        lanes[: len(piece)] = lanes[: len(piece)] + piece
    row = lanes.tolist()
    while len(row) > 1:
        half = (len(row) + 1) // 2
        row = [float(np.float32(a) + np.float32(b)) for a, b in zip(row, row[half:], strict=False)] + row[
            len(row) - half : half
        ]
    return row[0]


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 1000, 1024, 4097, PIECE, PIECE + 5, 2 * PIECE + 4711])
def test_all_additions_have_the_documented_order(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    a, b = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    assert dot(a, b) == naive_sum(a.numpy() * b.numpy())
    assert norm(a) == math.sqrt(naive_sum(a.numpy() * a.numpy()))
    assert norm_of_encoded(encode("fp32", a)) == norm(a)


@pytest.mark.parametrize("name", SPECS)
def test_an_encoded_vector_has_the_norm_of_what_is_decoded_and_stays(name: str) -> None:
    encoded = encode(name, torch.randn(PIECE + 4711, generator=torch.Generator().manual_seed(3)))
    before = bytes(encoded.data)
    assert norm_of_encoded(encoded) == norm(decode(encoded))
    assert bytes(encoded.data) == before


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", [1, PIECE, 2 * PIECE + 4711])
def test_two_encoded_vectors_are_as_far_apart_as_their_difference_is_long(name: str, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    one, other = (encode(name, torch.randn(numel, generator=generator)) for _ in range(2))
    before = bytes(one.data), bytes(other.data)
    assert difference_norm(one, other) == difference_norm(other, one) == norm(decode(one) - decode(other))
    assert difference_norm(one, one) == 0.0 and (bytes(one.data), bytes(other.data)) == before


@pytest.mark.parametrize("numel", [10, 3 * PIECE + 17])
def test_rounding_stays_small_however_long_the_vector(numel: int) -> None:
    a = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    assert norm(a) == pytest.approx(math.sqrt(float(a.double().square().sum())), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e19])
def test_a_broken_element_or_a_sum_beyond_fp32_is_not_finite(value: float) -> None:
    a = torch.zeros(PIECE + 3)
    a[-1] = value
    assert not math.isfinite(norm(a))
