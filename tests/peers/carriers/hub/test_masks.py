"""What the ranks of sharded replicas mask adds up to the sum of their integers, whatever the layouts; lanes included."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from edit.codecs.error_feedback import ErrorFeedback
from edit.codecs.grid import MaskedCodec
from edit.config.run import PenaltyConfig
from edit.errors import RemoteProtocolError
from edit.fragments.schema import FragmentSpec, Schema
from edit.fragments.shards import Box, Shard
from edit.merging.masked import sum_of
from edit.merging.merge import Measured, ShardPayload
from edit.records import EncodedTensor
from edit.replica.ranks import Ranks
from edit.trust.mask_grid import BLOCK, first_exponent, largest
from edit.trust.mask_plan import FragmentPlan
from edit.trust.masking import Opening
from edit.trust.masks import signed
from edit.worker.masked import GridStaging
from peers.carriers.hub.masking import masked
from tests.edit.trust.masked_round import MaskedRound, names
from tests.support.layouts import fragment, rows
from tests.support.thread_ranks import at_every_rank

SPEC = fragment((7, 90), (33,), ())
THETA = torch.linspace(-1, 1, SPEC.numel)


def plan(bits: int) -> FragmentPlan:
    limit = largest(bits, 8)
    exponents = np.full(-(-SPEC.numel // BLOCK), first_exponent(1.0, limit), np.int8)
    exponents[1] += 2
    return FragmentPlan(fragment_id=0, bits=bits, limit=limit, exponents=exponents.tobytes(), reference=0.0)


def staged(
    ranks: Ranks, spec: FragmentSpec, boxes: Sequence[Box] | None, vector: torch.Tensor, of: FragmentPlan
) -> tuple[Shard, EncodedTensor, float]:
    """What one rank stages of a vector."""
    shard = Shard(spec, boxes)
    layout = SimpleNamespace(ranks=ranks, owned=(shard,), schema=Schema((spec,)))
    feedback = ErrorFeedback("int8", (shard,), changing=True)
    staging = GridStaging(SimpleNamespace(layout=layout), feedback, PenaltyConfig())  # type: ignore[arg-type]
    staging.begin([of])
    payload, norm = staging.stage(0, shard.take(vector))
    return shard, payload, norm


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_shards_of_any_layout_add_up_to_the_sum_of_whole_vectors(bits: int) -> None:
    of, peers = plan(bits), names(4)
    played = MaskedRound(peers, drops={peers[3]: 2}).run()
    assert played.opening is not None
    draw = torch.Generator().manual_seed(1)
    vectors = [torch.randn(SPEC.numel, generator=draw).clamp(-1, 1) for _ in peers]
    layouts: list[list[Sequence[Box] | None]] = [[None], list(rows(SPEC, 2, 0)), list(rows(SPEC, 3, 1))]
    contributions, whole = [], np.zeros(SPEC.numel, np.int64)
    for name, vector, layout in zip(peers[:3], vectors[:3], layouts, strict=True):
        count = len(layout)
        every = at_every_rank(count, lambda ranks: staged(ranks, SPEC, layout[ranks.rank], vector, of))  # noqa: B023
        assert len({norm for _, _, norm in every}) == 1 and every[0][2] == pytest.approx(float(vector.norm()))
        parts = tuple(ShardPayload(shard, masked(played.masks[name], payload, shard, bits)) for shard, payload, _ in every)
        contributions.append(Measured(name, 1, 1, every[0][2], parts if count > 1 else parts[0].payload))
        alone = staged(Ranks(), SPEC, None, vector, of)[1]
        whole += signed(np.frombuffer(alone.data, f"<u{bits // 8}")[: SPEC.numel])
    total = sum_of(SPEC, of, contributions)
    assert not np.array_equal(signed(total.words), whole)
    played.opening.apply(total.words, 0, 0)
    played.opening.apply(total.lanes, 0, SPEC.numel)
    Opening.check(total.words, total.lanes, 0)
    assert np.array_equal(signed(total.words), whole)


def test_masked_words_look_random_and_cannot_be_decoded() -> None:
    of, peers = plan(16), names(3)
    played = MaskedRound(peers).run()
    shard, payload, _ = staged(Ranks(), SPEC, None, torch.zeros(SPEC.numel), of)
    sent = masked(played.masks[peers[0]], payload, shard, 16)
    words = np.frombuffer(sent.data, "<u2")
    assert len(set(words.tolist())) > 0.97 * len(words) and sent.codec == "masked16"
    assert np.frombuffer(payload.data, "<u2").sum() == 0  # what error feedback decodes is as it was
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        MaskedCodec(16).decode(sent)


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    short = FragmentPlan(fragment_id=0, bits=16, limit=9, exponents=b"\x00", reference=0.0)
    for wrong in (short, FragmentPlan(fragment_id=1, bits=16, limit=9, exponents=short.exponents, reference=0.0)):
        with pytest.raises(RemoteProtocolError, match="does not fit the model"):
            staged(Ranks(), SPEC, None, THETA, wrong)


def test_bytes_of_another_length_are_no_masked_vector() -> None:
    of = plan(16)
    wrong = Measured("a", 1, 1, 1.0, EncodedTensor("masked16", SPEC.numel, bytes(2 * SPEC.numel)))
    with pytest.raises(RemoteProtocolError, match="are not 664 masked words of 16 bits"):
        sum_of(SPEC, of, [wrong])
