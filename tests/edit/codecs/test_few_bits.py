"""Formats of blocks with few bits: as the naive ones in edit.reference; layouts by hand; what no encoder writes is refused."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit import reference
from edit.codecs import PIECE, codec, decode
from edit.codecs.blockwise import pack, row_sums, unpack
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import CodecChoice, CodecSpec
from edit.errors import ConfigError, RemoteProtocolError
from edit.records import EncodedTensor
from tests.support.encoded import LOSSY, elements, encode, whole_shards
from tests.support.exhaustive import examples

NAIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda x: reference.integers(x, 8, 256),
    "int4": lambda x: reference.integers(x, 4, 256),
    "int4:block=64": lambda x: reference.integers(x, 4, 64),
    "e3m0": lambda x: reference.e3m0(x, 256),
    "e3m0:block=128": lambda x: reference.e3m0(x, 128),
    "sign": lambda x: reference.sign(x, 256),
    "stat2": lambda x: reference.stat2(x, 1024, 4),
    "stat2:block=256,range=6": lambda x: reference.stat2(x, 256, 6),
    "topk": lambda x: reference.topk(x, 64),
    "topk:k=7": lambda x: reference.topk(x, 7),
    "topk:k=128": lambda x: reference.topk(x, 128),
    "top1": lambda x: reference.top1(x, 32),
    "top1:of=8": lambda x: reference.top1(x, 8),
    "top1:of=64": lambda x: reference.top1(x, 64),
    "sdd": lambda x: reference.sdd(x, 128, 9),
    "sdd:columns=32,rank=3": lambda x: reference.sdd(x, 32, 3),
}


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("text", NAIVE)
@pytest.mark.parametrize("numel", [1, 5, 300, 4096, 9000])
def test_each_codec_gives_what_the_naive_one_gives(text: str, numel: int) -> None:
    x = normal(numel)
    decoded, naive = decode(encode(text, x)), NAIVE[text](x)
    # An element halfway between two values may go to either.
    assert torch.allclose(decoded, naive, atol=1e-9) or torch.allclose((decoded - x).abs(), (naive - x).abs(), atol=1e-8)


@pytest.mark.parametrize("text", [text for text in NAIVE if text != "int8"])
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_what_is_sent_with_feedback_is_what_the_naive_rule_sends(text: str, decay: float) -> None:
    deltas, sent = [normal(600, seed) for seed in range(5)], []
    feedback = ErrorFeedback(CodecChoice(CodecSpec.parse(text), decay=decay), whole_shards(600))
    for delta in deltas:
        sent.append(decode(feedback.stage(0, delta)))
        feedback.commit(0, delta)
    for ours, naive in zip(sent, reference.feedback(deltas, NAIVE[text], decay), strict=True):
        assert (ours - naive).norm() < 1e-3 * naive.norm()


@pytest.mark.parametrize(
    ("text", "whole", "short"),
    [
        ("int4", 4 + 128, 4 + 3),
        ("int4:block=64", 4 + 32, 4 + 3),
        ("e3m0", 4 + 128, 4 + 3),
        ("stat2", 8 + 256, 8 + 2),
        ("sign", 4 + 32, 4 + 1),
        ("topk", 8 + 96 + 16, 8 + 8 + 2),
        ("topk:k=7", 8 + 11 + 2, 8 + 8 + 2),
        ("topk:k=128", 8 + 192 + 32, 8 + 8 + 2),
        ("top1", 8 + 64 + 16 + 32, 8 + 1 + 1 + 1),
        ("top1:of=4", 8 + 256 + 256, 8 + 1 + 1),
        ("top1:of=128", 8 + 16 + 8 + 4 + 8, 8 + 1 + 1 + 1 + 1),
        ("sdd", 4 + 9 * (2 + 26 + 26), 4 + 2 + 1 + 26),
        ("sdd:columns=1024,rank=3", 4 + 3 * (2 + 26 + 205), 4 + 2 + 1 + 205),
    ],
)
def test_the_size_is_known_from_the_number_of_elements(text: str, whole: int, short: int) -> None:
    known = codec(text)
    numel = 40 * known.granule
    assert known.encoded_size(numel) == 40 * whole and known.encoded_size(numel + 5) == 40 * whole + short
    assert known.encoded_size(0) == 0


@pytest.mark.parametrize(
    ("text", "most"),
    [("topk", 0.25), ("top1", 0.25), ("sdd", 0.25), ("topk:k=128", 0.5), ("sign", 1.13), ("stat2", 2.07), ("int4", 4.13)],
)
def test_bits_per_parameter_of_a_large_fragment(text: str, most: float) -> None:
    assert 8 * codec(text).encoded_size(7_087_872) / 7_087_872 < most


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("numel", [37, 5000])
def test_no_codec_makes_the_error_longer_than_the_vector(text: str, numel: int) -> None:
    """Error feedback converges for these (arXiv 1901.09847, assumption A: a contraction)."""
    x = normal(numel) * torch.logspace(-2, 2, numel)
    assert (decode(encode(text, x)) - x).norm() < x.norm()


@pytest.mark.parametrize("text", ["sign", "stat2", "stat2:range=6", "topk", "top1"])
def test_levels_are_means_so_the_error_is_what_they_leave_of_the_square(text: str) -> None:
    x = normal(4096).double()
    decoded = decode(encode(text, x.float())).double()
    left = (x.float().double() - decoded).square().sum()
    assert math.isclose(left, x.square().sum() - decoded.square().sum(), rel_tol=1e-4)


@given(text=st.sampled_from(LOSSY), seed=st.integers(0, 10**6), numel=st.integers(1, 5000), bad=st.booleans())
@settings(deadline=None, max_examples=examples(150))
def test_decoded_plus_residual_is_the_input(text: str, seed: int, numel: int, bad: bool) -> None:
    """To one rounding of each difference. What is not finite gives a residual that is not, and is never adopted."""
    x = normal(numel, seed)
    if bad:
        x[seed % numel] = math.inf
    feedback = ErrorFeedback(text, whole_shards(numel))
    decoded = decode(feedback.stage(0, x))
    feedback.commit(0, x)
    residual = elements(feedback.residuals()[0])
    assert torch.equal((x - decoded).view(torch.int32), residual.view(torch.int32)) or bad
    assert bool(residual.isfinite().all()) is not bad


# ---- layouts by hand


def test_int4_is_scales_then_two_integers_per_byte_plus_8() -> None:
    x = torch.tensor([7.0, -7.0, 1.0, -3.0, 0.0])
    data = bytes(encode("int4", x).data)
    assert data == torch.tensor([1.0]).numpy().tobytes() + bytes([15 | (8 - 3) << 4, 1 | 8 << 4, 9])


def test_e3m0_is_scales_then_two_codes_per_byte() -> None:
    x = torch.tensor([64.0, -32.0, 1.0, 0.5, 0.49, -47.9, -48.0])
    data = bytes(encode("e3m0", x).data)
    assert data == torch.tensor([64.0]).numpy().tobytes() + bytes([7 | 0 << 4, (8 | 6) | (8 | 6) << 4, 1 | (8 | 7) << 4, 1])
    assert decode(encode("e3m0", x)).tolist() == [64.0, -32.0, 1.0, 1.0, 0.0, -32.0, -64.0]


def test_sign_is_means_then_eight_signs_per_byte() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, 8.0, -9.0])
    data = bytes(encode("sign", x).data)
    # Byte 0 has the elements 0, 2, 4, 6, 8; byte 1 has 1, 3, 5, 7.
    assert data == torch.tensor([5.0]).numpy().tobytes() + bytes([0b10000, 0b0111])


def test_stat2_is_two_levels_then_four_codes_per_byte() -> None:
    x = torch.tensor([1.0, -1.0, 3.0, -5.0])  # sigma 3
    data = bytes(encode("stat2", x).data)
    assert data == torch.tensor([5 / 3, 5.0]).numpy().tobytes() + bytes([0 | 1 << 2 | 0 << 4 | 3 << 6])
    inner = bytes(encode("stat2:range=2", x).data)  # the inner edge at 1.5
    assert inner == torch.tensor([1.0, 4.0]).numpy().tobytes() + bytes([0 | 1 << 2 | 2 << 4 | 3 << 6])


def test_topk_is_levels_then_12_bit_positions_then_codes() -> None:
    x = torch.zeros(4096)
    x[0x123], x[0x456], x[0xFED] = 2.0, -4.0, 6.0
    data = bytes(encode("topk:k=3", x).data)
    positions = bytes([0x23, 0x61, 0x45, 0xED, 0x0F])
    assert data == torch.tensor([3.0, 6.0]).numpy().tobytes() + positions + bytes([0 | 1 << 2 | 2 << 4])
    assert decode(encode("topk:k=3", x)).tolist() == [
        3.0 if i == 0x123 else -3.0 if i == 0x456 else 6.0 if i == 0xFED else 0.0 for i in range(4096)
    ]


def test_top1_is_levels_then_positions_in_parts_of_4_2_and_1_bits_then_codes() -> None:
    x = torch.zeros(4 * 128)
    x[0b1101011], x[128 + 0b0010100], x[256], x[384 + 127] = 2.0, -4.0, 6.0, -1.0
    data = bytes(encode("top1:of=128", x).data)
    levels = torch.tensor([1.5, 5.0]).numpy().tobytes()
    low = bytes([0b1011 | 0 << 4, 0b0100 | 15 << 4])  # of two bytes, byte j has the codes j and j + 2
    middle, high = 0b10 | 0b01 << 2 | 0 << 4 | 0b11 << 6, 1 | 0 << 1 | 0 << 2 | 1 << 3
    assert data == levels + low + bytes([middle, high]) + bytes([0 | 3 << 2 | 2 << 4 | 1 << 6])
    decoded = decode(encode("top1:of=128", x))
    assert {i: float(value) for i, value in enumerate(decoded) if value} == {107: 1.5, 148: -5.0, 256: 5.0, 511: -1.5}


def test_of_equal_magnitudes_top1_sends_the_first_and_of_a_short_group_too() -> None:
    x = torch.ones(70)
    assert positions_of("top1", x) == [0, 32, 64]
    x[5], x[9], x[69] = -2.0, 2.0, 3.0
    assert positions_of("top1", x) == [5, 32, 69]


def positions_of(text: str, x: Tensor) -> list[int]:
    return decode(encode(text, x)).nonzero().flatten().tolist()


def test_of_equal_magnitudes_topk_sends_the_first() -> None:
    x = torch.ones(4096)
    assert positions_of("topk:k=5", x) == [0, 1, 2, 3, 4]
    x[100], x[4000], x[7] = 2.0, -2.0, 0.5
    assert positions_of("topk:k=4", x) == [0, 1, 100, 4000]
    assert positions_of("topk:k=9", x) == [0, 1, 2, 3, 4, 5, 6, 100, 4000]
    both = torch.cat([x, torch.arange(4096.0)])  # a row with many equal ones beside one without
    assert positions_of("topk:k=4", both) == [0, 1, 100, 4000, *range(8188, 8192)]


def test_topk_sends_all_of_a_short_chunk() -> None:
    x = torch.cat([torch.zeros(4096), torch.tensor([1.0, -1.0, 3.0])])
    assert decode(encode("topk", x))[4096:].tolist() == [1.0, -1.0, 3.0]


def test_sdd_is_a_step_then_numbers_then_five_values_of_three_per_byte() -> None:
    x = torch.zeros(2 * 32)
    x[3], x[32 + 3], x[32 + 9] = 4.0, -4.0, -4.0
    data = bytes(encode("sdd:columns=32,rank=1", x).data)
    # The second row is the larger one; what lies along its signs in the first is below three quarters of their mean.
    step, d = np.float32(2.0**-10).tobytes(), np.int16(4096).tobytes()
    assert data == step + d + bytes([3]) + bytes([0, 0, 3 * 2, 2, 0, 0, 0])  # of w bytes, byte j has the values j, j + w, ...
    decoded = decode(encode("sdd:columns=32,rank=1", x))
    assert {i: float(value) for i, value in enumerate(decoded) if value} == {32 + 3: -4.0, 32 + 9: -4.0}


@pytest.mark.parametrize("rank", [1, 3])
def test_sdd_finds_the_terms_that_there_are(rank: int) -> None:
    """Of rows that are multiples of one another, or of vectors that do not overlap, nothing is left."""
    x = torch.zeros(64, 128)
    for k in range(rank):
        x[20 * k : 20 * k + 7, 30 * k : 30 * k + 25] = 0.5**k * (-1) ** k
    assert torch.equal(decode(encode(f"sdd:rank={rank}", x.flatten())), x.flatten())


# ---- what no encoder writes


def damaged(text: str, x: Tensor) -> Iterator[tuple[str, bytes]]:
    """Bytes of the right length that the decoder must refuse."""
    data, size = bytearray(encode(text, x).data), x.numel()
    match text:
        case "topk:k=3":
            for name, positions in (
                ("twice", (5, 5, 9)),
                ("descending", (5, 9, 7)),
                ("first two", (9, 5, 10)),
                ("outside", (5, 9, size)),
            ):
                a, b, c = positions
                yield (
                    name,
                    bytes(data[:8]) + bytes([a & 255, a >> 8 | (b & 15) << 4, b >> 4, c & 255, c >> 8]) + bytes(data[13:]),
                )
            yield "position's padding", bytes(data[:12]) + bytes([data[12] | 0x10]) + bytes(data[13:])
            yield "code's padding", bytes(data[:13]) + bytes([data[13] | 0x40])
        case "top1:of=8":  # two groups, of 8 and of 3
            yield "outside", bytes([*data[:8], data[8] & 3 | 3 << 2, data[9] & 1, data[10]])
            yield "outside by its highest bit", bytes([*data[:9], data[9] | 2, data[10]])
            yield "position's padding", bytes([*data[:9], data[9] | 4, data[10]])
            yield "code's padding", bytes([*data[:10], data[10] | 0x10])
        case "sdd:columns=32":  # one block of one row: its step, d, one byte of x, seven of y for 32 of 35 values
            for name, step in (("no power of two", 3.0), ("below 0", -1.0), ("infinite", math.inf)):
                yield name, np.float32(step).tobytes() + bytes(data[4:])
            yield "x above 242", bytes([*data[:6], 243, *data[7:]])
            yield "y above 242", bytes([*data[:13], 255])
            yield "an unused x", bytes([*data[:6], data[6] + 3, *data[7:]])
            yield "an unused y", bytes([*data[:13], 81 * 1])
        case _:
            bits = {"int4": 4, "e3m0": 4, "stat2": 2, "sign": 1}[text]
            yield "padding", bytes(data[:-1]) + bytes([data[-1] | 1 << (8 - bits)])


@pytest.mark.parametrize("text", ["int4", "e3m0", "stat2", "sign", "topk:k=3", "top1:of=8", "sdd:columns=32"])
@pytest.mark.parametrize("before", [0, 4096])
def test_bytes_that_no_encoder_writes_are_the_senders_fault(text: str, before: int) -> None:
    x = normal(11)
    clean = bytes(encode(text, normal(before)).data) if before else b""
    assert len(clean) == codec(text).encoded_size(before)
    for what, data in damaged(text, x):
        with pytest.raises(
            RemoteProtocolError, match=r"padding bits are not zero|outside|power of two|five values|unused values"
        ):
            decode(EncodedTensor(text, 11, data)), what
        with pytest.raises(RemoteProtocolError):
            codec(text).decode_add(EncodedTensor(text, 11, data), torch.zeros(11), 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("text", ["sign", "stat2", "topk", "top1"])
def test_a_sum_beyond_fp32_is_nan_throughout_its_block_with_fixed_bytes(text: str, bad: float) -> None:
    x = normal(3 * 4096)
    x[4096:8192] = bad
    data = bytes(encode(text, x).data)
    assert data == bytes(encode(text, x.clone()).data)
    decoded = decode(EncodedTensor(text, x.numel(), data))
    assert bool(decoded[4096:8192].isnan().all())
    assert bool(decoded[:4096].isfinite().all()) and bool(decoded[8192:].isfinite().all())
    levels = np.frombuffer(data, dtype="<u4", count=4)
    assert not any(int(level) >= 0xFF800000 for level in levels), "NaN has one sign, whatever the CPU makes"


@pytest.mark.parametrize("text", LOSSY)
def test_zeros_and_tiny_numbers_decode_to_something_finite_and_tiny(text: str) -> None:
    for value in (0.0, -0.0, 1e-40, -1e-31):
        decoded = decode(encode(text, torch.full((5000,), value)))
        assert bool((decoded.abs() <= abs(value) * 1.01).all())


# ---- the same bits everywhere


@pytest.mark.parametrize("text", LOSSY)
def test_a_block_has_the_same_bytes_wherever_it_stands(text: str) -> None:
    known = codec(text)
    if (block := known.granule) == 1:
        block = 256
    x = normal(PIECE + 3 * block)
    whole = decode(encode(text, x))
    for start in (0, block, PIECE - block, PIECE, PIECE + 2 * block):
        alone = decode(encode(text, x[start : start + block]))
        assert torch.equal(alone.view(torch.int32), whole[start : start + block].view(torch.int32))


@given(rows=st.integers(1, 5), numel=st.integers(1, 300), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=examples(60))
def test_row_sums_add_halves_in_a_fixed_order(rows: int, numel: int, seed: int) -> None:
    x = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))

    def by_halves(values: list[np.float32]) -> np.float32:
        while len(values) > 1:
            half = (len(values) + 1) // 2
            values = [values[i] + values[i + half] if i + half < len(values) else values[i] for i in range(half)]
        return values[0]

    assert row_sums(x).tolist() == [float(by_halves(list(row))) for row in x.numpy()]


@given(bits=st.sampled_from([1, 2, 4]), numel=st.integers(1, 70), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=examples(100))
def test_packed_codes_come_back(bits: int, numel: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, numel), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = torch.empty(3, -(-numel * bits // 8), dtype=torch.uint8)
    pack(codes, bits, packed)
    assert torch.equal(unpack(packed, bits, numel), codes)


# ---- options


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int4:block=96", "block must be a power of two"),
        ("int4:block=32", "block must be between 64 and 16384"),
        ("sign:block=32768", "block must be between 64 and 16384"),
        ("stat2:range=0.5", "range must be between 1 and 12"),
        ("stat2:block=64.0", "block must be a whole number"),
        ("topk:k=0", "k must be between 1 and 2048"),
        ("topk:k=1.5", "k must be a whole number"),
        ("topk:chunk=64", "there is no option 'chunk'; topk has k"),
        ("int8:block=64", "there is no option 'block'; int8 has none"),
        ("top1:of=48", "of must be a power of two"),
        ("top1:of=256", "of must be between 4 and 128"),
        ("sdd:columns=96", "columns must be a power of two"),
        ("sdd:rank=65", "rank must be between 1 and 64"),
    ],
)
def test_a_wrong_option_is_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        codec(text)
    with pytest.raises(ConfigError, match=reason):
        CodecSpec.parse(text).values()
