"""Mode `forward`: each fragment's update is in before its own layer's forward, and only then; exactly once (T5 to T8, T14)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edit.errors import ConfigError, RemoteProtocolError, TransportError
from edit.fragments.digest import digest
from edit.records import Aborted, Committed, EncodedTensor, NeedsSnapshot, Outcome, Snapshot, Verdict
from edit.replica.device_copies import Transfers
from edit.replica.ranks import Ranks
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker
from tests.support.models import TinyTransformer, token_batches, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of
from tests.support.settings import worker_config

FRAGMENTS = ["embed", "blocks.0", "blocks.1", "norm", "head"]


@dataclass
class Late:
    """A payload on its way. fault: what its first wait ends with."""

    payload: EncodedTensor
    name: str
    log: list[str]
    fault: Exception | None = None

    def wait(self) -> EncodedTensor:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.log.append(f"update {self.name}")
        return self.payload


@dataclass
class Peer:
    """A worker in mode forward on a transformer, and the order in which updates and layers come."""

    config: dict[str, Any] = field(default_factory=dict)
    model: nn.Module = field(default_factory=TinyTransformer)

    def __post_init__(self) -> None:
        self.log: list[str] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.collective = ScriptedCollective()
        settings = {"every": 1, "codec": "fp32", "mode": "forward"} | self.config
        self.worker = EditWorker(self.model, self.optimizer, self.collective, worker_config(**settings))
        self.worker.__enter__()
        self.batches = token_batches(0)
        for name, module in self.model.named_modules():
            if name in FRAGMENTS:
                module.register_forward_pre_hook(lambda _, __, name=name: self.log.append(f"layer {name}"))

    def step(self) -> None:
        train_step(self.model, self.optimizer, next(self.batches))

    def forward(self) -> Tensor:
        return self.model(next(self.batches)[0])

    @property
    def local(self) -> list[Tensor]:
        return Replica(self.model).local()

    @property
    def theta(self) -> Snapshot:
        outer = self.worker.outer_of()[1]
        return Snapshot(outer.outer_step, outer.digest, outer.fragments)

    def script(self, faults: dict[str, Exception] | None = None, verdicts: list[Verdict | None] | None = None) -> Snapshot:
        """A commit on theta whose payloads are still arriving, as the next answer; returns theta after it."""
        answer, after = self.arriving(faults or {}, verdicts or [Verdict.OK] * 5)
        self.collective.answers[self.worker.outer_step].append(answer)
        return after

    def arriving(self, faults: dict[str, Exception], verdicts: list[Verdict | None]) -> tuple[Outcome, Snapshot]:
        answer, after = committed(self.theta, random_steps(self.theta), verdicts)
        late = tuple(
            Late(part.payload, name, self.log, faults.get(name))
            for part, name in zip(answer.commit.fragments, FRAGMENTS, strict=True)
            if part.payload is not None
        )
        return Committed(answer.commit, late), after


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(**settings: Any) -> Peer:
        peers.append(Peer(**settings))
        return peers[-1]

    yield make
    for one in peers:
        one.worker.__exit__(KeyboardInterrupt, None, None)


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_each_update_is_awaited_just_before_its_own_layer(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    after = p.script()
    p.log.clear()
    p.forward()
    assert p.log == [f"{what} {name}" for name in FRAGMENTS for what in ("update", "layer")]
    assert same(p.local, after.fragments) and p.worker.outer_step == 1 and p.worker.digest == after.digest
    assert not p.worker.pending and p.collective.waited == 1


def test_the_outer_step_advances_with_the_last_fragment_only(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    before = p.theta
    p.script()
    seen: list[tuple[int, str]] = []
    p.model.head.register_forward_pre_hook(lambda *_: seen.append((p.worker.outer_step, p.worker.digest)), prepend=True)
    p.forward()
    assert seen == [(0, before.digest)] and p.worker.outer_step == 1


def test_later_forwards_apply_nothing_more_and_ask_nothing(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    after = p.script()
    p.forward()
    asked = len(p.collective.asked)
    for _ in range(3):
        p.forward()
    assert same(p.local, after.fragments) and len(p.collective.asked) == asked and len(p.collective.rounds()) == 1


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_t7_an_evaluation_right_after_the_exchange_sees_the_merged_parameters(
    peer: Callable[..., Peer], guard: Callable[[], torch.no_grad]
) -> None:
    p = peer()
    p.step()
    after = p.script()
    tokens = next(p.batches)[0]
    p.model.eval()
    with guard():
        seen = p.model(tokens)
    reference = TinyTransformer(seed=9)
    replica = Replica(reference)
    for i, vector in enumerate(after.fragments):
        replica.load_local(i, vector)
    with torch.no_grad():
        assert torch.equal(seen, reference(tokens))
    assert not any(part.is_inference() for part in p.theta.fragments)
    p.model.train()
    for _ in range(2):
        p.step()
        p.script()
    p.forward()
    assert p.worker.outer_step == 3


class Checkpointed(TinyTransformer):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("reentrant", [True, False])
def test_t6_recomputation_applies_nothing_twice_and_the_gradients_are_of_the_merged_parameters(
    peer: Callable[..., Peer], reentrant: bool
) -> None:
    plain, p = peer(), peer(model=Checkpointed(reentrant))
    grads = []
    for one in (plain, p):
        one.step()
        one.script()
        inputs, targets = next(one.batches)
        one.optimizer.zero_grad()
        nn.functional.cross_entropy(one.model(inputs).flatten(0, 1), targets.flatten()).backward()
        grads.append([parameter.grad for parameter in one.model.parameters()])
        assert one.worker.outer_step == 1 and one.collective.waited == 1 and len(one.collective.rounds()) == 1
    assert [line for line in p.log if line.startswith("update")] == [f"update {name}" for name in FRAGMENTS]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_accumulation_applies_in_the_first_forward_only(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    after = p.script()
    for _ in range(3):
        inputs, targets = next(p.batches)
        nn.functional.cross_entropy(p.model(inputs).flatten(0, 1), targets.flatten()).backward()
        assert same(p.local, after.fragments)
    p.optimizer.step()
    assert p.worker.inner_steps == 2 and len(p.collective.rounds()) == 2


def test_t8_saving_in_the_middle_of_a_forward_triggers_nothing(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    p.script()
    saved: list[dict[str, Any]] = []
    p.model.blocks[1].register_forward_pre_hook(
        lambda *_: saved.append({"model": p.model.state_dict(), "worker": p.worker.state_dict()}), prepend=True
    )
    p.forward()
    assert saved[0]["worker"]["scalars"]["pending"]["applied"] == [0, 1] and saved[0]["worker"]["scalars"]["outer_step"] == 0
    assert p.worker.outer_step == 1 and p.collective.waited == 1


@pytest.mark.parametrize("look", ["outer_parameters", "outer_state_dict"])
def test_after_a_forward_of_a_part_the_outer_parameters_are_of_one_outer_step(peer: Callable[..., Peer], look: str) -> None:
    p = peer()
    p.step()
    after = p.script()
    with torch.no_grad():
        p.model.embed(next(p.batches)[0])
    assert p.worker.outer_step == 0
    if look == "outer_parameters":
        with p.worker.outer_parameters():
            assert same(p.local, after.fragments)
    else:
        named = p.worker.outer_state_dict()
        assert same(
            [torch.cat([named[t.name].flatten() for t in f.tensors]) for f in p.worker.outer_of()[0].fragments], after.fragments
        )
    assert p.worker.outer_step == 1 and same(p.local, after.fragments)
    p.step()
    assert p.worker.inner_steps == 2


def test_after_an_exception_in_a_forward_the_outer_parameters_are_what_is_applied(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    before, after = p.theta, p.script()
    with torch.no_grad():
        p.model.embed(next(p.batches)[0])
    p.worker.__exit__(KeyboardInterrupt, None, None)
    p.log.clear()
    with p.worker.outer_parameters():
        assert same(p.local, [after.fragments[0], *before.fragments[1:]])
    named = p.worker.outer_state_dict()
    assert torch.equal(named["embed.weight"].flatten(), after.fragments[0])
    assert p.log == [], "no update is waited for"


def test_what_no_forward_touches_is_in_before_the_next_step(peer: Callable[..., Peer]) -> None:
    class Branches(nn.Module):
        """Two experts, of which one is used (T21)."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    model = Branches()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    config = worker_config(every=1, codec="fp32", mode="forward")
    with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, collective, config) as worker:
        inputs = torch.ones(1, 4)
        model(inputs).sum().backward()
        optimizer.step()
        theta = snapshot_of(0, list(worker.outer_of()[1].fragments))
        answer, after = committed(theta, random_steps(theta), [Verdict.OK] * 2)
        collective.answers[0].append(answer)
        optimizer.zero_grad()
        model(inputs).sum().backward()
        assert worker.outer_step == 0 and worker.pending
        replica = Replica(model)
        assert torch.equal(replica.local_fragment(0), after.fragments[0])
        assert not torch.equal(replica.local_fragment(1), after.fragments[1])
        optimizer.step()
        assert worker.outer_step == 1 and torch.equal(replica.local_fragment(1), after.fragments[1])
        raise KeyboardInterrupt


def test_on_a_gpu_what_is_in_only_before_the_next_step_is_written_after_the_backward(peer: Callable[..., Peer]) -> None:
    """A weight that is used without its module's forward: the queued backward still reads it (no GPU is needed to see that)."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(self.first(inputs), self.second.weight, self.second.bias)

    class Copies(Transfers):
        """Whether each copy waits for all that is queued, as the marks say."""

        unchanged = False

        def mark_unchanged(self) -> None:
            self.unchanged = True

        def mark_changing(self) -> None:
            self.unchanged = False

        @contextmanager
        def beside(self) -> Iterator[None]:
            log.append("waits for nothing" if self.unchanged else "waits for all")
            yield

    log: list[str] = []
    model = Functional()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    with (
        pytest.raises(KeyboardInterrupt),
        EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32", mode="forward")) as worker,
    ):
        worker._exchanges[0].replica.transfers = Copies([])
        inputs = torch.ones(1, 4)
        model(inputs).sum().backward()
        optimizer.step()
        theta = snapshot_of(0, list(worker.outer_of()[1].fragments))
        collective.answers[0].append(committed(theta, random_steps(theta), [Verdict.OK] * 2)[0])
        log.clear()
        model(inputs).sum().backward()
        assert set(log) == {"waits for nothing"} and worker.outer_step == 0
        log.clear()
        worker.synchronize()
        assert set(log) == {"waits for all"} and worker.outer_step == 1
        raise KeyboardInterrupt


def test_a_loop_that_never_calls_the_root_takes_the_updates_too(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    after = p.script()
    inputs, targets = next(p.batches)
    hidden = p.model.embed(inputs)
    for block in p.model.blocks:
        hidden = block(hidden)
    loss = nn.functional.cross_entropy(p.model.head(p.model.norm(hidden)).flatten(0, 1), targets.flatten())
    assert same(p.local, after.fragments) and p.worker.outer_step == 1
    p.optimizer.zero_grad()
    loss.backward()
    p.optimizer.step()
    assert p.worker.inner_steps == 2


def test_a_link_that_breaks_in_the_middle_keeps_what_is_in_and_replays_the_rest_later(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    theta, sent = p.theta, p.local
    after = p.script({"blocks.1": TransportError("broken pipe")})
    p.forward()
    assert same(p.local[:2], after.fragments[:2]) and same(p.local[2:], sent[2:])
    assert p.worker.outer_step == 0 and p.worker.digest == theta.digest and p.worker.pending
    assert p.worker.last_reason == "broken pipe"
    p.collective.answers[0].append(None)  # still cut off, asked for at the boundary
    p.step()
    assert len(p.collective.rounds()) == 1, "nothing is contributed to an outer step without an answer"
    before = p.local
    p.collective.answers[0].append(Committed(committed(theta, random_steps(theta), [Verdict.OK] * 5)[0].commit))
    assert p.worker.synchronize() and p.worker.outer_step == 1 and p.worker.digest == after.digest
    assert same(p.local[:2], before[:2]), "what is in already is not applied twice"
    assert same(p.local[2:], [o + (now - then) for o, now, then in zip(after.fragments, before, sent, strict=True)][2:])
    p.step()
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [2] * 5


def test_a_snapshot_taken_after_a_broken_link_keeps_the_progress_of_what_was_in(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    theta, sent = p.theta, p.local
    after = p.script({"blocks.1": TransportError("broken pipe")})
    p.forward()
    p.collective.answers[0].append(None)
    p.step()
    before = p.local
    p.collective.answers[0].append(committed(theta, random_steps(theta), [Verdict.OK] * 5, digest_of="of the run")[0])
    right = snapshot_of(1, [part + 1.0 for part in after.fragments])
    p.collective.snapshots.append(right)
    assert p.worker.synchronize() and p.worker.digest == right.digest
    origin = [*after.fragments[:2], *sent[2:]]
    assert same(p.local, [o + (now - then) for o, now, then in zip(right.fragments, before, origin, strict=True)])


def test_a_bad_payload_is_the_other_sides_fault(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    p.script({"norm": RemoteProtocolError("bytes")})
    with pytest.raises(RemoteProtocolError, match="bytes"):
        p.forward()


def test_fragments_with_another_verdict_keep_their_rule(peer: Callable[..., Peer]) -> None:
    p = peer(config={"codec": "int8"})
    p.step()
    theta, sent = p.theta, p.local
    after = p.script(verdicts=[Verdict.OK, None, Verdict.ANOMALOUS, Verdict.NONFINITE, Verdict.OK])
    p.forward()
    expected = list(after.fragments)
    expected[1] = after.fragments[1] + (sent[1] - theta.fragments[1])
    assert same(p.local, expected)
    assert p.worker.state_dict()["scalars"]["fragments"]["residual"] == [0, 4]


def test_a_rolled_back_fragment_leaves_no_residual_of_a_good_contribution(peer: Callable[..., Peer]) -> None:
    p = peer(config={"codec": "int8"})
    p.step()
    answer, after = committed(p.theta, [None, *random_steps(p.theta)[1:]], [Verdict.OK] * 5)
    p.collective.answers[0].append(answer)
    p.forward()
    assert same(p.local, after.fragments)
    assert p.worker.state_dict()["scalars"]["fragments"]["residual"] == [1, 2, 3, 4]


def test_a_contribution_that_came_too_late_is_replayed_at_once_and_sent_again(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    theta, sent = p.theta, p.local
    after = p.script(verdicts=[None] * 5)
    p.forward()
    expected = [o + (own - start) for o, own, start in zip(after.fragments, sent, theta.fragments, strict=True)]
    assert same(p.local, expected) and p.worker.outer_step == 1 and p.worker.pending
    assert [c.outer_step for c in p.collective.rounds()[1]] == [1] * 5


def test_a_wrong_digest_is_healed_before_the_next_step(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    answer, after = committed(p.theta, random_steps(p.theta), [Verdict.OK] * 5, digest_of="of the run")
    p.collective.answers[0].append(answer)
    right = snapshot_of(1, [part + 1.0 for part in after.fragments])
    p.collective.snapshots.append(right)
    loss = p.forward().sum()
    assert p.worker.outer_step == 1 and same(p.local, after.fragments)
    loss.backward()
    p.optimizer.zero_grad()
    p.optimizer.step()
    assert p.worker.digest == right.digest and "another digest" in p.worker.last_reason


def test_a_wrong_digest_is_healed_once_the_link_is_back(peer: Callable[..., Peer]) -> None:
    p = peer(config={"every": 4})
    for _ in range(4):
        p.step()
    answer, after = committed(p.theta, random_steps(p.theta), [Verdict.OK] * 5, digest_of="of the run")
    p.collective.answers[0].append(answer)
    right = snapshot_of(1, [part + 1.0 for part in after.fragments])
    p.collective.snapshots.extend([TransportError("unreachable"), right])
    p.forward().sum().backward()
    p.optimizer.zero_grad()
    p.optimizer.step()
    assert p.worker.digest == digest(after.fragments), "cut off"
    p.optimizer.step()
    assert p.worker.digest == right.digest and "another digest" in p.worker.last_reason
    p.optimizer.step()
    assert not p.collective.snapshots, "one was enough"


def test_commits_made_meanwhile_are_caught_up_with_before_the_next_step(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    middle = p.script()
    second, last = committed(middle, random_steps(middle, 2), [None] * 5)
    p.collective.answers[1].append(second)
    loss = p.forward().sum()
    assert p.worker.outer_step == 1
    loss.backward()
    p.optimizer.zero_grad()
    p.optimizer.step()
    assert p.worker.outer_step == 2 and p.worker.digest == last.digest


def test_leaving_and_synchronizing_end_what_is_arriving(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    after = p.script()
    p.model.embed(next(p.batches)[0])
    assert p.worker.outer_step == 0 and p.worker.synchronize() and p.worker.digest == after.digest
    p.step()
    last = p.script()
    p.model.embed(next(p.batches)[0])
    p.worker.__exit__(None, None, None)
    assert p.worker.outer_step == 2 and same(p.local, last.fragments)
    p.worker.__enter__()


def test_aborted_and_behind_end_the_round_as_in_blocking(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step()
    local = p.local
    p.collective.answers[0].append(Aborted("too few"))
    p.forward()
    assert same(p.local, local) and not p.worker.pending
    p.step()
    target = snapshot_of(9, [part + 0.25 for part in p.theta.fragments])
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(target)
    p.forward()
    assert p.worker.outer_step == 9 and same(p.local, target.fragments)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_block_gets_its_update_around_the_compiled_code(peer: Callable[..., Peer], in_place: bool) -> None:
    model = TinyTransformer()
    for i, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="eager")
        else:
            model.blocks[i] = torch.compile(block, backend="eager")
    p = peer(model=model)
    for _ in range(2):
        p.step()
        after = p.script()
        p.forward()
        assert same(p.local, after.fragments)
    assert p.worker.outer_step == 2 and p.collective.schema is not None
    assert [fragment.name for fragment in p.collective.schema.fragments] == FRAGMENTS


def test_a_wholly_compiled_model_takes_the_updates_before_its_next_step(peer: Callable[..., Peer]) -> None:
    p = peer()
    compiled = torch.compile(p.model, backend="eager")
    for _ in range(3):
        if p.worker.pending:
            p.script()
        train_step(compiled, p.optimizer, next(p.batches))
    assert p.worker.outer_step == 2 and len(p.collective.rounds()) == 3


def test_a_tied_weight_is_in_before_its_first_use(peer: Callable[..., Peer]) -> None:
    model = TinyTransformer()
    model.head.weight = model.embed.weight
    p = peer(model=model)
    p.step()
    theta = p.theta
    answer, after = committed(theta, random_steps(theta), [Verdict.OK] * 4)
    p.collective.answers[0].append(answer)
    p.forward()
    assert same(p.local, after.fragments) and p.worker.outer_step == 1


# Strict.


def test_strict_asks_until_there_is_an_outcome_and_sends_the_same_bytes_again() -> None:
    for mode in ("blocking", "forward", "delayed"):
        p = Peer(config={"strict": True, "mode": mode, "codec": "int8"})
        p.step()
        p.collective.answers[0] += [None, None, Aborted("too few"), None, Aborted("again")]
        after = p.script()
        p.step() if mode == "delayed" else p.forward()
        first, second, third = ([bytes(c.payload.data) for c in attempt] for attempt in p.collective.rounds()[:3])
        assert first == second == third and p.collective.waited == 6
        assert p.worker.outer_step == 1 and p.worker.digest == after.digest
        p.worker.__exit__(KeyboardInterrupt, None, None)


def test_strict_goes_on_at_once_with_updates_that_broke_off() -> None:
    p = Peer(config={"strict": True})
    p.step()
    theta = p.theta
    after = p.script({"blocks.1": TransportError("broken pipe")})
    p.collective.answers[0].append(Committed(committed(theta, random_steps(theta), [Verdict.OK] * 5)[0].commit))
    p.forward()
    assert p.worker.outer_step == 1 and same(p.local, after.fragments)
    p.worker.__exit__(KeyboardInterrupt, None, None)


def test_strict_takes_no_snapshot_for_an_answer_until_it_has_one() -> None:
    p = Peer(config={"strict": True, "mode": "blocking"})
    p.step()
    target = snapshot_of(9, [part + 0.25 for part in p.theta.fragments])
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots += [TransportError("unreachable"), TransportError("unreachable"), target]
    p.forward()
    assert p.worker.outer_step == 9 and same(p.local, target.fragments)
    p.worker.__exit__(KeyboardInterrupt, None, None)


def test_ranks_agree_on_a_write_as_often_however_often_each_calls_a_layer(peer: Callable[..., Peer], monkeypatch: Any) -> None:
    """A layer that is not of this outer step: one rank's batch may call it more often than another's (tokens, experts)."""
    p = peer(config={"every": 2, "groups": 2})
    p.step()
    steps = [step if i % 2 == 0 else None for i, step in enumerate(random_steps(p.theta))]
    commit = committed(p.theta, steps, [Verdict.OK] * 5)[0].commit
    p.collective.answers[0].append(Committed(dataclasses.replace(commit, fragments=commit.fragments[::2])))
    agreed: list[object] = []
    together = Ranks.together

    def counted(ranks: Ranks, call: Callable[[], Any]) -> Any:
        agreed.append(call)
        return together(ranks, call)

    monkeypatch.setattr(Ranks, "together", counted)
    p.worker.take_awaited()
    assert p.worker.pending and agreed
    agreed.clear()
    for _ in range(3):
        p.model.blocks[0](torch.zeros(1, 2, 8))  # type: ignore[index,operator]
    assert not agreed
    with torch.no_grad():
        p.model.embed.weight.fill_(7.0)  # type: ignore[union-attr,operator]
    with pytest.raises(ConfigError, match="parameters of embed were written"):
        p.forward()
