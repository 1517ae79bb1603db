"""Vectors on CUDA give the bytes and elements of the CPU's. Skipped as a whole without a CUDA device."""

import pytest
import torch

from edit.codecs import codec
from edit.codecs.base import PIECE
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import CodecChoice, CodecSpec
from edit.records import EncodedTensor
from tests.support.encoded import SPECS, assert_equal_but_for_the_bits_of_nans, encode, finite, special, whole_shards

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


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "local"])
@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "topk"])
@pytest.mark.parametrize("kept", [False, True])
def test_error_feedback_of_vectors_on_cuda_is_that_of_the_same_on_the_cpu(form: str, name: str, kept: bool) -> None:
    numel = (1 << 23) + 5000
    choice = CodecChoice(CodecSpec.parse(name), decay=0.9, residual=form)
    here, there = (ErrorFeedback(choice, whole_shards(numel)) for _ in range(2))
    for turn in range(3):
        delta = torch.randn(numel, generator=torch.Generator().manual_seed(turn)) * 1e-3
        for feedback in (here, there):
            feedback.rescale(0, 0.7 if turn == 1 else 1.0)
        ours, theirs = there.stage(0, delta.to(CUDA)), here.stage(0, delta)
        assert bytes(ours.data) == bytes(theirs.data)
        if kept and there.needs_delta(0):
            there.keep(0, delta.to(CUDA))
            here.keep(0, delta)
        there.commit(0, delta.to(CUDA) if there.needs_delta(0) else None)
        here.commit(0, delta if here.needs_delta(0) else None)
        torch.cuda.synchronize()
        assert list(here.residuals()) == list(there.residuals())
        for i, residual in here.residuals().items():
            assert torch.equal(residual.tensor, there.residuals()[i].tensor)
