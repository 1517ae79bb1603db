"""Vectors on a GPU: the bytes and elements of the CPU's, and one copy at the end, before which no value is read.

Tested without a GPU; `test_cuda.py` needs one.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edit.codecs import base, blockwise, codec, top1, topk
from edit.codecs.base import PIECE, parts
from edit.config.codec import CodecSpec
from edit.errors import LocalProtocolError
from tests.support.cuda_arithmetic import CudaArithmetic
from tests.support.encoded import LOSSY, SPECS, assert_equal_but_for_the_bits_of_nans, encode, finite, special
from tests.support.layouts import fragment

VECTORS = [pytest.param(make, numel, id=f"{make.__name__}-{numel}") for make in (special, finite) for numel in (1, 300, 9001)]


def encode_parts(name: str, flat: Tensor, data: Tensor) -> None:
    for part in parts(flat.numel(), flat.device):
        codec(name).encode_part(flat[part], data, flat.numel(), part.start)


def encode_as_cuda_does(name: str, flat: Tensor, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for module in (base, blockwise, top1, topk):
        monkeypatch.setattr(module, "on_cpu", lambda tensor: False)
    data = torch.empty(codec(name).encoded_size(flat.numel()), dtype=torch.uint8)
    with CudaArithmetic():
        encode_parts(name, flat, data)
    return data.numpy().tobytes()


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


@pytest.mark.covering
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", [0, 5, 300, 4096, PIECE + 4097])
def test_encoding_on_a_device_reads_no_value_before_the_copy(name: str, numel: int) -> None:
    """The meta device has none to read."""
    data = torch.empty(codec(name).encoded_size(numel), dtype=torch.uint8, device="meta")
    encode_parts(name, torch.empty(numel, device="meta"), data)


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith(("topk", "sdd"))])
def test_decoding_whole_blocks_on_a_device_reads_no_value_either(name: str) -> None:
    """What is looked at: bits left over in a short last block, top-k's positions, whether sdd's bytes are too large."""
    numel = (1 << 23) + 4096
    data = torch.empty(codec(name).encoded_size(numel), dtype=torch.uint8, device="meta")
    pieces = [(piece.numel(), piece.dtype, piece.device.type) for piece in codec(name).pieces(data, numel)]
    assert pieces == [(1 << 23, torch.float32, "meta"), (4096, torch.float32, "meta")]


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"on the CPU or CUDA, not .* on meta"):
        codec("int8").encode(torch.empty(3, device="meta"), fragment((3,)))
