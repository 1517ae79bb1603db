"""Masks: golden values, seeking, uniformity, lanes, boxes."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.trust.masks import BITS, add_mask, as_words, lanes_of, open_box, pair_key, public_key, seal, shared_secret, signed

KEY = bytes(range(32))


def mask(bits: int, start: int, count: int, fragment_id: int = 3) -> list[int]:
    words = as_words(np.zeros(count, np.int64), bits)
    add_mask(words, KEY, fragment_id, start)
    return words.tolist()


def test_the_golden_words_of_the_generator() -> None:
    assert mask(16, 5, 8) == [6326, 22680, 39723, 64802, 7827, 60323, 52137, 18088]
    assert mask(32, 0, 4) == [2302590316, 1604478007, 414600815, 2603309208]


def test_the_golden_key_of_a_pair() -> None:
    one, other = b"\x01" * 32, b"\x02" * 32
    roster_hash = hashlib.sha256(b"roster").digest()
    golden = "15b072b87b6e58ae476ff05949bcf3e8725235a9702dd0263d40ffdcb7d474c3"
    assert pair_key(shared_secret(one, public_key(other)), roster_hash, 0, 1).hex() == golden
    assert pair_key(shared_secret(other, public_key(one)), roster_hash, 1, 0).hex() == golden


def test_a_public_key_of_small_order_is_refused() -> None:
    with pytest.raises(ValueError):
        shared_secret(KEY, bytes(32))


@given(st.sampled_from(BITS), st.lists(st.integers(0, 90), max_size=4))
def test_any_split_of_a_fragment_is_masked_alike(bits: int, cuts: list[int]) -> None:
    whole = mask(bits, 0, 90)
    ends = [0, *sorted(cuts), 90]
    parts = [mask(bits, start, end - start) for start, end in itertools.pairwise(ends)]
    assert [word for part in parts for word in part] == whole


def test_a_long_run_is_masked_in_pieces_as_a_short_one() -> None:
    size = (1 << 20) + 24  # of bytes: more than a piece
    assert mask(8, size - 40, 30) == mask(8, 0, size)[-40:-10]


def test_fragments_have_masks_of_their_own() -> None:
    assert mask(16, 0, 8, fragment_id=0) != mask(16, 0, 8, fragment_id=1)


def test_masked_zeros_are_uniform() -> None:
    counts = np.bincount(mask(8, 0, 1 << 18), minlength=256)
    expected = (1 << 18) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 169 < chi_squared < 361  # 255 degrees of freedom: the quantiles 1e-5 and 1 - 1e-5


@given(st.sampled_from(BITS), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.integers(0, 40))
def test_lanes_are_the_sums_over_the_positions_modulo_8(bits: int, values: list[int], cut: int) -> None:
    words = as_words(np.array(values), bits)
    expected = [sum(values[lane::8]) % (1 << bits) for lane in range(8)]
    assert lanes_of(words).tolist() == expected
    cut = min(cut, len(values))
    assert (lanes_of(words[:cut]) + lanes_of(words[cut:], cut)).tolist() == expected


@given(st.sampled_from(BITS), st.data())
def test_words_are_integers_modulo_2_to_the_bits(bits: int, data: st.DataObject) -> None:
    half = 1 << (bits - 1)
    values = data.draw(st.lists(st.integers(-half, half - 1), min_size=1, max_size=9))
    assert signed(as_words(np.array(values), bits)).tolist() == values


def test_a_box_opens_under_its_key_and_context_only() -> None:
    box = seal(KEY, b"shares", b"context")
    assert open_box(KEY, box, b"context") == b"shares"
    for key, found, context in [
        (bytes(32), box, b"context"),
        (KEY, box, b"other"),
        (KEY, box[:-1] + b"x", b"context"),
        (KEY, b"", b"context"),
    ]:
        with pytest.raises(ValueError):
            open_box(key, found, context)


@pytest.mark.parametrize(
    ("dtype", "start", "fragment_id"), [("<u8", 0, 0), ("<i2", 0, 0), ("<u2", -1, 0), ("<u2", 0, -1), ("<u2", 0, 1 << 64)]
)
def test_what_cannot_be_masked_is_refused(dtype: str, start: int, fragment_id: int) -> None:
    with pytest.raises(ValueError):
        add_mask(np.zeros(3, dtype), random.Random(0).randbytes(32), fragment_id, start)
