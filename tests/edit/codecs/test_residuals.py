"""The storage of a residual: fp32 to the bit, bf16 and int8 as the codecs of these names round, in pieces and in place."""

import pytest
import torch
from torch import Tensor

from edit.codecs import PIECE, decode
from edit.codecs.base import parts
from edit.codecs.residuals import Residual, owing
from edit.config.codec import RESIDUAL_FORMS
from edit.errors import StorageError
from edit.records import EncodedTensor
from tests.support.encoded import elements, encode

NUMELS = [0, 1, 255, 256, 300, PIECE, PIECE + 1, 2 * PIECE + 513]


def vector(numel: int, seed: int = 0) -> Tensor:
    scales = torch.logspace(-6, 3, max(numel, 1))[:numel]
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scales


def written(flat: Tensor, form: str) -> Residual:
    residual = Residual(flat.numel(), form)
    for part in parts(flat.numel()):
        residual.write(part, flat[part])
    return residual


@pytest.mark.parametrize("form", RESIDUAL_FORMS)
@pytest.mark.parametrize("numel", NUMELS)
def test_what_is_written_is_read_as_the_codec_of_that_name_rounds_it(form: str, numel: int) -> None:
    flat = vector(numel)
    residual = written(flat, form)
    encoded = encode(form, flat)
    assert torch.equal(elements(residual), decode(encoded))
    assert bytes(residual.tensor.view(torch.uint8).numpy().data) == bytes(memoryview(encoded.data).cast("B"))
    assert residual.nbytes == memoryview(encoded.data).nbytes


@pytest.mark.parametrize("form", RESIDUAL_FORMS)
def test_it_is_zero_at_first(form: str) -> None:
    residual = Residual(300, form)
    assert not bool(elements(residual).any())
    encoded = EncodedTensor(form, 300, residual.tensor.view(torch.uint8).numpy().data)
    assert not bool(decode(encoded).any())


@pytest.mark.parametrize("form", RESIDUAL_FORMS)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_a_piece_is_added_with_its_decay_and_another_one_is_written_in_place(form: str, decay: float) -> None:
    numel = PIECE + 300
    flat, total = vector(numel), vector(numel, 1)
    residual = written(flat, form)
    held, at = decode(encode(form, flat)), residual.tensor.data_ptr()
    for part in parts(numel):
        piece = total[part].clone()
        owing(piece, residual.read(part), decay, piece)
        assert torch.equal(piece, total[part] + held[part] * decay)
    last = slice(PIECE, numel)
    residual.write(last, total[last])
    assert residual.tensor.data_ptr() == at
    assert torch.equal(elements(residual)[:PIECE], held[:PIECE])
    assert torch.equal(elements(residual)[last], decode(encode(form, total[last])))


@pytest.mark.parametrize("form", RESIDUAL_FORMS)
@pytest.mark.parametrize("kept", RESIDUAL_FORMS)
def test_a_checkpoints_tensor_is_taken_to_the_bit_in_its_own_form_and_rounded_once_into_another(kept: str, form: str) -> None:
    flat = vector(PIECE + 300)
    before = written(flat, kept)
    after = Residual.of(before.tensor, flat.numel(), form)
    assert torch.equal(elements(after), elements(before) if kept == form else decode(encode(form, elements(before))))
    assert after.tensor.data_ptr() != before.tensor.data_ptr()
    if kept == form:
        assert torch.equal(after.tensor, before.tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(299),
        torch.zeros(300, 1),
        torch.zeros(301, dtype=torch.bfloat16),
        torch.zeros(300, dtype=torch.uint8),  # int8 has scales, too
        torch.zeros(300, dtype=torch.float64),
    ],
)
def test_a_tensor_of_another_vector_is_refused(tensor: Tensor) -> None:
    with pytest.raises(StorageError, match="is not the residual of 300 elements"):
        Residual.of(tensor, 300, "fp32")
