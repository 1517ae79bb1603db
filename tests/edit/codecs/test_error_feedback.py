"""Error feedback: nothing is lost over rounds, nothing moves without a commit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit.codecs import decode
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import CodecChoice, CodecSpec
from edit.errors import LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Shard
from tests.support.encoded import LOSSY, SPECS, whole_shards


def deltas(seed: int, rounds: int, numel: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(rounds)]


@given(name=st.sampled_from(SPECS), seed=st.integers(0, 1000), fates=st.lists(st.booleans(), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_what_was_merged_plus_the_residual_is_the_sum_of_the_deltas(name: str, seed: int, fates: list[bool]) -> None:
    """Telescoping. A rolled-back round is as if it had not been."""
    feedback = ErrorFeedback(name, whole_shards(300))
    sent, meant = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for delta, committed in zip(deltas(seed, len(fates)), fates, strict=True):
        encoded = feedback.stage(0, delta)
        if not committed:
            feedback.rollback(0)
            continue
        feedback.commit(0)
        sent += decode(encoded)
        meant += delta
    residual = feedback.residuals().get(0, torch.zeros(300))
    assert torch.allclose(sent + residual, meant, atol=1e-5)


@pytest.mark.parametrize("name", LOSSY)
def test_t9_the_caller_gets_the_encoded_result_and_the_commit_really_changes_the_residual(name: str) -> None:
    feedback, delta = ErrorFeedback(name, whole_shards(300)), deltas(0, 1)[0]
    before = delta.clone()
    first = feedback.stage(0, delta)
    assert torch.equal(delta, before) and not torch.equal(decode(first), delta)
    assert feedback.residuals() == {}
    feedback.commit(0)
    assert torch.equal(feedback.residuals()[0], delta - decode(first))
    second = feedback.stage(0, torch.zeros(300))
    assert bool(decode(second).any()), "the next message carries what the first one lacked"


@pytest.mark.parametrize("name", LOSSY)
def test_feedback_makes_the_mean_error_vanish_where_a_bare_codec_keeps_it(name: str) -> None:
    feedback, delta, total = ErrorFeedback(name, whole_shards(300)), deltas(1, 1)[0], torch.zeros(300)
    for _ in range(600):
        total += decode(feedback.stage(0, delta))
        feedback.commit(0)
    with_feedback = (total / 600 - delta).abs().max()
    bare = (decode(ErrorFeedback(name, whole_shards(300)).stage(0, delta)) - delta).abs().max()
    assert with_feedback < bare / 4  # sign is the slowest: an outlier has to raise the mean magnitude of its whole block


def test_a_rollback_or_staging_again_leaves_the_residual() -> None:
    feedback, (a, b, c) = ErrorFeedback("int8", whole_shards(300)), deltas(2, 3)
    feedback.stage(0, a)
    feedback.commit(0)
    residual = feedback.residuals()[0].clone()
    feedback.stage(0, b)
    feedback.rollback(0)
    feedback.rollback(0)
    feedback.stage(0, b)
    again = feedback.stage(0, c)
    assert torch.equal(feedback.residuals()[0], residual)
    feedback.commit(0)
    assert torch.equal(feedback.residuals()[0], (c + residual) - decode(again))


def test_a_lossless_codec_keeps_no_residual() -> None:
    feedback, delta = ErrorFeedback("fp32", whole_shards(300)), deltas(3, 1)[0]
    assert torch.equal(decode(feedback.stage(0, delta)), delta)
    feedback.commit(0)
    assert feedback.residuals() == {}


@pytest.mark.parametrize("name", SPECS)
def test_a_broken_delta_is_visible_to_the_merger_and_leaves_the_residual_after_its_rollback(name: str) -> None:
    feedback, (good, bad) = ErrorFeedback(name, whole_shards(300)), deltas(4, 2)
    feedback.stage(0, good)
    feedback.commit(0)
    before = {key: value.clone() for key, value in feedback.residuals().items()}
    bad[7] = math.nan
    assert not bool(decode(feedback.stage(0, bad)).isfinite().all())
    feedback.rollback(0)
    after = feedback.residuals()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


def test_fragments_are_independent_and_residuals_round_trip() -> None:
    feedback, delta = ErrorFeedback("int8", whole_shards(300, 300)), deltas(5, 1)[0]
    feedback.stage(1, delta)
    feedback.commit(1)
    assert list(feedback.residuals()) == [1]
    restored = ErrorFeedback("int8", whole_shards(300, 300))
    restored.load(feedback.residuals())
    assert bytes(restored.stage(1, delta).data) == bytes(feedback.stage(1, delta).data)


def test_misuse_is_named() -> None:
    feedback = ErrorFeedback("int8", whole_shards(300))
    with pytest.raises(LocalProtocolError, match="fragment 0: commit"):
        feedback.commit(0)
    with pytest.raises(LocalProtocolError, match="no fragment 1"):
        feedback.stage(1, torch.zeros(300))
    with pytest.raises(LocalProtocolError, match="no fragment 0 of 299"):
        feedback.stage(0, torch.zeros(299))


@pytest.mark.parametrize(
    ("fragment", "residual"),
    [(1, torch.zeros(300)), (-1, torch.zeros(300)), (0, torch.zeros(299)), (0, torch.zeros(300, dtype=torch.bfloat16))],
)
def test_residuals_of_another_model_are_refused_and_nothing_changes(fragment: int, residual: Tensor) -> None:
    feedback = ErrorFeedback("int8", whole_shards(300))
    feedback.load({0: torch.ones(300)})
    with pytest.raises(StorageError, match=f"residual.{fragment}"):
        feedback.load({fragment: residual})
    assert torch.equal(feedback.residuals()[0], torch.ones(300))


@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_a_decay_forgets_a_share_of_the_residual_with_each_contribution(decay: float) -> None:
    feedback, (a, b) = ErrorFeedback(CodecChoice(CodecSpec("stat2"), decay=decay), whole_shards(300)), deltas(6, 2)
    first = decode(feedback.stage(0, a))
    feedback.commit(0)
    error = a - first
    assert torch.equal(feedback.residuals()[0], error)
    second = decode(feedback.stage(0, b))
    feedback.commit(0)
    assert torch.equal(feedback.residuals()[0], (b + error * decay) - second)


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
        feedback.commit(i)
    assert list(feedback.residuals()) == [0, 1]
    again = ErrorFeedback(choice, [Shard(spec) for spec in specs])
    again.load({i: torch.ones(300) for i in range(4)})
    assert list(again.residuals()) == [0, 1], "what a lossless codec owes is nothing"
