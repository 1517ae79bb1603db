"""The order of a fragment's elements, the sign of Delta, fp32 whatever the model's dtype."""

import math

import pytest
import torch
from torch import nn

from edit.codecs.base import parts
from edit.errors import LocalProtocolError
from edit.replica import flat
from edit.replica.flat import (
    DevicePseudoGradient,
    LocalVector,
    PseudoGradient,
    flatten,
    flatten_there,
    is_finite,
    load_fragment,
    on_gpu,
    pseudo_gradient,
)


def fragment(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(3, 4), (), (5,)]]


def test_tensors_lie_row_major_one_after_the_other() -> None:
    a, b = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), nn.Parameter(torch.tensor([5.0]))
    assert flatten([a, b]).tolist() == [1, 2, 3, 4, 5]


def test_a_transposed_parameter_is_read_and_written_in_its_logical_order() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    assert flatten([parameter]).tolist() == [0, 3, 1, 4, 2, 5]
    load_fragment(torch.arange(6.0), [parameter])
    assert parameter.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_flat_vectors_are_new_fp32_without_a_graph(dtype: torch.dtype) -> None:
    parameters = fragment(dtype)
    vector = flatten(parameters)
    delta = pseudo_gradient(torch.zeros(18), parameters)
    for one in (vector, delta):
        assert one.dtype == torch.float32 and one.shape == (18,) and not one.requires_grad
    vector.zero_()
    assert flatten(parameters).abs().sum() > 0


def test_the_pseudo_gradient_is_outer_minus_local() -> None:
    parameters = fragment()
    outer = torch.randn(18)
    assert torch.equal(pseudo_gradient(outer, parameters), outer - flatten(parameters))


def test_the_outer_vector_is_not_written() -> None:
    outer = torch.randn(18)
    before = outer.clone()
    pseudo_gradient(outer, fragment(torch.bfloat16))
    assert torch.equal(outer, before)


def test_an_untrained_bf16_model_has_made_no_progress() -> None:
    """Else every round would round the fp32 outer parameters to bf16 (T15)."""
    parameters, outer = fragment(torch.bfloat16), torch.randn(18)
    load_fragment(outer, parameters)
    assert not torch.equal(flatten(parameters), outer)
    assert torch.equal(pseudo_gradient(outer, parameters), torch.zeros(18))


def test_loading_keeps_dtype_and_identity_and_needs_no_grad_guard() -> None:
    parameters = fragment(torch.bfloat16)
    addresses = [parameter.data_ptr() for parameter in parameters]
    load_fragment(torch.full((18,), 0.5), parameters)
    assert all(parameter.dtype == torch.bfloat16 and bool((parameter == 0.5).all()) for parameter in parameters)
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in parameters)


@pytest.mark.parametrize("size", [17, 19])
def test_a_vector_of_another_size_is_our_bug(size: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"18 elements was given a vector of {size}"):
        load_fragment(torch.zeros(size), fragment())
    with pytest.raises(LocalProtocolError):
        pseudo_gradient(torch.zeros(size), fragment())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, -1e-45, 0.0])
@pytest.mark.parametrize("place", [0, 17, 299])
def test_a_vector_is_finite_when_every_element_is(value: float, place: int) -> None:
    vector = torch.randn(300)
    vector[place] = value
    assert is_finite(vector) is math.isfinite(value)
    assert is_finite(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_any_layout_are_copied_part_by_part_to_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [*fragment(dtype), nn.Parameter(torch.arange(6.0).view(2, 3).t().to(dtype)), nn.Parameter(torch.empty(0))]
    expected, outer = flatten(parameters), torch.randn(24)
    monkeypatch.setattr(flat, "_COPIED", 5)
    assert torch.equal(flatten(parameters), expected)
    versions = [parameter._version for parameter in parameters]
    load_fragment(outer, parameters)
    assert torch.equal(flatten(parameters), outer.to(dtype).float())
    assert all(parameter._version > version for parameter, version in zip(parameters[:-1], versions, strict=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_reads_and_writes_the_same_bits() -> None:
    here, there = fragment(), [nn.Parameter(parameter.detach().cuda()) for parameter in fragment()]
    outer = torch.randn(18)
    assert torch.equal(flatten(here), flatten(there))
    assert torch.equal(pseudo_gradient(outer, here), pseudo_gradient(outer, there))
    load_fragment(outer, there)
    assert torch.equal(flatten(there), outer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pseudo_gradient_that_is_computed_on_a_gpu_has_the_bits_of_the_cpu_s(dtype: torch.dtype) -> None:
    here = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3000, 4000), (17,), (0, 2))]
    there = [nn.Parameter(parameter.detach().cuda()) for parameter in here]
    outer = torch.randn(12_000_017).pin_memory()
    assert on_gpu(there) == there[0].device
    assert torch.equal(flatten_there(there, there[0].device).cpu(), flatten(here))
    for earlier in (None, torch.randn(12_000_017).pin_memory()):
        delta = DevicePseudoGradient(outer, there, earlier)
        expected = pseudo_gradient(outer, here) if earlier is None else flat.as_held(outer, here) - earlier
        assert all(torch.equal(delta[part].cpu(), expected[part]) for part in parts(outer.numel(), delta.device))


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.float16, torch.float64]])
def test_by_parts_a_fragment_is_read_and_written_as_at_once(dtypes: list[torch.dtype]) -> None:
    """Parameters begin and end anywhere in the parts; some are empty."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(7,), (0, 3), (300, 500), (), (131_072,), (2, 65_500)]
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])) for i, shape in enumerate(shapes)
    ]
    local = LocalVector(parameters)
    outer = torch.randn(local.numel(), generator=generator)
    earlier = flatten(parameters) + 1
    for now in (None, earlier):
        delta = PseudoGradient(outer, local, now)
        expected = pseudo_gradient(outer, parameters) if now is None else flat.as_held(outer, parameters) - earlier
        assert delta.numel() == outer.numel()
        assert all(torch.equal(delta[part], expected[part]) for part in parts(outer.numel()))
        elsewhere = DevicePseudoGradient(outer, parameters, now)  # computes on any device
        assert all(torch.equal(elsewhere[part], expected[part]) for part in parts(outer.numel()))
    for part in parts(outer.numel()):
        local.write(part, outer[part])
    assert torch.equal(flatten(parameters), flat.as_held(outer, parameters))


def test_a_transposed_parameter_is_not_read_by_parts() -> None:
    transposed = [nn.Parameter(torch.arange(6.0).view(2, 3).t())]
    assert not LocalVector.readable(transposed)
    with pytest.raises(LocalProtocolError, match="contiguous"):
        LocalVector(transposed)
    with pytest.raises(LocalProtocolError, match="a fragment of 18 elements was given a vector of 17"):
        PseudoGradient(torch.zeros(17), LocalVector(fragment()))
    with pytest.raises(LocalProtocolError, match="a fragment of 18 elements was given a vector of 17"):
        DevicePseudoGradient(torch.zeros(17), fragment())
    assert on_gpu(fragment()) is None and on_gpu([]) is None
