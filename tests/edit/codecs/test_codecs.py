"""Codecs: error bounds, exact sizes, determinism; what is not finite stays visible; no bytes crash a decoder."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit.codecs import PIECE, codec, decode
from edit.codecs.base import parts
from edit.codecs.int8 import BLOCK
from edit.config.codec import CodecSpec
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.records import EncodedTensor
from tests.support.encoded import SPECS, encode
from tests.support.exhaustive import examples

NAMES = st.sampled_from(SPECS)
BROKEN = st.sampled_from([math.nan, math.inf, -math.inf])
_FINITE = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
VECTORS = st.lists(_FINITE, min_size=1, max_size=3 * BLOCK + 7).map(lambda values: torch.tensor(values, dtype=torch.float32))


def bound(name: str, flat: Tensor) -> Tensor:
    """The largest error that each element may have, as the codec's module states it."""
    kind, options = name.partition(":")[0], CodecSpec.parse(name).values()
    if kind in RELATIVE:
        return flat.abs() * RELATIVE[kind] + (2.0**-24 if kind == "fp16" else 0.0)
    return torch.cat([_bound_of_block(kind, options, block.abs()) for block in flat.split(codec(name).granule)]) * (1 + 1e-4)


RELATIVE = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}


def _bound_of_block(kind: str, options: dict[str, int | float], magnitudes: Tensor) -> Tensor:
    largest = magnitudes.max()
    match kind:
        case "int8":
            return (largest / 127 / 2).expand_as(magnitudes) + 2.0**-100
        case "int4":
            return (largest / 7 / 2).expand_as(magnitudes) + 2.0**-100
        case "e3m0":
            return torch.maximum(magnitudes / 3, largest / 128) + 2.0**-100
        case "sign":
            return torch.maximum(magnitudes.mean(), largest - magnitudes.mean()).expand_as(magnitudes)
        case "stat2":
            edge = magnitudes.square().mean().sqrt() * options["range"] / 4
            return torch.maximum(edge, largest - edge).expand_as(magnitudes)
        case "sdd":  # of all elements together, and so of each
            most = magnitudes.double().norm() + largest * 2.0**-13 * math.sqrt(magnitudes.numel())
            return most.float().expand_as(magnitudes) + 2.0**-100
        case "top1":
            of = int(options["of"])
            most = torch.cat([group.max().expand_as(group) for group in magnitudes.split(of)])  # of those not sent, too
            return torch.maximum(most, largest - most[::of].min())
    sent = magnitudes.topk(min(int(options["k"]), magnitudes.numel())).values
    return torch.minimum(torch.maximum(magnitudes, largest - sent[-1]), torch.maximum(sent[-1], largest - sent[-1]))


def awkward(numel: int, seed: int = 0) -> Tensor:
    """Magnitudes from 1e-4 to 1e4, block by block, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (8 * torch.rand(-(-numel // 100), generator=generator) - 4)
    flat = torch.randn(numel, generator=generator) * scale.repeat_interleave(100)[:numel]
    return flat.clamp(-6e4, 6e4).masked_fill(torch.rand(numel, generator=generator) < 0.05, 0.0)


@given(name=NAMES, flat=VECTORS)
@settings(deadline=None, max_examples=examples(200))
def test_the_round_trip_error_is_within_the_stated_bound(name: str, flat: Tensor) -> None:
    encoded = encode(name, flat)
    assert memoryview(encoded.data).nbytes == codec(name).encoded_size(flat.numel())
    decoded = decode(encoded)
    assert decoded.dtype == torch.float32 and decoded.shape == flat.shape
    assert bool(((decoded - flat).abs() <= bound(name, flat)).all())


@pytest.mark.covering
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "numel", [1, 2, 3, 255, 256, 257, 1023, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 300]
)
def test_every_length_around_blocks_and_pieces(name: str, numel: int) -> None:
    flat = awkward(numel)
    encoded = encode(name, flat)
    decoded = decode(encoded)
    assert bool(((decoded - flat).abs() <= bound(name, flat)).all())
    out = torch.ones(numel)
    codec(name).decode_add(encoded, out, 0.3)
    assert torch.equal(out, torch.ones(numel).add_(decoded.mul_(0.3)))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", [1, 257, PIECE, 2 * PIECE + 300])
def test_encoded_part_by_part_it_is_the_same_and_each_part_can_be_decoded_at_once(name: str, numel: int) -> None:
    flat, whole = awkward(numel), encode(name, awkward(numel))
    data, decoded = memoryview(bytearray(codec(name).encoded_size(numel))), decode(whole)
    pieces = codec(name).pieces(data, numel)
    for part in parts(numel):
        codec(name).encode_part(flat[part], data, numel, part.start)
        assert torch.equal(next(pieces), decoded[part])
    assert bytes(data) == bytes(whole.data)


@pytest.mark.parametrize("name", SPECS)
def test_equal_input_gives_equal_bytes_whatever_the_memory_held_before(name: str) -> None:
    flat = awkward(2 * PIECE + 300)
    first = bytes(encode(name, flat).data)
    torch.full((3 * PIECE,), 7.0)  # dirties what the allocator hands out next
    assert bytes(encode(name, flat.clone()).data) == first
    assert torch.equal(flat, awkward(2 * PIECE + 300))


@pytest.mark.parametrize("name", SPECS)
def test_read_only_bytes_a_view_into_a_message_and_writable_bytes_decode_alike(name: str) -> None:
    flat = awkward(PIECE + 300)
    data = bytes(encode(name, flat).data)
    expected = decode(EncodedTensor(name, flat.numel(), bytearray(data)))
    message = memoryview(b"xyz" + data + b"end")[3:-3]
    for form in (data, message, memoryview(bytearray(message))):
        assert torch.equal(decode(EncodedTensor(name, flat.numel(), form)), expected)


def test_fp32_is_the_bytes_of_the_vector() -> None:
    assert bytes(encode("fp32", torch.tensor([1.0, -2.0])).data) == bytes.fromhex("0000803f000000c0")


def test_int8_layout_is_scales_then_values() -> None:
    flat = torch.zeros(BLOCK + 2)
    flat[0], flat[1], flat[BLOCK], flat[BLOCK + 1] = 127.0, -63.0, 254.0, -2.0
    data = bytes(encode("int8", flat).data)
    assert data[:8] == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert data[8:10] == bytes([127, 256 - 63]) and data[-2:] == bytes([127, 255])


@given(name=NAMES, flat=VECTORS, value=BROKEN, where=st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(200))
def test_t2_a_broken_element_never_decodes_to_something_finite(name: str, flat: Tensor, value: float, where: int) -> None:
    position = where % flat.numel()
    flat[position] = value
    decoded = decode(encode(name, flat))
    assert not math.isfinite(decoded[position].item())
    block = codec(name).granule
    start = position // block * block
    outside = torch.cat([decoded[:start], decoded[start + block :]])
    assert bool(outside.isfinite().all()), "only the broken element's block is lost"


def test_int8_with_a_broken_element_gives_the_same_bytes_each_time() -> None:
    flat = awkward(PIECE + 300)
    flat[PIECE + 280] = math.nan
    flat[5] = -math.inf
    assert bytes(encode("int8", flat).data) == bytes(encode("int8", flat).data)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-40])
def test_int8_bytes_of_a_broken_or_tiny_block_are_fixed_not_left_to_the_cpus_conversion(value: float) -> None:
    flat = torch.full((BLOCK,), value)
    data = bytes(encode("int8", flat).data)
    assert data[4:] == bytes(BLOCK)
    scale = torch.frombuffer(bytearray(data[:4]), dtype=torch.float32).item()
    assert scale == 0.0 if value == 1e-40 else math.isnan(scale)


def test_fp16_overflow_is_inf_and_int8_takes_the_whole_range_of_fp32() -> None:
    assert decode(encode("fp16", torch.tensor([1e5]))).item() == math.inf
    huge = decode(encode("int8", torch.tensor([3e38, -3e38])))
    assert torch.allclose(huge, torch.tensor([3e38, -3e38]))


def test_int8_flushes_a_tiny_block_to_zero() -> None:
    assert decode(encode("int8", torch.tensor([1e-40, -1e-31]))).tolist() == [0.0, 0.0]


def is_refused_by_content(error: RemoteProtocolError) -> bool:
    """Whether bytes of the right length are not what any encoder writes."""
    reasons = (
        "padding bits are not zero",
        "do not ascend, or are outside",
        "elements is outside",
        "not five values of three",
        "unused values are not zero",
        "not a power of two",
    )
    return any(reason in str(error) for reason in reasons)


@given(name=NAMES, data=st.binary(max_size=600), numel=st.integers(-2, 600))
@settings(deadline=None, max_examples=examples(300))
def test_arbitrary_bytes_give_a_tensor_or_a_remote_error(name: str, data: bytes, numel: int) -> None:
    try:
        decoded = decode(EncodedTensor(name, numel, data))
    except RemoteProtocolError as error:
        assert numel < 0 or len(data) != codec(name).encoded_size(numel) or is_refused_by_content(error)
        return
    assert decoded.shape == (numel,) and decoded.dtype == torch.float32


@given(name=NAMES, numel=st.integers(1, 600), seed=st.binary(min_size=1, max_size=8))
@settings(deadline=None, max_examples=examples(150))
def test_any_bytes_of_the_right_length_decode(name: str, numel: int, seed: bytes) -> None:
    size = codec(name).encoded_size(numel)
    data = (seed * size)[:size]
    try:
        assert decode(EncodedTensor(name, numel, data)).shape == (numel,)
    except RemoteProtocolError as error:
        assert is_refused_by_content(error)
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(RemoteProtocolError, match=f"cannot be {numel} elements in {name}"):
            decode(EncodedTensor(name, numel, wrong))
        with pytest.raises(RemoteProtocolError):
            codec(name).decode_add(EncodedTensor(name, numel, wrong), torch.zeros(numel), 1.0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("flat", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)])
def test_what_is_not_a_flat_fp32_vector_is_the_callers_bug(name: str, flat: Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="flat fp32"):
        encode(name, flat)


@pytest.mark.parametrize("name", SPECS)
def test_a_strided_vector_with_history_is_encoded_by_its_values(name: str) -> None:
    flat = awkward(600).requires_grad_(True)
    assert bytes(encode(name, flat[::2]).data) == bytes(encode(name, flat.detach()[::2].clone()).data)


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(RemoteProtocolError, match=r"unknown codec 'int3'; known: fp32, bf16, fp16, int8"):
        codec("int3")
