"""Vectors on CUDA give the bytes and elements of the CPU's. Skipped as a whole without a CUDA device."""

import pytest
import torch

from edit.codecs import codec
from edit.codecs.base import PIECE
from edit.records import EncodedTensor
from tests.support.encoded import SPECS, assert_equal_but_for_the_bits_of_nans, encode, finite, special

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and this machine has none", allow_module_level=True)

CUDA = torch.device("cuda")
SIZES = [0, 1, 300, 4096, 3 * PIECE + 300, (1 << 23) + 5000]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("numel", SIZES)
def test_a_vector_on_cuda_gives_the_bytes_of_the_same_on_the_cpu(name: str, numel: int) -> None:
    for make in (special, finite) if numel else (torch.empty,):
        flat = make(numel)
        encoded = encode(name, flat.to(CUDA))
        assert_equal_but_for_the_bits_of_nans(name, numel, bytes(encoded.data), bytes(encode(name, flat).data))


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
