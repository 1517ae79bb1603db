"""The outer state: equal to the oracle, bit-exact through restore and replay, and never half-committed or poisoned."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edit.codecs import codec_names, decode
from edit.config.run import CodecConfig, FragmentCodec, OuterConfig, PenaltyConfig, RunConfig
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.detector import NormStatistics
from edit.merging.merge import Measured, Merged, measure
from edit.merging.outer_optimizers import Slots
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit, EncodedTensor, Verdict
from edit.reference import Edit, diloco, e3m0, feedback, integers, nesterov
from tests.support.encoded import LOSSY, SPECS, encode

NUMELS = (700, 5)
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(numel,)),))
        for i, numel in enumerate(NUMELS)
    )
)


EXACT = {"record": "fp32", "down_residual": "fp32"}


def configured(
    optimizer: str = "nesterov",
    down: str = "fp32",
    penalty: PenaltyConfig | None = None,
    lr: float = 0.7,
    momentum: float = 0.6,
    **codec: str,
) -> RunConfig:
    return RunConfig(
        penalty=penalty or PenaltyConfig(),
        outer=OuterConfig(optimizer=optimizer, lr=lr, momentum=momentum),
        codec=CodecConfig(up="fp32", down=down, **codec),
    )


def initial_theta() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def moves(round_number: int, i: int, scale: float = 0.1) -> dict[str, Tensor]:
    """Each peer's pseudo-gradient of fragment i: random, with a common direction and an outlier in some rounds."""
    generator = torch.Generator().manual_seed(1000 * round_number + i)
    common = torch.randn(NUMELS[i], generator=generator)
    outlier = {"b": 30.0} if round_number in (13, 14) else {}
    return {
        peer_id: (common + torch.randn(NUMELS[i], generator=generator)) * scale * outlier.get(peer_id, 1.0) for peer_id in "abc"
    }


def contributions(deltas: Mapping[str, Tensor], codec_name: str = "fp32") -> list[Measured]:
    payloads = {peer_id: encode(codec_name, delta) for peer_id, delta in deltas.items()}
    return [Measured(peer_id, 20, 1000, measure(payload), payload) for peer_id, payload in payloads.items()]


def advance(state: OuterState, round_number: int, codec_name: str = "fp32") -> tuple[Commit, list[MergeRecord]]:
    merged = [state.reduce(i, contributions(moves(round_number, i), codec_name)) for i in range(len(NUMELS))]
    records = [state.record(one) for one in merged]
    return state.commit(round_number + 1, "all in", list(records)), records


def same_state(a: OuterState, b: OuterState) -> bool:
    tensors, others = a.to_tensors(), b.to_tensors()
    equal = tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    return equal and a.metadata() == b.metadata()


def kept(state: OuterState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.to_tensors().items()}


def through_json(state: OuterState, config: RunConfig) -> OuterState:
    return OuterState.restore(SCHEMA, config, kept(state), json.loads(json.dumps(state.metadata())))


# Against the oracle.


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_penalty_off_is_the_references_diloco_to_the_bit(momentum: float) -> None:
    config = configured(penalty=PenaltyConfig(enabled=False), lr=0.7, momentum=momentum)
    state = OuterState(SCHEMA, config, initial_theta())
    theta, velocity = initial_theta(), [torch.zeros(numel) for numel in NUMELS]
    for round_number in range(6):
        local = [{p: theta[i] - delta for p, delta in moves(round_number, i).items()} for i in range(len(NUMELS))]
        deltas = [{p: state.theta[i] - local[i][p] for p in local[i]} for i in range(len(NUMELS))]
        state.commit(1, "", [state.record(state.reduce(i, contributions(deltas[i]))) for i in range(len(NUMELS))])
        for i in range(len(NUMELS)):
            theta[i], velocity[i] = diloco(theta[i], velocity[i], local[i], 0.7, momentum)
            assert torch.equal(state.theta[i], theta[i])


def test_penalty_on_is_the_references_edit_with_the_same_verdicts() -> None:
    config = configured(penalty=PenaltyConfig(detector="edit", norm="raw", idle_ratio=0.0, clip=1.0), lr=0.8, momentum=0.85)
    state = OuterState(SCHEMA, config, initial_theta())
    oracles = [Edit(theta=theta, lr=0.8, mu=0.85, clip=1.0) for theta in initial_theta()]
    flagged = clipped = 0
    for round_number in range(20):
        records = []
        for i, oracle in enumerate(oracles):
            deltas = moves(round_number, i)
            merged = state.reduce(i, contributions(deltas))
            weights = oracle.round({p: oracle.theta - delta for p, delta in deltas.items()})
            assert {v.peer_id: v.weight for v in merged.verdicts} == pytest.approx(weights, rel=1e-3, abs=1e-6)
            flagged += sum(v.verdict is Verdict.ANOMALOUS for v in merged.verdicts)
            clipped += merged.clip < 1
            records.append(state.record(merged))
        state.commit(round_number, "", records)
        for i, oracle in enumerate(oracles):
            assert torch.allclose(state.theta[i], oracle.theta, rtol=1e-4, atol=1e-5)
    assert flagged >= 4 and clipped > 0, "the outliers of rounds 13 and 14 and the clip were exercised"


# The downlink.


@pytest.mark.covering
@pytest.mark.parametrize("down", codec_names())
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "yogi", "delayed_nesterov"])
def test_a_peer_that_applies_the_published_bytes_has_theta_to_the_bit(down: str, optimizer: str) -> None:
    state = OuterState(SCHEMA, configured(optimizer, down), initial_theta())
    theirs = initial_theta()
    for round_number in range(5):
        commit, _ = advance(state, round_number, "int8")
        theirs = [theta - decode(part.payload) for theta, part in zip(theirs, commit.fragments, strict=True) if part.payload]
        assert commit.outer_step == round_number + 1 == state.outer_step and commit.round_id == round_number + 1
        assert digest(theirs) == commit.digest == state.digest == digest(state.theta)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("down", LOSSY)
def test_the_downlinks_error_feedback_keeps_theta_near_the_exact_one(down: str) -> None:
    exact, coarse = (OuterState(SCHEMA, configured(down=name, **EXACT), initial_theta()) for name in ("fp32", down))
    for round_number in range(20):
        advance(exact, round_number)
        advance(coarse, round_number)
    for i, theta in enumerate(exact.theta):
        residual = coarse.to_tensors()[f"residual.{i}"]
        assert torch.allclose(coarse.theta[i] - residual, theta, atol=1e-4), "what was not sent is in the residual, all of it"
        assert not torch.equal(coarse.theta[i], theta)


@pytest.mark.parametrize("decay", [1.0, 0.95, 0.0])
def test_what_is_published_is_what_the_naive_feedback_sends_of_the_outer_steps(decay: float) -> None:
    codecs = CodecConfig(
        up="fp32", down="int4:block=64", down_decay=decay, fragments={"f1": FragmentCodec(down="fp32")}, **EXACT
    )
    config = dataclasses.replace(configured("sgd", lr=1.0, penalty=PenaltyConfig(enabled=False)), codec=codecs)
    state, deltas, published = OuterState(SCHEMA, config, initial_theta()), [], []
    for round_number in range(6):
        moved = [moves(round_number, i)["a"] for i in range(len(NUMELS))]
        merged = [state.reduce(i, contributions({"a": delta})) for i, delta in enumerate(moved)]
        commit = state.commit(round_number, "", [state.record(one) for one in merged])
        first, second = (part.payload for part in commit.fragments)
        assert first is not None and second is not None and (first.codec, second.codec) == ("int4:block=64", "fp32")
        assert torch.equal(decode(second), moved[1])
        deltas.append(moved[0])
        published.append(decode(first))
    for ours, naive in zip(published, feedback(deltas, lambda x: integers(x, 4, 64), decay), strict=True):
        assert torch.allclose(ours, naive, atol=1e-6)
    assert ("residual.0" in state.to_tensors()) is (decay > 0)


# Restore and replay.


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "yogi", "delayed_nesterov"])
@pytest.mark.parametrize("down", SPECS)
def test_a_restored_state_is_the_same_to_the_bit_and_goes_on_alike(optimizer: str, down: str) -> None:
    config = configured(optimizer, down)
    state = OuterState(SCHEMA, config, initial_theta())
    for round_number in range(13):
        advance(state, round_number)
    restored = through_json(state, config)
    assert same_state(state, restored) and restored.outer_step == 13
    for round_number in range(13, 17):
        one, _ = advance(state, round_number)
        other, _ = advance(restored, round_number)
        assert one.digest == other.digest
    assert same_state(state, restored)


@pytest.mark.parametrize(
    ("optimizer", "down"),
    [(name, "int8") for name in ("sgd", "adam", "yogi", "delayed_nesterov")] + [("nesterov", text) for text in SPECS],
)
def test_replaying_the_records_gives_the_same_state_to_the_bit(optimizer: str, down: str) -> None:
    """What the journal keeps (D', what it leaves out, verdicts, statistics after) is enough: no contribution is needed."""
    config = configured(optimizer, down)
    state = OuterState(SCHEMA, config, initial_theta())
    advance(state, 0)
    replayed = through_json(state, config)
    recorded = [advance(state, round_number) for round_number in range(1, 16)]
    for commit, records in recorded:
        again = replayed.commit(commit.round_id, commit.reason, list(reversed(records)))
        assert again.digest == commit.digest
        for part, published in zip(again.fragments, commit.fragments, strict=True):
            assert part.payload is not None and published.payload is not None
            assert bytes(part.payload.data) == bytes(published.payload.data)
            assert part.verdicts == published.verdicts
    assert same_state(state, replayed)


# Nothing moves before a commit, and all of it moves then.


def test_reduce_and_record_change_nothing() -> None:
    state = OuterState(SCHEMA, configured(down="int8", record="int8"), initial_theta())
    advance(state, 0)
    before, metadata = kept(state), state.metadata()
    merged = state.reduce(0, contributions(moves(1, 0)))
    assert merged.merged is not None
    mean = merged.merged.clone()
    first, second = state.record(merged), state.record(merged)
    assert torch.equal(merged.merged, mean)
    assert first.payload is not None and second.payload is not None
    assert bytes(first.payload.data) == bytes(second.payload.data)
    assert state.metadata() == metadata
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.to_tensors().items())


HOLDS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda theta: theta,
    "a view": lambda theta: theta[1:3],
    "a detached part": lambda theta: theta.detach()[:2],
    "an array": lambda theta: theta.numpy(),
    "bytes": lambda theta: memoryview(theta.numpy()),
    "a parameter": lambda theta: torch.nn.Parameter(theta, requires_grad=False),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_theta_that_is_held_stays_as_it_is_and_only_then_is_it_copied(hold: Callable[[Tensor], object]) -> None:
    state = OuterState(SCHEMA, configured(down="int8"), initial_theta())
    first = state.to_tensors()["theta.0"]
    held = hold(state.theta[0])
    before = torch.as_tensor(np.asarray(held)).clone()
    for round_number in range(2):
        advance(state, round_number)
        assert torch.equal(torch.as_tensor(np.asarray(held)), before), "as it was, however many commits came since"
    moved = state.to_tensors()["theta.0"]
    assert moved is not first
    assert state.digest == digest(state.theta)
    del held
    advance(state, 2)
    assert state.to_tensors()["theta.0"] is moved, "written in place again"
    assert state.digest == digest(state.theta)


@pytest.mark.covering
@pytest.mark.parametrize("down", SPECS)
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "yogi", "delayed_nesterov"])
def test_what_is_staged_before_a_commit_changes_nothing_and_is_what_the_commit_publishes(down: str, optimizer: str) -> None:
    config = configured(optimizer, down)
    ahead, at_the_commit = (OuterState(SCHEMA, config, initial_theta()) for _ in range(2))
    first = ahead.to_tensors()["theta.0"]
    for round_number in range(5):
        expected, _ = advance(at_the_commit, round_number)
        merged = [ahead.reduce(i, contributions(moves(round_number, i))) for i in range(len(NUMELS))]
        records = [ahead.record(one) for one in merged]
        before, metadata = kept(ahead), ahead.metadata()
        staged = {record.fragment_id: ahead.stage(record) for record in records}
        assert ahead.metadata() == metadata
        assert all(torch.equal(tensor, before[name]) for name, tensor in ahead.to_tensors().items())
        commit = ahead.commit(round_number + 1, "all in", records, staged=staged)
        assert [part.payload for part in commit.fragments] == [staged[i].payload for i in range(len(NUMELS))]
        assert [bytes(part.payload.data) for part in commit.fragments if part.payload is not None] == [
            bytes(part.payload.data) for part in expected.fragments if part.payload is not None
        ]
        assert commit.digest == expected.digest == digest(ahead.theta)
    assert same_state(ahead, at_the_commit)
    assert ahead.to_tensors()["theta.0"] is first, "written in place"


@pytest.mark.parametrize("record", ["fp32", "bf16", "int8", "int4:block=64", "e3m0"])
def test_the_optimizer_is_given_what_is_recorded_by_the_reference(record: str) -> None:
    """theta is Nesterov's of the means as the naive feedback sends them; bf16 rounds each element and owes nothing."""
    config = configured(penalty=PenaltyConfig(enabled=False), record=record, down_residual="fp32")
    state, deltas = OuterState(SCHEMA, config, initial_theta()), []
    for round_number in range(8):
        deltas.append(moves(round_number, 0)["a"])
        records = [state.record(state.reduce(i, contributions({"a": moves(round_number, i)["a"]}))) for i in range(len(NUMELS))]
        state.commit(round_number, "", records)
    naive: dict[str, Callable[[Tensor], Tensor]] = {
        "fp32": lambda x: x,
        "bf16": lambda x: x.bfloat16().float(),
        "int8": lambda x: integers(x, 8, 256),
        "int4:block=64": lambda x: integers(x, 4, 64),
        "e3m0": lambda x: e3m0(x, 256),
    }
    decay = 0.0 if record in ("fp32", "bf16") else 1.0
    theta, momentum = initial_theta()[0], torch.zeros(NUMELS[0])
    for sent in feedback(deltas, naive[record], decay):
        theta, momentum = nesterov(theta, momentum, sent, 0.7, 0.6)
    assert torch.allclose(state.theta[0], theta, atol=1e-5)
    assert ("unrecorded.0" in state.to_tensors()) is (decay > 0)


@pytest.mark.parametrize("record", ["bf16", "int8"])
def test_a_merge_that_is_not_finite_once_it_is_encoded_is_a_rollback_and_owes_what_it_owed(record: str) -> None:
    state = OuterState(SCHEMA, configured(record=record), initial_theta())
    advance(state, 0)
    before, largest = kept(state), torch.finfo(torch.float32).max
    merged = [Merged(i, torch.full((numel,), largest), (), {}, largest, 1.0) for i, numel in enumerate(NUMELS)]
    commit = state.commit(1, "", [state.record(one) for one in merged])
    assert [part.payload for part in commit.fragments] == [None, None]
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.to_tensors().items())


def test_a_record_whose_bytes_cannot_be_decoded_changes_nothing() -> None:
    state = OuterState(SCHEMA, configured(down="int8", record="int8"), initial_theta())
    records = [state.record(state.reduce(i, contributions(moves(0, i)))) for i in range(len(NUMELS))]
    before, metadata, payload = kept(state), state.metadata(), records[1].payload
    assert payload is not None
    short = dataclasses.replace(records[1], payload=EncodedTensor("int8", 5, bytes(payload.data)[:-1]), largest=None)
    with pytest.raises(RemoteProtocolError, match="8 bytes cannot be 5 elements in int8"):
        state.commit(1, "", [records[0], short])
    other = dataclasses.replace(records[1], payload=encode("int8", torch.ones(6)))
    with pytest.raises(LocalProtocolError, match="fragment 1: a record of 6 elements, not 5"):
        state.commit(1, "", [records[0], other])
    assert state.metadata() == metadata
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.to_tensors().items())
    assert len(records) == 2


def test_a_commit_needs_every_fragment_once_and_staged_at_this_outer_step() -> None:
    state = OuterState(SCHEMA, configured(), initial_theta())
    records = [state.record(state.reduce(i, contributions(moves(0, i)))) for i in range(len(NUMELS))]
    late, before = list(records), state.metadata()
    for wrong in ([], records[:1], [*records, records[0]], [records[0], records[0]]):
        with pytest.raises(LocalProtocolError, match=r"outer step 1 needs fragments \[0, 1\], each once"):
            state.commit(1, "", wrong)
    assert state.metadata() == before
    state.commit(1, "", records)
    assert records == [], "their memory is free as soon as they are applied"
    with pytest.raises(LocalProtocolError, match="another outer step"):
        state.commit(2, "", late)


def test_a_rollback_fragment_keeps_theta_momentum_and_residual_while_the_other_moves() -> None:
    state = OuterState(SCHEMA, configured(down="int8"), initial_theta())
    advance(state, 0)
    before = kept(state)
    broken = {p: torch.full((NUMELS[0],), math.nan) for p in "abc"}
    merged = [state.reduce(0, contributions(broken)), state.reduce(1, contributions(moves(1, 1)))]
    commit = state.commit(2, "", [state.record(one) for one in merged])
    after = state.to_tensors()
    assert commit.fragments[0].payload is None and commit.fragments[1].payload is not None
    assert all(torch.equal(after[name], before[name]) for name in before if name.split(".")[1] == "0")
    assert not torch.equal(after["theta.1"], before["theta.1"])
    assert state.outer_step == 2 and commit.digest == digest(state.theta)


@pytest.mark.parametrize("codec_name", codec_names())
def test_t2_a_broken_peer_never_poisons_theta(codec_name: str) -> None:
    state = OuterState(SCHEMA, configured(down="bf16"), initial_theta())
    for round_number, value in enumerate((math.nan, math.inf, -math.inf, 1e30)):
        records = []
        for i in range(len(NUMELS)):
            deltas = moves(round_number, i)
            deltas["b"][0] = value
            records.append(state.record(state.reduce(i, contributions(deltas, codec_name))))
        state.commit(round_number, "", records)
    assert all(bool(tensor.isfinite().all()) for tensor in state.to_tensors().values())


@pytest.mark.parametrize(("down", "optimizer", "size"), [("fp16", "sgd", 1e6), ("fp32", "adam", 5e19), ("bf16", "sgd", 3.4e38)])
def test_a_step_that_overflows_is_a_rollback(down: str, optimizer: str, size: float) -> None:
    """fp16 ends at 65504, Adam squares, and bf16 rounds fp32's largest numbers up to Inf."""
    state = OuterState(SCHEMA, configured(optimizer, down, lr=1.0), initial_theta())
    before = kept(state)
    merged = [Merged(i, torch.full((numel,), size), (), {}, size, 1.0) for i, numel in enumerate(NUMELS)]
    commit = state.commit(1, "", [state.record(one) for one in merged])
    assert [part.payload for part in commit.fragments] == [None, None]
    after = state.to_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_momentum_that_overflows_theta_is_a_rollback_also_when_what_was_merged_is_small() -> None:
    state = OuterState(SCHEMA, configured("nesterov", "int8", lr=100.0), initial_theta())
    payloads = []
    for size in (1.0, 1.5e36, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3):
        before = kept(state)
        merged = [Merged(i, torch.full((numel,), size), (), {}, size, 1.0) for i, numel in enumerate(NUMELS)]
        commit = state.commit(state.outer_step + 1, "", [state.record(one) for one in merged])
        payloads.append(commit.fragments[0].payload)
    assert payloads[1] is not None and payloads[-1] is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.to_tensors().items())


@pytest.mark.covering
@pytest.mark.parametrize("size", [1e6, 1e12, 5e19, 1e30, 3.4e38])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "yogi"])
@pytest.mark.parametrize("down", ["fp32", "fp16", "int8"])
def test_steps_of_any_size_after_small_ones_are_those_that_are_staged(down: str, optimizer: str, size: float) -> None:
    """Also those that overflow: small ones are taken without being staged."""
    state, staged = (OuterState(SCHEMA, configured(optimizer, down), initial_theta()) for _ in range(2))
    for round_number in range(3):
        for each in (state, staged):
            advance(each, round_number)
    for _ in range(3):
        merged = [Merged(i, torch.full((numel,), size), (), {}, size, 1.0) for i, numel in enumerate(NUMELS)]
        records = [state.record(one) for one in merged]
        steps = {record.fragment_id: staged.stage(record) for record in records}
        staged.commit(staged.outer_step + 1, "", list(records), staged=steps)
        state.commit(state.outer_step + 1, "", records)
        assert same_state(state, staged)
        assert all(bool(tensor.isfinite().all()) for tensor in state.to_tensors().values())


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "delayed_nesterov", "adam", "yogi"])
def test_a_fragment_that_was_not_staged_is_gone_through_once(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """From the second commit on: the first one measures the magnitudes before it."""
    state, steps = OuterState(SCHEMA, configured(optimizer, "int8"), initial_theta()), list[int]()

    built_in = type(state._optimizer)
    step = built_in.step

    def counted(self: Any, slots: Slots, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        steps.append(mean.numel())
        return step(self, slots, mean)

    monkeypatch.setattr(built_in, "step", counted)
    advance(state, 0)
    assert sum(steps) == 2 * sum(NUMELS)
    steps.clear()
    advance(state, 1)
    assert sum(steps) == sum(NUMELS)


def test_statistics_of_absent_peers_are_kept() -> None:
    state = OuterState(SCHEMA, configured(), initial_theta())
    advance(state, 0)
    records = [state.record(state.reduce(i, contributions({"a": moves(1, i)["a"]}))) for i in range(len(NUMELS))]
    state.commit(2, "", records)
    known = state.metadata()["statistics"][0]
    assert {peer_id: NormStatistics.from_json(written).count for peer_id, written in known.items()} == {"a": 2, "b": 1, "c": 1}


# Wrong input.


@pytest.mark.parametrize(
    "theta",
    [
        [torch.zeros(700)],
        [torch.zeros(700), torch.zeros(6)],
        [torch.zeros(700, 1), torch.zeros(5)],
        [torch.zeros(700), torch.zeros(5, dtype=torch.bfloat16)],
    ],
)
def test_t15_theta_that_is_not_flat_fp32_of_the_schema_is_refused(theta: list[Tensor]) -> None:
    with pytest.raises(LocalProtocolError):
        OuterState(SCHEMA, configured(), theta)


def damaged(name: str, tensor: Tensor | None) -> tuple[dict[str, Tensor], dict[str, object]]:
    state = OuterState(SCHEMA, configured(), initial_theta())
    advance(state, 0)
    tensors = dict(state.to_tensors())
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors, state.metadata()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("theta.1", None, "theta.1 is missing"),
        ("outer.0.momentum", None, "outer.0.momentum is missing"),
        ("outer.0.momentum", torch.zeros(3), "not 700 fp32"),
        ("theta.1", torch.zeros(5), "does not match its digest"),
        ("theta.1", torch.zeros(5, dtype=torch.float64), "not 5 fp32"),
    ],
)
def test_a_damaged_checkpoint_is_a_storage_error_that_names_the_tensor(name: str, tensor: Tensor | None, message: str) -> None:
    tensors, metadata = damaged(name, tensor)
    with pytest.raises(StorageError, match=message):
        OuterState.restore(SCHEMA, configured(), tensors, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outer_step": None}, "outer_step"),
        ({"statistics": [{"a": [1.0]}]}, "statistics of fragment 0"),
        ({"statistics": 3}, "0"),
    ],
)
def test_damaged_metadata_is_a_storage_error(change: dict[str, object], message: str) -> None:
    state = OuterState(SCHEMA, configured(), initial_theta())
    with pytest.raises(StorageError, match=message):
        OuterState.restore(SCHEMA, configured(), state.to_tensors(), {**state.metadata(), **change})


def test_another_optimizer_or_model_is_a_configuration_error_but_another_rate_or_codec_is_fine() -> None:
    state = OuterState(SCHEMA, configured(down="int8"), initial_theta())
    advance(state, 0)
    tensors, metadata = state.to_tensors(), state.metadata()
    with pytest.raises(ConfigError, match=r'outer.optimizer = "adam", but .* "nesterov"'):
        OuterState.restore(SCHEMA, configured("adam"), tensors, metadata)
    other = Schema((dataclasses.replace(SCHEMA.fragments[0], name="else"), SCHEMA.fragments[1]))
    with pytest.raises(ConfigError, match="another model"):
        OuterState.restore(other, configured(), tensors, metadata)
    lossless = OuterState.restore(SCHEMA, configured(down="fp32", lr=0.1), tensors, metadata)
    assert "residual.0" in lossless.to_tensors()
    advance(lossless, 1)
    assert "residual.0" not in lossless.to_tensors(), "fp32 has sent what int8 still owed"
