"""EditWorker against a scripted carrier: what it sends and when, and that nothing else triggers or skips an exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from edit.codecs import decode
from edit.collective import CompositeCollective
from edit.config.run import CodecConfig, FragmentCodec
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from edit.records import Aborted, Progress, Snapshot
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import TinyTransformer, regression_batches, small_mlp, token_batches, train_step
from tests.support.ranks import at_every_rank
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of
from tests.support.scripted_peer import BOTH_OK, Peer, commit_next, flat, outer_vectors, same
from tests.support.settings import worker_config

# Entering and leaving.


def test_t19_entering_loads_the_runs_parameters() -> None:
    theirs = snapshot_of(4, flat(small_mlp(seed=1)))
    model = small_mlp(seed=2)
    with EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(theirs), WorkerConfig()) as worker:
        assert same(flat(model), list(theirs.fragments))
        assert (worker.outer_step, worker.digest) == (4, theirs.digest)


def test_the_founder_keeps_its_own(peer: Callable[..., Peer]) -> None:
    p = peer()
    assert same(flat(p.model), flat(small_mlp())) and p.worker.outer_step == 0


def test_leaving_waits_for_the_outcome_and_removes_every_hook() -> None:
    model = small_mlp()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    with EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32")) as worker:
        theta = snapshot_of(0, outer_vectors(worker))
        train_step(model, optimizer, next(regression_batches(0)))
        answer, after = committed(theta, random_steps(theta), BOTH_OK)
        collective.answers[0].append(answer)
    assert worker.outer_step == 1 and same(flat(model), list(after.fragments))
    train_step(model, optimizer, next(regression_batches(0)))
    assert worker.inner_steps == 1 and len(collective.rounds()) == 1


def test_leaving_by_an_exception_waits_for_nothing() -> None:
    model = small_mlp()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    worker = EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32"))
    with pytest.raises(KeyboardInterrupt), worker:
        train_step(model, optimizer, next(regression_batches(0)))
        raise KeyboardInterrupt
    assert collective.waited == 0 and not worker.pending
    train_step(model, optimizer, next(regression_batches(0)))
    assert worker.inner_steps == 1


class Connected(ScriptedCollective):
    """A connection that says for how many ranks it was made."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def join(self, *arguments: Any) -> Snapshot:
        self.joined = True
        return super().join(*arguments)


@pytest.mark.parametrize("shares", [1, 2])
def test_a_connection_of_more_ranks_is_refused_before_anything_is_sent(shares: int) -> None:
    model, connections = small_mlp(), [Connected(1), Connected(2)][-shares:]
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), CompositeCollective(connections), WorkerConfig())
    with pytest.raises(
        ConfigError, match=r"^ranks: .* made for 2 ranks of one peer, this EditWorker for 1: give .*world"
    ) as error:
        worker.__enter__()
    assert "\n" not in str(error.value) and not any(hasattr(each, "joined") for each in connections)


def refused(ranks: int) -> str:
    model = DistributedDataParallel(small_mlp())
    with pytest.raises(ConfigError) as error:
        EditWorker(model, torch.optim.SGD(model.parameters()), Connected(ranks), WorkerConfig()).__enter__()
    return str(error.value)


def test_a_connection_of_one_rank_is_refused_at_every_rank_of_a_worker_of_several(tmp_path: Path) -> None:
    said = at_every_rank(refused, 2, tmp_path, 1)
    assert said[0] == said[1] and "for 1 ranks of one peer, this EditWorker for 2: connect in each rank" in said[0]


def test_a_connection_of_this_rank_alone_is_taken() -> None:
    model = small_mlp()
    with EditWorker(model, torch.optim.SGD(model.parameters()), Connected(1), WorkerConfig()) as worker:
        assert worker.outer_step == 0


class Breaks(torch.optim.SGD):
    """Its last hook cannot be registered."""

    def register_step_post_hook(self, hook: object) -> NoReturn:
        raise RuntimeError("broken")


class Tells(ScriptedCollective):
    """What is told last on entering cannot be told."""

    def report(self, progress: Progress) -> NoReturn:
        raise RuntimeError("broken")


@pytest.mark.parametrize("where", ["registering", "telling"])
def test_entering_that_fails_leaves_no_hook(where: str) -> None:
    model = small_mlp()
    collective, kind = (ScriptedCollective(), Breaks) if where == "registering" else (Tells(), torch.optim.SGD)
    optimizer = kind(model.parameters(), lr=0.1)
    of_all = dict(optimizers._global_optimizer_pre_hooks)
    with pytest.raises(RuntimeError, match="broken"), EditWorker(model, optimizer, collective, WorkerConfig()):
        pass
    assert optimizers._global_optimizer_pre_hooks == of_all
    assert not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or model._forward_pre_hooks)


def test_calls_out_of_order_are_our_bug(peer: Callable[..., Peer]) -> None:
    p = peer()
    with pytest.raises(LocalProtocolError, match="already entered"):
        p.worker.__enter__()
    fresh = EditWorker(p.model, p.optimizer, p.collective, WorkerConfig())
    with pytest.raises(LocalProtocolError, match="enter the EditWorker first"):
        _ = fresh.outer_step


TRAINS_OR_SAVES: dict[str, Callable[[EditWorker], object]] = {
    "until_finished": lambda worker: next(worker.until_finished([0])),
    "take_awaited": EditWorker.take_awaited,
    "synchronize": EditWorker.synchronize,
    "count_tokens": lambda worker: worker.count_tokens(1),
    "report": lambda worker: worker.report(tokens=1),
    "count_steps": lambda worker: worker.count_steps(1),
    "state_dict": EditWorker.state_dict,
}


@pytest.mark.parametrize("call", TRAINS_OR_SAVES.values(), ids=TRAINS_OR_SAVES)
@pytest.mark.parametrize("pending", [False, True])
def test_what_trains_or_saves_is_refused_after_leaving(
    call: Callable[[EditWorker], object], pending: bool, peer: Callable[..., Peer]
) -> None:
    p = peer(every=1)
    if pending:
        p.step()
        assert p.worker.pending
    p.worker.__exit__(KeyboardInterrupt, None, None)
    with pytest.raises(LocalProtocolError, match=r"was left: train, and save its state_dict\(\), before its `with` ends"):
        call(p.worker)


def test_what_was_reached_can_be_read_after_leaving(peer: Callable[..., Peer]) -> None:
    p = peer()
    before, digest, theta = p.worker.outer_state_dict(), p.worker.digest, p.worker.outer_of()
    p.step()
    mine = flat(p.model)
    p.worker.__exit__(KeyboardInterrupt, None, None)
    assert (p.worker.outer_step, p.worker.digest, p.worker.inner_steps) == (0, digest, 1)
    assert not p.worker.finished and p.worker.last_commit is None and p.worker.shares[0].digest == digest
    assert p.worker.outer_of() == theta and p.worker.residuals == {}
    after = p.worker.outer_state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with p.worker.outer_parameters():
        assert same(flat(p.model), outer_vectors(p.worker))
    assert same(flat(p.model), mine)


@pytest.mark.parametrize("theta", [snapshot_of(1, [torch.zeros(3)]), Snapshot(1, "not it", tuple(flat(small_mlp())))])
def test_a_snapshot_that_does_not_fit_is_the_other_sides_fault(theta: Snapshot) -> None:
    model = small_mlp()
    with pytest.raises(RemoteProtocolError, match="snapshot of outer step 1 does not"):
        EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(theta), WorkerConfig()).__enter__()


def test_a_codec_for_fragments_that_the_model_does_not_have_is_named() -> None:
    model = small_mlp()
    config = WorkerConfig(codec=CodecConfig(fragments={"0": FragmentCodec(up="fp32"), "embed*": FragmentCodec(up="bf16")}))
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(snapshot_of(1, flat(model))), config)
    with pytest.raises(ConfigError, match=r'codec.fragments."embed\*": matches no fragment; the model has 0, 2'):
        worker.__enter__()


@pytest.mark.parametrize(("settings", "message"), [({"every": 0}, "sync.every = 0"), ({"codec": "zip"}, "codec.up = 'zip'")])
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker_config(**settings)  # type: ignore[arg-type]


# What goes out, and when.


def test_a_contribution_is_outer_minus_local_with_this_rounds_work(peer: Callable[..., Peer]) -> None:
    p = peer(every=3)
    for _ in range(3):
        assert p.collective.contributed == []
        p.worker.count_tokens(8)
        p.step()
    assert p.worker.pending and p.worker.round_inner_steps == 0
    assert [c.fragment_id for c in p.collective.contributed] == [0, 1]
    for contribution, outer, local in zip(p.collective.contributed, p.theta.fragments, flat(p.model), strict=True):
        assert (contribution.outer_step, contribution.inner_steps, contribution.tokens) == (0, 3, 24)
        assert torch.equal(decode(contribution.payload), outer - local)


def test_t20_a_warm_up_before_entering_is_not_in_the_first_pseudo_gradient() -> None:
    model = small_mlp()
    optimizer, collective, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), ScriptedCollective(), regression_batches(0)
    for _ in range(20):
        train_step(model, optimizer, next(batches))
    warm = flat(model)
    worker = EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32"))
    with pytest.raises(KeyboardInterrupt), worker:
        train_step(model, optimizer, next(batches))
        for contribution, before, after in zip(collective.contributed, warm, flat(model), strict=True):
            assert torch.equal(decode(contribution.payload), before - after)
        raise KeyboardInterrupt


def test_t5_only_the_first_forward_takes_the_outcome_and_none_exchanges(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    p.step(2)
    after = commit_next(p)
    p.forward()
    assert p.worker.outer_step == 1 and not p.worker.pending and same(flat(p.model), list(after.fragments))
    questions = len(p.collective.asked)
    for _ in range(3):
        p.forward()
    assert len(p.collective.asked) == questions and len(p.collective.rounds()) == 1
    assert same(flat(p.model), list(after.fragments))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_t7_evaluation_right_after_the_exchange_sees_the_merged_parameters(
    peer: Callable[..., Peer], guard: Callable[[], torch.no_grad]
) -> None:
    p = peer(every=1, codec="int8")
    inputs = next(p.batches)[0]
    p.step()
    after = commit_next(p)
    p.model.eval()
    with guard():
        outputs = p.model(inputs)
    p.model.train()
    reference = small_mlp()
    with torch.no_grad():
        for layer, vector in zip([reference[0], reference[2]], after.fragments, strict=True):
            layer.weight.copy_(vector[: layer.weight.numel()].view_as(layer.weight))
            layer.bias.copy_(vector[layer.weight.numel() :])
        torch.testing.assert_close(outputs, reference(inputs))
    assert same(flat(p.model), list(after.fragments))
    assert not any(part.is_inference() for part in p.worker.outer_of()[1].fragments)
    for _ in range(2):  # nothing made under inference_mode may come back to haunt the training
        p.step()
        commit_next(p)
    p.forward()
    assert p.worker.outer_step == 3


def test_t8_reading_a_state_dict_triggers_nothing(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    p.step(2)
    local, questions = flat(p.model), len(p.collective.asked)
    for _ in range(2):
        p.model.state_dict()
        p.optimizer.state_dict()
        p.worker.outer_state_dict()
    assert len(p.collective.asked) == questions and len(p.collective.rounds()) == 1
    assert p.worker.pending and same(flat(p.model), local)


@pytest.mark.parametrize("reentrant", [True, False])
def test_t6_activation_checkpointing_exchanges_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyTransformer()

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.inner.embed(tokens)
            for block in self.inner.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return self.inner.head(self.inner.norm(hidden))

    counts = []
    for model in (Checkpointed(), nn.Sequential(TinyTransformer())):
        optimizer, collective = torch.optim.AdamW(model.parameters()), ScriptedCollective()
        with EditWorker(model, optimizer, collective, worker_config(every=2, codec="fp32")) as worker:
            for _, batch in zip(range(4), token_batches(0), strict=False):
                collective.answers[0] = [Aborted("scripted")] if worker.pending else []
                train_step(model, optimizer, batch)
            collective.answers[0] = [Aborted("scripted")]
        counts.append((len(collective.rounds()), collective.waited))
    assert counts[0] == counts[1] == (2, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_root_recomputes_on_the_parameters_of_its_forward(peer: Callable[..., Peer], reentrant: bool) -> None:
    """The recomputation calls the root's hooks again, in backward: there must be nothing left for them to do."""
    p = peer(every=1)
    p.step()
    commit_next(p)
    inputs = next(p.batches)[0].requires_grad_()
    checkpoint(p.model, inputs, use_reentrant=reentrant).sum().backward()
    assert p.worker.outer_step == 1 and p.collective.waited == 1 and len(p.collective.rounds()) == 1


def test_gradient_accumulation_counts_optimizer_steps_only(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    for _ in range(2):
        for _ in range(3):
            inputs, targets = next(p.batches)
            (p.model(inputs) - targets).square().mean().backward()
        assert not p.worker.pending
        p.optimizer.step()
        p.optimizer.zero_grad()
    assert p.worker.inner_steps == 2 and p.collective.contributed[0].inner_steps == 2


def test_a_step_that_the_grad_scaler_skips_does_not_count(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for poison in (1.0, float("inf"), 1.0):
        p.optimizer.zero_grad()
        inputs, targets = next(p.batches)
        scaler.scale((p.model(inputs) - targets).square().mean() * poison).backward()
        scaler.step(p.optimizer)
        scaler.update()
    assert p.worker.inner_steps == 2 and len(p.collective.rounds()) == 1


def test_t14_a_frozen_root_with_trainable_adapters_exchanges() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 3).requires_grad_(False)
            self.scale = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.low = nn.Linear(4, 2, bias=False)
            self.high = nn.Linear(2, 3, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.base(inputs) + self.scale + self.high(self.low(inputs))

    model, collective = Adapted(), ScriptedCollective()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    frozen = model.base.weight.clone()
    with EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32")) as worker:
        train_step(model, optimizer, next(regression_batches(0)))
        assert sorted(worker.outer_state_dict()) == ["high.weight", "low.weight"]
        collective.answers[0].append(Aborted("scripted"))
    assert len(collective.contributed) == 2 and torch.equal(model.base.weight, frozen)


def test_t21_a_parameter_without_gradient_keeps_its_place() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.experts[0](inputs) + self.experts[2](inputs)

    model, collective = Experts(), ScriptedCollective()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    with EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32")):
        train_step(model, optimizer, next(regression_batches(0)))
        moved = [bool(decode(contribution.payload).any()) for contribution in collective.contributed]
        collective.answers[0].append(Aborted("scripted"))
    assert moved == [True, False, True]


def test_a_training_loop_with_only_submodule_forwards_takes_the_outcome_before_the_next_step(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    after = commit_next(p)
    inputs, targets = next(p.batches)
    p.optimizer.zero_grad()
    (p.model[2](torch.tanh(p.model[0](inputs))) - targets).square().mean().backward()
    before = flat(p.model)
    p.optimizer.step()
    assert p.worker.outer_step == 1 and not same(before, list(after.fragments))
    assert [bool((local - outer).abs().max() < 0.05) for local, outer in zip(flat(p.model), after.fragments, strict=True)] == [
        True
    ] * 2


def test_a_compiled_model_trains_and_exchanges(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    compiled = torch.compile(p.model, backend="eager")
    for _ in range(3):
        if p.worker.pending:
            commit_next(p)
        train_step(compiled, p.optimizer, next(p.batches))
    assert p.worker.outer_step == 2 and len(p.collective.rounds()) == 3


# The outer parameters, for evaluating and saving.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_parameters_are_lent_and_the_local_ones_come_back_to_the_bit(
    peer: Callable[..., Peer], dtype: torch.dtype
) -> None:
    p = peer(every=2, dtype=dtype)
    p.step(2)
    local = [parameter.detach().clone() for parameter in p.model.parameters()]
    with p.worker.outer_parameters() as model:
        assert same(flat(model), [part.to(dtype).float() for part in p.theta.fragments])
        model(next(p.batches)[0])  # neither waits nor applies: the outcome belongs to the local parameters
        with pytest.raises(LocalProtocolError, match=r"optimizer\.step\(\) inside outer_parameters"):
            p.optimizer.step()
        with pytest.raises(LocalProtocolError, match="synchronize"):
            p.worker.synchronize()
        with pytest.raises(LocalProtocolError, match=r"state_dict\(\) inside outer_parameters"):
            p.worker.state_dict()
        with pytest.raises(LocalProtocolError, match="inside outer_parameters"), p.worker.outer_parameters():
            pass
    assert same([parameter.detach() for parameter in p.model.parameters()], local) and p.collective.waited == 0
    with pytest.raises(KeyboardInterrupt), p.worker.outer_parameters():
        raise KeyboardInterrupt
    assert same([parameter.detach() for parameter in p.model.parameters()], local)


def test_the_outer_state_dict_is_a_copy_in_full_shape(peer: Callable[..., Peer]) -> None:
    p = peer()
    state = p.worker.outer_state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: tuple(parameter.shape) for name, parameter in p.model.named_parameters()
    }
    state["0.weight"].zero_()
    assert p.worker.outer_state_dict()["0.weight"].any()
