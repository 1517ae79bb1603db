"""Vectors on a GPU: the bytes and elements of the CPU's, and one copy at the end, before which no value is read."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edit.codecs import base, blockwise, codec, topk
from edit.codecs.base import PIECE, parts
from edit.config.codec import CodecSpec
from edit.errors import LocalProtocolError
from edit.records import EncodedTensor
from tests.support.cuda_arithmetic import CudaArithmetic
from tests.support.encoded import LOSSY, SPECS, encode
from tests.support.layouts import fragment

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
CUDA = torch.device("cuda")


def special(numel: int) -> Tensor:
    """What `finite` has; Inf, and NaNs of several bits: more of them than a sparse codec sends of a chunk."""
    flat, where = finite(numel), torch.arange(6) * numel // 7
    flat[where[:2]] = torch.tensor([math.inf, -math.inf])
    flat.view(torch.int32)[where[2:]] = torch.tensor([-1, 0x7F800001, 0x7FC00000, -0x400000], dtype=torch.int32)
    some = numel // 2 + torch.arange(numel // 20)
    flat.view(torch.int32)[some] = 0x7FC00000 + some.to(torch.int32)
    return flat


def finite(numel: int) -> Tensor:
    """Every magnitude of fp32, subnormals and both zeros, halfway values, more of one largest magnitude than is sent."""
    generator = torch.Generator().manual_seed(numel)
    exponents = torch.randint(-149, 127, (-(-numel // 200),), generator=generator).repeat_interleave(200)[:numel]
    flat = torch.ldexp(torch.randn(numel, generator=generator), exponents)
    some = torch.randint(numel, (numel // 4 + 1,), generator=generator)
    flat[some] = flat[some].sign() * 0.5 * flat[some[0]]
    flat[torch.randint(numel, (numel // 9 + 1,), generator=generator)] = -0.0
    flat[numel // 3 :: 5] = flat.abs().max() * torch.where(torch.rand(numel, generator=generator)[numel // 3 :: 5] < 0.5, 1, -1)
    return flat


VECTORS = [pytest.param(make, numel, id=f"{make.__name__}-{numel}") for make in (special, finite) for numel in (1, 300, 9001)]


def encode_parts(name: str, flat: Tensor, data: Tensor) -> None:
    for part in parts(flat.numel(), flat.device):
        codec(name).encode_part(flat[part], data, flat.numel(), part.start)


def encode_as_cuda_does(name: str, flat: Tensor, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for module in (base, blockwise, topk):
        monkeypatch.setattr(module, "on_cpu", lambda tensor: False)
    data = torch.empty(codec(name).encoded_size(flat.numel()), dtype=torch.uint8)
    with CudaArithmetic():
        encode_parts(name, flat, data)
    return data.numpy().tobytes()


def assert_equal_but_for_the_bits_of_nans(name: str, numel: int, ours: bytes, theirs: bytes) -> None:
    """For bf16 and fp16, of which NaN they make depends on the device, and on the CPU's instructions."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(CodecSpec.parse(name).name)
    if kind is None:
        assert ours == theirs
        return
    ours_, theirs_ = (torch.frombuffer(bytearray(data), dtype=torch.int16) for data in (ours, theirs))
    same_nan = ours_.view(kind).isnan() & theirs_.view(kind).isnan()
    assert bool((same_nan | (ours_ == theirs_)).all())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("make", "numel"), VECTORS)
def test_the_bytes_do_not_depend_on_how_cuda_computes(
    name: str, make: Callable[[int], Tensor], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = make(numel)
    expected = bytes(encode(name, flat).data)
    assert_equal_but_for_the_bits_of_nans(name, numel, encode_as_cuda_does(name, flat, monkeypatch), expected)


@pytest.mark.parametrize("name", [name for name in LOSSY if CodecSpec.parse(name).name not in ("bf16", "fp16")])
def test_decoding_does_not_depend_on_how_cuda_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(name, special(9001))
    expected = codec(name).decode(encoded)
    monkeypatch.setattr(blockwise, "on_cpu", lambda tensor: False)
    with CudaArithmetic(reads=True):
        decoded = codec(name).decode(encoded)
    assert torch.equal(decoded.isnan(), expected.isnan()) and bool(expected.isnan().any())
    assert torch.equal(decoded.nan_to_num(0.0).view(torch.int32), expected.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", [0, 5, 300, 4096, PIECE + 4097])
def test_encoding_on_a_device_reads_no_value_before_the_copy(name: str, numel: int) -> None:
    """The meta device has none to read."""
    data = torch.empty(codec(name).encoded_size(numel), dtype=torch.uint8, device="meta")
    encode_parts(name, torch.empty(numel, device="meta"), data)


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("topk")])
def test_decoding_whole_blocks_on_a_device_reads_no_value_either(name: str) -> None:
    """A short last block may have bits left over, and top-k's positions may not ascend: these are looked at."""
    numel = (1 << 23) + 4096
    data = torch.empty(codec(name).encoded_size(numel), dtype=torch.uint8, device="meta")
    pieces = [(piece.numel(), piece.dtype, piece.device.type) for piece in codec(name).pieces(data, numel)]
    assert pieces == [(1 << 23, torch.float32, "meta"), (4096, torch.float32, "meta")]


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"on the CPU or CUDA, not .* on meta"):
        codec("int8").encode(torch.empty(3, device="meta"), fragment((3,)))


# ---- on CUDA

SIZES = [0, 1, 300, 4096, 3 * PIECE + 300, (1 << 23) + 5000]


@needs_cuda
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", SIZES)
def test_a_vector_on_cuda_gives_the_bytes_of_the_same_on_the_cpu(name: str, numel: int) -> None:
    for make in (special, finite) if numel else (torch.empty,):
        flat = make(numel)
        encoded = encode(name, flat.to(CUDA))
        assert_equal_but_for_the_bits_of_nans(name, numel, bytes(encoded.data), bytes(encode(name, flat).data))


@needs_cuda
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("form", [bytes, bytearray])
def test_decoding_on_cuda_gives_the_elements_of_the_cpus(name: str, numel: int, form: type) -> None:
    flat = special(numel) if numel else torch.empty(0)
    encoded = EncodedTensor(name, numel, form(encode(name, flat).data))
    expected, decoded = codec(name).decode(encoded), codec(name).decode(encoded, CUDA)
    assert decoded.is_cuda
    out = torch.ones(numel, device=CUDA)
    codec(name).decode_add(encoded, out, 0.3)
    added = torch.ones(numel)
    codec(name).decode_add(encoded, added, 0.3)
    for ours, theirs in ((decoded.cpu(), expected), (out.cpu(), added)):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(0.0).view(torch.int32), theirs.nan_to_num(0.0).view(torch.int32))
