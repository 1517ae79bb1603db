"""The plan of fragments: every element exactly once, in forward order; differences are named."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
from tests.support.exhaustive import examples
from tests.support.models import TinyTransformer

_PARTS = st.sampled_from(["embed", "blocks", "0", "1", "12", "attn", "norm", "weight", "bias", "head"])
_NAMES = st.lists(_PARTS, min_size=1, max_size=4).map(".".join)
_SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
_TENSORS = st.dictionaries(_NAMES, _SHAPES, min_size=1, max_size=12)


def plan(tensors: dict[str, tuple[int, ...]]) -> Schema:
    return plan_fragments((name, nn.Parameter(torch.zeros(shape))) for name, shape in tensors.items())


@given(tensors=_TENSORS)
@settings(deadline=None, max_examples=examples(150))
def test_fragments_cover_every_element_exactly_once(tensors: dict[str, tuple[int, ...]]) -> None:
    schema = plan(tensors)
    covered = [(tensor.name, tensor.shape) for fragment in schema.fragments for tensor in fragment.tensors]
    assert sorted(covered) == sorted(tensors.items())
    assert schema.numel == sum(torch.zeros(shape).numel() for shape in tensors.values())
    assert [fragment.fragment_id for fragment in schema.fragments] == list(range(len(schema.fragments)))
    assert len({fragment.name for fragment in schema.fragments}) == len(schema.fragments)


@given(tensors=_TENSORS)
@settings(deadline=None, max_examples=examples(60))
def test_order_is_kept_between_and_inside_fragments(tensors: dict[str, tuple[int, ...]]) -> None:
    order = {name: i for i, name in enumerate(tensors)}
    firsts = [order[fragment.tensors[0].name] for fragment in plan(tensors).fragments]
    assert firsts == sorted(firsts)
    for fragment in plan(tensors).fragments:
        places = [order[tensor.name] for tensor in fragment.tensors]
        assert places == sorted(places)


@given(a=_TENSORS, b=_TENSORS)
@settings(deadline=None, max_examples=examples(150))
def test_a_difference_is_empty_exactly_when_the_hashes_agree_and_both_ways(
    a: dict[str, tuple[int, ...]], b: dict[str, tuple[int, ...]]
) -> None:
    one, other = plan(a), plan(b)
    same = one.schema_hash == other.schema_hash
    assert (one.first_difference(other) is None) == same == (other.first_difference(one) is None)
    assert one.first_difference(plan(a)) is None


def test_blocks_are_fragments_and_the_rest_goes_by_top_level_module() -> None:
    schema = plan_fragments(TinyTransformer(layers=2).named_parameters())
    assert [fragment.name for fragment in schema.fragments] == ["embed", "blocks.0", "blocks.1", "norm", "head"]


def test_a_block_inside_a_wrapper_is_still_a_block() -> None:
    schema = plan({"model.layers.0.q.weight": (2,), "model.layers.0.experts.3.w": (2,), "model.layers.1.q.weight": (2,)})
    assert [fragment.name for fragment in schema.fragments] == ["model.layers.0", "model.layers.1"]


def test_frozen_parameters_are_left_out_and_tied_ones_appear_once() -> None:
    model = TinyTransformer(layers=1)
    model.head.weight = model.embed.weight
    model.norm.requires_grad_(False)
    schema = plan_fragments(model.named_parameters())
    assert [fragment.name for fragment in schema.fragments] == ["embed", "blocks.0"]


def test_nothing_trainable_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        plan_fragments(nn.Linear(2, 2).requires_grad_(False).named_parameters())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a.w": (2, 3), "b.w": (4,)}, "tensor b.w has shape [5] in the run and [4] at the peer"),
        ({"a.w": (2, 3), "c.w": (5,)}, "tensor b.w of the run stands where the peer has c.w"),
        ({"a.w": (2, 3)}, "tensor b.w of the run is missing at the peer"),
        ({"a.w": (2, 3), "b.w": (5,), "c.w": (1,)}, "tensor c.w of the peer is not in the run"),
    ],
)
def test_the_first_difference_is_named(other: dict[str, tuple[int, ...]], message: str) -> None:
    assert plan({"a.w": (2, 3), "b.w": (5,)}).first_difference(plan(other)) == message


def test_another_grouping_of_the_same_tensors_is_a_difference() -> None:
    def grouped(*names: str) -> Schema:
        return Schema(
            tuple(
                FragmentSpec(fragment_id=i, name=name, tensors=(TensorSpec(name=f"t{i}", shape=(1,)),))
                for i, name in enumerate(names)
            )
        )

    assert grouped("a", "b").first_difference(grouped("a", "c")) == "tensor t1 is in fragment b of the run and in c at the peer"
    assert grouped("a", "b").schema_hash != grouped("a", "c").schema_hash


def _fragment(fragment_id: int, *tensors: TensorSpec) -> FragmentSpec:
    return FragmentSpec(fragment_id=fragment_id, name=f"f{fragment_id}", tensors=tensors)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ((), "no tensors"),
        ((_fragment(0),), "without any"),
        ((_fragment(1, TensorSpec(name="a", shape=(1,))),), "ids are not"),
        ((_fragment(0, TensorSpec(name="a", shape=(1,)), TensorSpec(name="a", shape=(1,))),), "named twice"),
        ((_fragment(0, TensorSpec(name="a", shape=(0,))),), "dimension below 1"),
    ],
)
def test_a_contradictory_schema_from_the_wire_is_refused(fragments: tuple[FragmentSpec, ...], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        Schema(fragments)


def test_the_hash_is_stable() -> None:
    """It stands in certificates of agreement between versions: changing it cuts old peers off, so do it knowingly."""
    assert plan({"a.w": (2, 3)}).schema_hash == "df795c1b1bd0ae5cf7d549b940a175d67c39c6e8f6e68317a9b5305c48e3d95d"


def test_the_hash_is_made_once_and_travels_with_the_schema() -> None:
    schema = plan({"a.w": (2, 3), "b.w": (4,)})
    assert schema.schema_hash is schema.schema_hash
    assert (copied := pickle.loads(pickle.dumps(schema))) == schema and copied.schema_hash == schema.schema_hash  # noqa: S301
    assert hash(schema) == hash(plan({"a.w": (2, 3), "b.w": (4,)})) and "schema_hash" not in repr(schema)


def test_buffers_are_part_of_the_schema_and_leave_the_hash_of_a_model_without_any_as_it_was() -> None:
    tensors = (TensorSpec(name="a.b", shape=(2,)),)
    plain = Schema((FragmentSpec(fragment_id=0, name="a", tensors=tensors),))
    buffers = Schema((FragmentSpec(fragment_id=0, name="a", tensors=tensors, buffers=True),))
    assert plain.to_json() == '[["a",[["a.b",[2]]]]]'
    assert Schema.from_json(buffers.to_json()) == buffers and Schema.from_json(plain.to_json()) == plain
    assert plain.schema_hash != buffers.schema_hash and "a (buffers)" in str(plain.first_difference(buffers))
    with pytest.raises(RemoteProtocolError, match="unknown entry"):
        Schema.from_json('[["a",[["a.b",[2]]],"parameters"]]')


@pytest.mark.parametrize("size", ["1e999", "-1e999", "Infinity", "NaN", "2.0", "true", '"2"', "9" * 400])
def test_a_size_that_is_no_whole_number_is_the_other_sides_fault(size: str) -> None:
    with pytest.raises(RemoteProtocolError, match="schema: not what to_json writes"):
        Schema.from_json(f'[["a",[["a.b",[{size}]]]]]')


def test_text_that_is_nested_too_deeply_is_the_other_sides_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="nested too deeply"):
        Schema.from_json("[" * 100_000)
