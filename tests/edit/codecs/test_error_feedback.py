"""Error feedback: nothing is lost over rounds, nothing moves without a commit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit import reference
from edit.codecs import decode
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import RESIDUAL_FORMS, CodecChoice, CodecSpec
from edit.errors import LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Shard
from edit.merging.norms import clip_to, norm_of_pieces
from tests.support.encoded import FAMILIES, LOSSY, SPECS, elements, encode, whole_shards
from tests.support.exhaustive import examples, rarely


def deltas(seed: int, rounds: int, numel: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(rounds)]


def residual_of(feedback: ErrorFeedback, i: int = 0) -> Tensor:
    residual = feedback.residuals().get(i)
    return torch.zeros(300) if residual is None else elements(residual)


@given(name=st.sampled_from(SPECS), seed=st.integers(0, 1000), fates=st.lists(st.booleans(), min_size=1, max_size=8))
@settings(deadline=None, max_examples=examples(60))
def test_what_was_merged_plus_the_residual_is_the_sum_of_the_deltas(name: str, seed: int, fates: list[bool]) -> None:
    """Telescoping. A rolled-back round is as if it had not been."""
    feedback = ErrorFeedback(name, whole_shards(300))
    sent, meant = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for delta, committed in zip(deltas(seed, len(fates)), fates, strict=True):
        encoded = feedback.stage(0, delta)
        if not committed:
            feedback.rollback(0)
            continue
        feedback.commit(0, delta)
        sent += decode(encoded)
        meant += delta
    assert torch.allclose(sent + residual_of(feedback), meant, atol=1e-5)


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fp32", "int8", "topk:k=9"])
def test_what_is_cut_off_a_long_vector_is_never_sent(name: str, form: str) -> None:
    """Against the reference, some vectors longer than the bound and some not; also where the residual is kept early."""
    choice = CodecChoice(CodecSpec.parse(name), decay=0.9, residual=form)
    feedback, clip, vectors = ErrorFeedback(choice, whole_shards(300)), 17.0, deltas(0, 6)
    assert {float(each.norm()) > clip for each in vectors} == {True, False}
    expected = reference.feedback(vectors, lambda u: decode(encode(name, u)), 0.9, clip)
    for number, (delta, wanted) in enumerate(zip(vectors, expected, strict=True)):
        feedback.rescale(0, clip_to(norm_of_pieces(300, feedback.owed(0, delta)), clip))
        sent = decode(feedback.stage(0, delta))
        if form == "fp32":
            torch.testing.assert_close(sent, wanted, rtol=1e-4, atol=1e-4)
        assert float(sent.norm()) <= clip * 1.01
        if number % 2:
            feedback.keep(0, delta)
        feedback.commit(0, delta)
        assert feedback.scales == {}


@pytest.mark.parametrize(
    ("norm", "expected"), [(0.0, 1.0), (2.0, 1.0), (4.0, 0.5), (math.inf, 0.0), (math.nan, 0.0), (5e-324, 1.0)]
)
def test_a_vector_whose_norm_is_not_known_is_not_sent_at_length(norm: float, expected: float) -> None:
    assert clip_to(norm, 2.0) == expected


@pytest.mark.parametrize("scale", [-0.1, 1.5, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(LocalProtocolError, match="which is not from 0 to 1"):
        ErrorFeedback("int8", whole_shards(300)).rescale(0, scale)


@pytest.mark.parametrize("name", LOSSY)
def test_t9_the_caller_gets_the_encoded_result_and_the_commit_really_changes_the_residual(name: str) -> None:
    feedback, delta = ErrorFeedback(name, whole_shards(300)), deltas(0, 1)[0]
    before = delta.clone()
    first = feedback.stage(0, delta)
    assert torch.equal(delta, before) and not torch.equal(decode(first), delta)
    assert feedback.residuals() == {}
    feedback.commit(0, delta)
    assert torch.equal(residual_of(feedback), delta - decode(first))
    second = feedback.stage(0, torch.zeros(300))
    assert bool(decode(second).any()), "the next message carries what the first one lacked"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", rarely(LOSSY, kept=FAMILIES))
def test_feedback_makes_the_mean_error_vanish_where_a_bare_codec_keeps_it(name: str) -> None:
    feedback, delta, total = ErrorFeedback(name, whole_shards(300)), deltas(1, 1)[0], torch.zeros(300)
    rounds = 600 if name == "sign" else 300  # the slowest: an outlier has to raise the mean magnitude of its whole block
    for _ in range(rounds):
        total += decode(feedback.stage(0, delta))
        feedback.commit(0, delta)
    with_feedback = (total / rounds - delta).abs().max()
    bare = (decode(ErrorFeedback(name, whole_shards(300)).stage(0, delta)) - delta).abs().max()
    assert with_feedback < bare / 4


def test_a_rollback_or_staging_again_leaves_the_residual() -> None:
    feedback, (a, b, c) = ErrorFeedback("int8", whole_shards(300)), deltas(2, 3)
    feedback.stage(0, a)
    feedback.commit(0, a)
    residual = residual_of(feedback)
    feedback.stage(0, b)
    feedback.rollback(0)
    feedback.rollback(0)
    feedback.stage(0, b)
    again = feedback.stage(0, c)
    assert torch.equal(residual_of(feedback), residual)
    feedback.commit(0, c)
    assert torch.equal(residual_of(feedback), (c + residual) - decode(again))


def test_a_lossless_codec_keeps_no_residual() -> None:
    feedback, delta = ErrorFeedback("fp32", whole_shards(300)), deltas(3, 1)[0]
    assert torch.equal(decode(feedback.stage(0, delta)), delta)
    feedback.commit(0)
    assert feedback.residuals() == {}


@pytest.mark.parametrize("name", SPECS)
def test_a_broken_delta_is_visible_to_the_merger_and_leaves_the_residual_after_its_rollback(name: str) -> None:
    feedback, (good, bad) = ErrorFeedback(name, whole_shards(300)), deltas(4, 2)
    feedback.stage(0, good)
    feedback.commit(0, good)
    before = {key: elements(value) for key, value in feedback.residuals().items()}
    bad[7] = math.nan
    assert not bool(decode(feedback.stage(0, bad)).isfinite().all())
    feedback.rollback(0)
    after = feedback.residuals()
    assert after.keys() == before.keys() and all(torch.equal(elements(after[key]), before[key]) for key in before)


def test_fragments_are_independent_and_residuals_round_trip() -> None:
    feedback, delta = ErrorFeedback("int8", whole_shards(300, 300)), deltas(5, 1)[0]
    feedback.stage(1, delta)
    feedback.commit(1, delta)
    assert list(feedback.residuals()) == [1]
    restored = ErrorFeedback("int8", whole_shards(300, 300))
    restored.load({i: residual.tensor for i, residual in feedback.residuals().items()})
    assert bytes(restored.stage(1, delta).data) == bytes(feedback.stage(1, delta).data)


def test_misuse_is_named() -> None:
    feedback = ErrorFeedback("int8", whole_shards(300))
    with pytest.raises(LocalProtocolError, match="fragment 0: commit"):
        feedback.commit(0)
    feedback.stage(0, torch.ones(300))
    with pytest.raises(LocalProtocolError, match="fragment 0: commit of a residual without its delta"):
        feedback.commit(0)
    with pytest.raises(LocalProtocolError, match="no fragment 1"):
        feedback.stage(1, torch.zeros(300))
    with pytest.raises(LocalProtocolError, match="no fragment 0 of 299"):
        feedback.stage(0, torch.zeros(299))


@pytest.mark.parametrize(
    ("fragment", "residual"),
    [(1, torch.zeros(300)), (-1, torch.zeros(300)), (0, torch.zeros(299)), (0, torch.zeros(300, dtype=torch.float64))],
)
def test_residuals_of_another_model_are_refused_and_nothing_changes(fragment: int, residual: Tensor) -> None:
    feedback = ErrorFeedback("int8", whole_shards(300))
    feedback.load({0: torch.ones(300)})
    with pytest.raises(StorageError, match=f"residual.{fragment}"):
        feedback.load({fragment: residual})
    assert torch.equal(residual_of(feedback), torch.ones(300))


@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_a_decay_forgets_a_share_of_the_residual_with_each_contribution(decay: float) -> None:
    feedback, (a, b) = ErrorFeedback(CodecChoice(CodecSpec("stat2"), decay=decay), whole_shards(300)), deltas(6, 2)
    first = decode(feedback.stage(0, a))
    feedback.commit(0, a)
    error = a - first
    assert torch.equal(residual_of(feedback), error)
    second = decode(feedback.stage(0, b))
    feedback.commit(0, b)
    assert torch.equal(residual_of(feedback), (b + error * decay) - second)


def test_no_feedback_is_no_residual() -> None:
    feedback, (a, b) = ErrorFeedback(CodecChoice(CodecSpec("topk"), decay=0.0), whole_shards(300)), deltas(7, 2)
    feedback.load({0: torch.ones(300)})
    for delta in (a, b):
        sent = feedback.stage(0, delta)
        assert bytes(sent.data) == bytes(ErrorFeedback("topk", whole_shards(300)).stage(0, delta).data)
        feedback.commit(0)
    assert feedback.residuals() == {}


def test_each_fragment_has_its_own_codec_and_buffers_are_fp32() -> None:
    specs = [
        FragmentSpec(fragment_id=i, name=name, tensors=(TensorSpec(name=name, shape=(300,)),)) for i, name in enumerate("abc")
    ]
    specs.append(FragmentSpec(fragment_id=3, name="b.buffers", tensors=specs[0].tensors, buffers=True))
    choice = CodecChoice(CodecSpec("topk"), (("b*", CodecSpec("int4")), ("c", CodecSpec("fp32"))))
    feedback = ErrorFeedback(choice, [Shard(spec) for spec in specs])
    for i, expected in enumerate(["topk", "int4", "fp32", "fp32"]):
        assert feedback.stage(i, deltas(8, 1)[0]).codec == expected
        feedback.commit(i, deltas(8, 1)[0])
    assert list(feedback.residuals()) == [0, 1]
    again = ErrorFeedback(choice, [Shard(spec) for spec in specs])
    again.load({i: torch.ones(300) for i in range(4)})
    assert list(again.residuals()) == [0, 1], "what a lossless codec owes is nothing"


@pytest.mark.parametrize("form", RESIDUAL_FORMS)
@pytest.mark.parametrize("name", LOSSY)
def test_the_residual_is_kept_in_its_form_and_written_in_place(name: str, form: str) -> None:
    """To the bit what the rule leaves out, rounded once with each commit; what is kept before the commit is the same."""
    choice = CodecChoice(CodecSpec.parse(name), decay=0.95, residual=form)
    feedback, early = ErrorFeedback(choice, whole_shards(300)), ErrorFeedback(choice, whole_shards(300))
    expected, at = torch.zeros(300), 0
    for number, delta in enumerate(deltas(9, 4)):
        q = feedback.stage(0, delta)
        assert bytes(q.data) == bytes(early.stage(0, delta).data)
        u = delta + expected * 0.95
        assert bytes(q.data) == bytes(encode(name, u).data)
        early.keep(0, delta)
        delta_then = delta.clone()
        early.commit(0)
        feedback.commit(0, delta_then)
        expected = decode(encode(form, u - decode(q)))
        assert torch.equal(residual_of(feedback), expected) and torch.equal(residual_of(early), expected)
        tensor = feedback.residuals()[0].tensor
        assert number == 0 or tensor.data_ptr() == at
        at = tensor.data_ptr()
        assert feedback.residuals()[0].form == form


def test_a_staged_vector_takes_no_memory_but_its_encoded_form() -> None:
    feedback, delta = ErrorFeedback("int8", whole_shards(300)), deltas(10, 1)[0]
    sent = feedback.stage(0, delta)
    (staged,) = feedback._staged.values()
    assert staged is sent, "the carrier holds the same bytes until the outcome"


def test_a_residual_in_another_form_is_loaded_rounded_once() -> None:
    kept = deltas(11, 1)[0]
    for form in RESIDUAL_FORMS:
        feedback = ErrorFeedback(CodecChoice(CodecSpec("int8"), residual=form), whole_shards(300))
        feedback.load({0: kept})
        assert torch.equal(residual_of(feedback), decode(encode(form, kept)))
