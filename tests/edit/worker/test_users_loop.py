"""What a user does with a hooked model beside the loop: copies, a second optimizer, unfreezing, unusual parameters."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from edit.codecs import decode
from edit.errors import ConfigError, LocalProtocolError
from edit.integrations.attachment import Attachment
from edit.records import Finished, Snapshot, Verdict
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps
from tests.support.scripted_peer import Peer, commit_next, flat, same
from tests.support.settings import worker_config


class Locked(ScriptedCollective):
    """As a real carrier: it has a lock and a thread, which nothing can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.thread = threading.Lock(), threading.current_thread()


def entered(model: nn.Module | None = None, mode: str = "blocking", every: int = 1) -> Peer:
    model = small_mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    collective = Locked()
    worker = EditWorker(model, optimizer, collective, worker_config(every=every, codec="fp32", mode=mode))
    worker.__enter__()
    return Peer(model, optimizer, collective, worker, regression_batches(0))


def saved(model: nn.Module, path: Path) -> nn.Module:
    torch.save(model, path)
    copied = torch.load(path, weights_only=False)
    assert isinstance(copied, nn.Module)
    return copied


class TestACopy:
    @pytest.mark.parametrize("mode", ["blocking", "forward"])
    @pytest.mark.parametrize("way", ["deepcopy", "averaged", "saved"])
    def test_a_hooked_model_can_be_copied_and_the_copy_has_no_effect(self, tmp_path: Path, way: str, mode: str) -> None:
        p = entered(mode=mode)
        p.step()  # a contribution is pending: a forward of the model itself would now wait for its outcome
        match way:
            case "deepcopy":
                copied: nn.Module = copy.deepcopy(p.model)
            case "averaged":
                averaged = AveragedModel(p.model)
                averaged.update_parameters(p.model)
                copied = averaged.module
            case _:
                copied = saved(p.model, tmp_path / "model.pt")
        assert same(flat(copied), flat(p.model))
        asked, contributed = list(p.collective.asked), list(p.collective.contributed)
        train_step(copied, torch.optim.SGD(copied.parameters(), lr=1.0), next(p.batches))
        assert (p.collective.asked, p.collective.contributed) == (asked, contributed) and p.worker.pending
        assert p.worker.inner_steps == 1 and not same(flat(copied), flat(p.model))
        after = commit_next(p)
        p.forward()
        assert same(flat(p.model), list(after.fragments))

    def test_a_copy_of_a_copy(self) -> None:
        p = entered()
        p.step()
        copy.deepcopy(copy.deepcopy(p.model))(next(p.batches)[0])
        assert p.worker.pending


class Codes(Tensor):
    """As torchao's trainable int8 weights: a class of its own, which is no vector."""

    def reshape(self, *shape: int) -> Tensor:  # type: ignore[override]
        return self

    def __tensor_flatten__(self) -> None: ...

    def __tensor_unflatten__(self) -> None: ...


class NoReshape(Codes):
    def reshape(self, *shape: int) -> Tensor:  # type: ignore[override]
        raise NotImplementedError("NoReshape dispatch: attempting to run unimplemented operator/function")


class TestParametersThatCannotBeExchanged:
    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            (torch.zeros(3, dtype=torch.complex64), r"^parameter odd\.weight: .*complex64"),
            (torch.zeros(0, 4), r"^parameter odd\.weight: .*\[0, 4\].*empty"),
            (torch.zeros(3, device="meta"), r"^tensor odd\.weight: is on the meta device"),
            (torch.zeros(1).expand(4), r"^tensor odd\.weight: is expanded, .*clone\(\)"),
            (torch.zeros(2, 2).as_subclass(Codes), r"^tensor odd\.weight: is a Codes, which cannot be"),
            (torch.zeros(2, 2).as_subclass(NoReshape), r"^tensor odd\.weight: is a NoReshape, which cannot be"),
        ],
    )
    def test_they_are_named_on_entering(self, tensor: Tensor, words: str) -> None:
        model = nn.Module()
        model.usual = nn.Linear(2, 2)
        model.odd = nn.Module()
        model.odd.register_parameter("weight", nn.Parameter(tensor))
        worker = EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(), WorkerConfig())
        with pytest.raises(ConfigError, match=words) as caught:
            worker.__enter__()
        assert "\n" not in str(caught.value)
        model.odd.requires_grad_(False)  # what is frozen is not exchanged
        worker.__enter__()

    def test_one_made_under_inference_mode(self) -> None:
        with torch.inference_mode():
            model = nn.Linear(2, 2)
        worker = EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(), WorkerConfig())
        with pytest.raises(ConfigError, match=r"^tensor weight: was made under torch\.inference_mode"):
            worker.__enter__()

    def test_one_that_is_lazy_has_no_shape_before_a_batch(self) -> None:
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
        worker = EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(), WorkerConfig())
        with pytest.raises(ConfigError, match=r"^parameter 0\.weight: .*run one batch through the model first"):
            worker.__enter__()
        model(torch.zeros(1, 3))
        worker.__enter__()


class OwnStep(torch.optim.SGD):
    """An optimizer of another package, which may have its own copies of the parameters."""


class TestAnOptimizerOfAnotherModel:
    @pytest.mark.parametrize("kinds", [[torch.optim.SGD], [torch.optim.Adafactor, torch.optim.AdamW]])
    def test_torchs_own_is_refused_before_anything_is_sent(self, kinds: list[Callable[..., torch.optim.Optimizer]]) -> None:
        model, collective = small_mlp(), ScriptedCollective()
        optimizer = [kind(model.parameters(), lr=0.1) for kind in kinds]
        worker = EditWorker(copy.deepcopy(model), optimizer, collective, WorkerConfig())
        words = rf"^optimizer: {'.*'.join(kind.__name__ for kind in kinds)} trains no parameter that is exchanged: "  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=words) as caught:
            worker.__enter__()
        assert "\n" not in str(caught.value) and collective.schema is None

    def test_of_one_that_holds_only_frozen_parameters_too(self) -> None:
        model = small_mlp()
        model[0].requires_grad_(False)
        worker = EditWorker(model, torch.optim.SGD(model[0].parameters()), ScriptedCollective(), WorkerConfig())
        with pytest.raises(ConfigError, match="SGD trains no parameter that is exchanged"):
            worker.__enter__()

    def test_one_flat_parameter_in_whose_memory_the_models_lie_is_taken(self, caplog: pytest.LogCaptureFixture) -> None:
        model = small_mlp()
        parts = list(model.parameters())
        flat = nn.Parameter(torch.cat([part.detach().flatten() for part in parts]))
        for part, values in zip(parts, flat.data.split([part.numel() for part in parts]), strict=True):
            part.data = values.view(part.shape)
        with EditWorker(model, torch.optim.AdamW([flat]), ScriptedCollective(), WorkerConfig()):
            assert not caplog.messages

    def test_of_another_one_it_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model = small_mlp()
        with EditWorker(copy.deepcopy(model), OwnStep(model.parameters()), ScriptedCollective(), WorkerConfig()):
            assert [line for line in caplog.messages if line.startswith("OwnStep holds no parameter that is exchanged")]

    def test_whose_groups_are_filled_later_or_that_trains_a_part_nothing_is_said(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        for of in (lambda model: [{"params": []}], lambda model: [*model[2].parameters()]):
            model = small_mlp()
            with EditWorker(model, torch.optim.SGD(of(model), lr=0.1), ScriptedCollective(), WorkerConfig()):
                assert not caplog.messages


class TestWhatTheOptimizerTrainsBesideTheModel:
    def test_a_warning_says_so_on_entering_and_after_a_group_was_added(self, caplog: pytest.LogCaptureFixture) -> None:
        def said() -> list[str]:
            return [line.split("(")[1].split(")")[0] for line in caplog.messages if "not of the model" in line]

        model, head, late = small_mlp(), nn.Linear(2, 3), nn.Linear(5, 4, bias=False)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        given = [*model.parameters(), *head.parameters(), *frozen.parameters()]
        optimizer = torch.optim.SGD(given, lr=0.1)
        with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, ScriptedCollective(), worker_config(every=2)):
            assert said() == ["2 tensors, the first of shape [3, 2]"]
            batches = regression_batches(0)
            optimizer.add_param_group({"params": late.parameters()})
            train_step(model, optimizer, next(batches))
            assert len(said()) == 1
            train_step(model, optimizer, next(batches))
            assert said()[1:] == ["1 tensors, the first of shape [4, 5]"]
            raise KeyboardInterrupt

    def test_it_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        model, head = small_mlp(), nn.Linear(2, 3)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, ScriptedCollective(), worker_config(every=1)):
            train_step(model, optimizer, next(regression_batches(0)))
            assert sum("not of the model" in line for line in caplog.messages) == 1
            raise KeyboardInterrupt


class TestUnfreezing:
    def test_a_parameter_unfrozen_after_entering_is_an_error_at_the_next_contribution(self) -> None:
        model = small_mlp()
        model[0].requires_grad_(False)
        p = entered(model, every=2)
        model[0].requires_grad_(True)
        p.step()
        with pytest.raises(ConfigError, match=r"0\.weight, 0\.bias.*enter again") as caught:
            p.step()
        assert "\n" not in str(caught.value) and not p.worker.pending and not p.collective.contributed

    def test_freezing_is_not(self) -> None:
        p = entered()
        p.model[0].requires_grad_(False)  # type: ignore[index]
        p.step()
        assert len(p.collective.rounds()) == 1

    def test_freezing_is_said_once_with_the_second_contribution(self, caplog: pytest.LogCaptureFixture) -> None:
        p = entered(every=2)
        p.model[0].requires_grad_(False)  # type: ignore[index]
        p.step(2)
        assert len(p.collective.rounds()) == 1 and not caplog.records
        for _ in range(2):
            commit_next(p)
            p.step(2)
        assert len(p.collective.rounds()) == 3
        assert [each.getMessage().partition(";")[0] for each in caplog.records] == [
            "frozen since the EditWorker was entered, but exchanged all the same: 0.weight, 0.bias"
        ]

    @pytest.mark.parametrize("given", [True, False])
    def test_what_a_gan_freezes_while_the_other_part_is_trained_is_not(
        self, caplog: pytest.LogCaptureFixture, given: bool
    ) -> None:
        """With the optimizer of the one that is frozen at each contribution given to the worker, or not."""
        model = small_mlp()
        discriminator, both = model[2], torch.optim.SGD(model.parameters(), lr=0.1)
        own = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        collective = Locked()
        with EditWorker(model, [own, both] if given else both, collective, worker_config(every=1), leave="local") as worker:
            p = Peer(model, both, collective, worker, regression_batches(0))
            for stays_frozen in (False, False, False, True):
                discriminator.requires_grad_(not stays_frozen)
                train_step(model, own, next(p.batches))
                discriminator.requires_grad_(False)
                p.step()
                commit_next(p)
                assert len(caplog.records) == stays_frozen


def a_new_head(model: nn.Module) -> None:
    model[2] = nn.Linear(6, 5)  # type: ignore[operator]


def no_head(model: nn.Module) -> None:
    del model[2]  # type: ignore[attr-defined]


def assigned(model: nn.Module) -> None:
    model.load_state_dict({"0.weight": torch.zeros(6, 4)}, strict=False, assign=True)


def tied(model: nn.Module) -> None:
    model[2].bias = model[0].bias  # type: ignore[index]


class TestReplacing:
    @pytest.mark.parametrize(
        ("replace", "names"),
        [
            (a_new_head, r"2\.weight, 2\.bias;"),
            (no_head, r"2\.weight, 2\.bias;"),
            (assigned, r"0\.weight;"),
            (tied, r"2\.bias;"),
        ],
    )
    def test_a_parameter_replaced_after_entering_is_an_error(self, replace: Callable[[nn.Module], None], names: str) -> None:
        p = entered(every=2)
        p.step()
        replace(p.model)
        with pytest.raises(ConfigError, match=rf"^replaced or removed .*: {names} .*assign=True$"):
            p.optimizer.step()
        assert not p.worker.pending and not p.collective.contributed

    def test_on_leaving_too(self) -> None:
        p = entered(every=2)
        assigned(p.model)
        with pytest.raises(ConfigError, match=r"0\.weight;"):
            p.worker.__exit__(None, None, None)
        assert not p.model._forward_pre_hooks

    def test_what_is_replaced_after_the_end_of_the_run_is_the_users(self) -> None:
        p = entered()
        p.collective.answers[0].append(Finished(0))
        p.step()
        list(p.worker.until_finished(p.batches))
        assert p.worker.finished
        a_new_head(p.model)
        p.worker.__exit__(None, None, None)

    def test_nor_has_a_run_that_is_over_a_claim_to_what_leave_local_keeps(self) -> None:
        model = small_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collective = Locked()
        config = worker_config(every=1, codec="fp32")
        with EditWorker(model, optimizer, collective, config, leave="local") as worker:
            train_step(model, optimizer, next(regression_batches(0)))
            collective.answers[0].append(Finished(0))
            worker.synchronize()
            assert worker.finished
            a_new_head(model)

    def test_a_model_whose_named_parameters_is_its_own_is_not_refused(self) -> None:
        class Old(nn.Sequential):
            def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
                return super().named_parameters(prefix, recurse)

        p = entered(Old(*small_mlp()))
        p.step()
        assert len(p.collective.rounds()) == 1

    def test_an_averaged_buffer_counts(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        EditWorker(model, optimizer, Locked(), worker_config(every=1, codec="fp32", buffers="average")).__enter__()
        model[1].running_mean = torch.zeros(2)
        with pytest.raises(ConfigError, match=r"1\.running_mean;"):
            optimizer.step()

    def test_a_moved_model_and_a_loaded_state_dict_have_the_same_parameters(self) -> None:
        p = entered()
        p.model.load_state_dict(copy.deepcopy(p.model.state_dict()))
        p.model.to(torch.bfloat16).to(torch.float32)
        p.step()
        assert len(p.collective.rounds()) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_an_overflow_skips_does_not_count(fused: bool) -> None:
    """Of a fused optimizer GradScaler calls `step()` all the same, and the optimizer skips within."""
    model, collective = small_mlp(), Locked()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    worker = EditWorker(model, optimizer, collective, worker_config(every=4, codec="fp32", mode="blocking"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(KeyboardInterrupt), worker:
        for factor in (math.inf, 1.0, math.inf, 1.0, 1.0):
            scaler.scale(model(next(regression_batches(0))[0]).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert worker.inner_steps == 3 and not collective.contributed
        raise KeyboardInterrupt


class TestAWriteAfterTheContribution:
    """What is on its way was read already: the outcome would undo what is written now."""

    @staticmethod
    def written(mode: str, taken: str = "") -> Peer:
        p = entered(mode=mode)
        p.step()
        match taken:
            case "synchronize":
                commit_next(p)
                p.worker.synchronize()
            case "take_awaited":
                commit_next(p)
                p.worker.take_awaited()
        with torch.no_grad():
            p.model[2].bias.fill_(7.0)  # type: ignore[index]
        return p

    @pytest.mark.parametrize("mode", ["blocking", "forward"])
    @pytest.mark.parametrize("what", ["forward", "step", "another's step", "synchronize", "take_awaited"])
    def test_is_an_error_before_the_outcome_is_taken(self, what: str, mode: str) -> None:
        p = self.written(mode)
        commit_next(p)
        before, theta = flat(p.model), p.theta
        calls: dict[str, Callable[[], object]] = {
            "forward": p.forward,
            "step": p.optimizer.step,
            "another's step": torch.optim.SGD(p.model.parameters(), lr=0.1).step,
            "synchronize": p.worker.synchronize,
            "take_awaited": p.worker.take_awaited,
        }
        with pytest.raises(ConfigError, match=r"the parameters of 2 were written after .* call worker\.synchronize\(\)"):
            calls[what]()
        assert same(flat(p.model), before) and same(p.theta.fragments, theta.fragments) and p.worker.outer_step == 0

    @pytest.mark.parametrize("mode", ["blocking", "forward"])
    def test_is_kept_after_the_outcome(self, mode: str) -> None:
        p = self.written(mode, taken="synchronize")
        p.forward()
        assert bool((p.model[2].bias == 7.0).all())  # type: ignore[index]
        p.step()  # contributes it
        sent = decode(p.collective.rounds()[1][1].payload)[-3:]
        torch.testing.assert_close(-sent, torch.full((3,), 7.0) - p.theta.fragments[1][-3:], atol=0.05, rtol=0.0)

    @pytest.mark.parametrize("mode", ["delayed", "eager"])
    def test_is_kept_where_training_goes_on_meanwhile(self, mode: str) -> None:
        p = self.written(mode)
        commit_next(p)
        p.worker.synchronize()
        assert bool((p.model[2].bias > 6.0).all())  # type: ignore[index,operator]

    def test_is_an_error_before_a_part_of_the_outcome_that_waits(self) -> None:
        p = self.written("forward", taken="take_awaited")
        with pytest.raises(ConfigError, match="the parameters of 2 were written"):
            p.forward()

    def test_of_a_part_that_no_forward_used(self) -> None:
        p = entered(mode="forward")
        p.step()
        commit_next(p)
        p.worker.take_awaited()
        p.model[0](next(p.batches)[0])  # type: ignore[index]  # takes the update of fragment 0 only
        with torch.no_grad():
            p.model[2].bias.fill_(7.0)  # type: ignore[index]
        with pytest.raises(ConfigError, match="the parameters of 2 were written"):
            p.optimizer.step()

    def test_where_only_steps_may_write_it_is_an_error_whatever_the_codec(self) -> None:
        model = small_mlp()
        optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), worker_config(every=1, codec="fp32")
        worker = EditWorker(model, optimizer, Locked(), dataclasses.replace(config, only_steps_write=True))
        worker.__enter__()
        optimizer.step()
        with torch.no_grad():
            model[2].bias.fill_(7.0)
        with pytest.raises(LocalProtocolError, match=r"of 2 changed after .* only_steps_write says no"):
            model(next(regression_batches(0))[0])

    @pytest.mark.parametrize("leave", ["outer", "local"])
    def test_on_leaving_it_stays_with_the_local_parameters(self, leave: Literal["outer", "local"]) -> None:
        model = small_mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        collective = Locked()
        worker = EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32"), leave=leave)
        with worker:
            p = Peer(model, optimizer, collective, worker, regression_batches(0))
            p.step()
            after = commit_next(p)
            with torch.no_grad():
                model[2].bias.fill_(7.0)
        found = flat(model)
        assert torch.equal(found[0], after.fragments[0])
        assert bool((model[2].bias == 7.0).all()) == (leave == "local") and torch.equal(found[1], after.fragments[1]) == (
            leave == "outer"
        )

    def test_buffers_may_be_written_by_a_forward_of_a_part(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collective = Locked()
        worker = EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32", buffers="average"))
        worker.__enter__()
        inputs = next(regression_batches(0))[0]
        model(inputs).square().mean().backward()
        optimizer.step()
        model[1](torch.randn(8, 6))
        collective.answers[0].append(Finished(0))
        model(inputs)
        assert worker.finished

    def test_the_outer_parameters_for_a_while_are_no_write(self) -> None:
        p = entered()
        p.step()
        with p.worker.outer_parameters():
            p.model.load_state_dict(copy.deepcopy(p.model.state_dict()))
        after = commit_next(p)
        p.forward()
        assert same(flat(p.model), after.fragments)


class TestASecondOptimizer:
    @pytest.mark.parametrize("mode", ["blocking", "forward"])
    def test_what_it_does_after_the_contribution_is_not_lost(self, mode: str) -> None:
        p = entered(mode=mode)
        second = torch.optim.SGD(p.model[2].parameters(), lr=0.5)  # type: ignore[index]
        p.step()  # contributes
        sent = flat(p.model)
        second.step()
        change = [now - before for now, before in zip(flat(p.model), sent, strict=True)]
        assert not change[0].any() and change[1].any()
        after = commit_next(p)
        p.forward()
        found = flat(p.model)
        assert torch.equal(found[0], after.fragments[0])
        assert torch.equal(found[1], after.fragments[1] + change[1])

    def test_it_is_part_of_the_next_contribution(self) -> None:
        p = entered()
        second = torch.optim.SGD(p.model.parameters(), lr=0.5)
        p.step()
        sent = flat(p.model)
        second.step()
        change = [now - before for now, before in zip(flat(p.model), sent, strict=True)]
        after = commit_next(p)
        with torch.no_grad():
            p.forward()
        for group in p.optimizer.param_groups:
            group["lr"] = 0.0
        p.optimizer.step()  # changes nothing, contributes
        for part, moved, theta in zip(p.collective.rounds()[1], change, after.fragments, strict=True):
            assert torch.equal(-decode(part.payload), (theta + moved) - theta)

    @pytest.mark.parametrize(("every", "steps"), [(1, 200), (150, 300)])
    def test_one_that_trains_alone_is_named(self, every: int, steps: int) -> None:
        p = entered(every=every)
        inside = torch.optim.SGD(p.model.parameters(), lr=0.5)
        vars(p.optimizer)["base_optimizer"] = inside  # as of SAM
        for _ in range(steps):
            inside.step()
        words = (
            r"^optimizer: the AdamW that was given is not stepped, but SGD \(its `base_optimizer`\) trains its parameters: give"
        )
        with pytest.raises(ConfigError, match=words):
            inside.step()

    def test_the_last_of_several_that_never_steps_is_named(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        stepped, last = torch.optim.SGD(model[0].parameters(), lr=0.5), torch.optim.AdamW(model[1].parameters())
        EditWorker(model, [stepped, last], Locked(), worker_config(every=1, codec="fp32", mode="blocking")).__enter__()
        for _ in range(200):
            stepped.step()
        words = r"^optimizer: the last of those that were given, AdamW, ends an inner step, but is not stepped, while SGD is"
        with pytest.raises(ConfigError, match=words):
            stepped.step()

    def test_one_for_each_parameter_within_the_backward_is_not(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(110)))  # 220 parameters, more than steps that are allowed
        p = entered(model, every=10)
        inside = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        for _ in range(3):
            for each in inside:
                each.step()
            p.optimizer.step()  # as LayerWiseDummyOptimizer of transformers

    def test_one_that_takes_more_steps_than_the_one_that_was_given_is_not(self) -> None:
        p = entered(every=10)
        critic = torch.optim.SGD(p.model.parameters(), lr=0.1)
        p.optimizer.step()
        for _ in range(3):
            p.optimizer.step()
            for _ in range(100):
                critic.step()

    def test_one_that_takes_the_place_of_the_one_that_was_given_is_named(self) -> None:
        p = entered(every=10)
        p.step()
        anew = torch.optim.SGD(p.model.parameters(), lr=0.1)
        for _ in range(200):
            anew.step()
        words = r"^optimizer: the AdamW that was given is no longer stepped, but another SGD trains its parameters: change"
        with pytest.raises(ConfigError, match=words):
            anew.step()

    def test_the_critic_of_a_wgan_may_take_100_steps_before_the_first_of_the_generator(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        critic, generator = (torch.optim.RMSprop(part.parameters()) for part in model)
        collective = Locked()
        EditWorker(model, [critic, generator], collective, worker_config(every=1, codec="fp32", mode="blocking")).__enter__()
        for _ in range(100):
            critic.step()
        generator.step()
        assert collective.contributed

    def test_one_that_trains_on_after_the_end_of_the_run_is_not(self) -> None:
        p = entered()
        p.collective.answers[0].append(Finished(0))
        p.step()
        p.forward()
        assert p.worker.finished
        second = torch.optim.SGD(p.model.parameters(), lr=0.5)
        for _ in range(250):
            second.step()

    def test_one_of_another_model_costs_nothing(self) -> None:
        p = entered()
        other = small_mlp(seed=3)
        p.step()
        train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), next(p.batches))
        assert "sent_from" not in p.worker.state_dict(), "nothing is copied"

    def test_after_leaving_nothing_looks_on(self) -> None:
        hooks = optimizers._global_optimizer_pre_hooks
        before = len(hooks)
        p = entered()
        assert len(hooks) == before + 1
        p.worker.__exit__(KeyboardInterrupt, None, None)
        assert len(hooks) == before

    def test_inside_outer_parameters_it_is_refused(self) -> None:
        p = entered(every=9)
        second = torch.optim.SGD(p.model.parameters(), lr=0.5)
        p.step()
        with p.worker.outer_parameters(), pytest.raises(LocalProtocolError, match="inside outer_parameters"):
            second.step()


def one_for_each_parameter(mode: str, *, within: bool) -> Peer:
    """A peer with an optimizer for each parameter, in their order. within: a hook steps each within the backward."""
    model = small_mlp()
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    if within:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    collective = Locked()
    settings = {"delay": 1} if mode in ("delayed", "eager") else {}
    config = worker_config(every=2, codec="fp32", mode=mode, **settings)
    worker = EditWorker(model, list(own.values()), collective, config)
    worker.__enter__()
    return Peer(model, next(iter(own.values())), collective, worker, regression_batches(0))


class TestStepsWithinTheBackward:
    @pytest.mark.parametrize("mode", ["blocking", "forward", "delayed", "eager"])
    def test_they_train_as_steps_after_it_do(self, mode: str) -> None:
        within, after = (one_for_each_parameter(mode, within=within) for within in (True, False))
        for step in range(1, 9):
            for p in (within, after):
                if p.worker.pending:
                    commit_next(p)
                inputs, targets = next(p.batches)
                torch.nn.functional.mse_loss(p.model(inputs), targets).backward()
                if p is after:
                    for optimizer in p.worker._optimizers:
                        optimizer.step()
                    p.model.zero_grad()
            assert within.worker.inner_steps == after.worker.inner_steps == step
            assert within.worker.pending == after.worker.pending and within.worker.digest == after.worker.digest
            assert same(flat(within.model), flat(after.model))
        assert within.worker.outer_step >= 3

    def test_an_outcome_that_no_forward_took_is_taken_at_its_end_and_the_steps_are_kept(self) -> None:
        p, plain = (one_for_each_parameter("blocking", within=within) for within in (True, False))
        for each in (p, plain):
            each.worker.count_steps(1)
        for _ in range(2):
            inputs, targets = next(p.batches)
            hidden = inputs
            for layer in p.model.children():  # no forward of the model itself
                hidden = layer(hidden)
            if p.worker.pending:
                after, sent = commit_next(p), flat(p.model)
                plain.model.load_state_dict(p.model.state_dict())
                torch.nn.functional.mse_loss(plain.model(inputs), targets).backward()
                for optimizer in plain.worker._optimizers:
                    optimizer.step()
            torch.nn.functional.mse_loss(hidden, targets).backward()
        assert p.worker.outer_step == 1 and p.worker.inner_steps == 3
        for found, theta, before, stepped in zip(flat(p.model), after.fragments, sent, flat(plain.model), strict=True):
            assert torch.equal(found, theta + (stepped - before))

    def test_an_optimizer_that_steps_for_each_parameter_makes_one_inner_step(self) -> None:
        p = one_for_each_parameter("blocking", within=True)
        last = p.worker._optimizers[-1]
        for parameter in p.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: last.step())
        for step in (1, 2):
            inputs, targets = next(p.batches)
            torch.nn.functional.mse_loss(p.model(inputs), targets).backward()
            assert p.worker.inner_steps == step

    def test_of_a_reentrant_checkpoint_is_refused(self) -> None:
        p = one_for_each_parameter("blocking", within=True)
        inputs = next(p.batches)[0].requires_grad_()
        answer = checkpoint(p.model, inputs, use_reentrant=True)
        with pytest.raises(ConfigError, match=r"^optimizer.step\(\) in the backward of a reentrant .* use_reentrant=False, or"):
            answer.sum().backward()


@pytest.mark.parametrize("way", ["grad", "vmap"])
@pytest.mark.parametrize("mode", ["blocking", "forward"])
def test_a_forward_within_a_transform_takes_the_outcome_first(mode: str, way: str) -> None:
    p = entered(mode=mode)
    p.step()
    after, (inputs, targets) = commit_next(p), next(p.batches)

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(p.model, parameters, (inputs,)), targets)

    gradient = torch.func.grad(loss)
    if way == "vmap":
        gradient, inputs, targets = torch.func.vmap(gradient, (None, 0, 0)), inputs[None], targets[None]
    found = gradient(dict(p.model.named_parameters()), inputs, targets)
    assert same(flat(p.model), list(after.fragments))
    p.model.zero_grad()
    nn.functional.mse_loss(p.model(inputs), targets).backward()
    for name, parameter in p.model.named_parameters():
        torch.testing.assert_close(found[name].reshape(parameter.shape), parameter.grad)


class Switched(torch.optim.SGD):
    """As a schedule-free optimizer: what it evaluates with lies between the parameters and z, here their initial values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.z = [parameter.detach().clone() for parameter in model.parameters()]
        self.param_groups[0]["train_mode"] = True

    def train(self) -> None:
        self.switch(1 / 3, train=True)

    def eval(self) -> None:
        self.switch(-1 / 2, train=False)  # lerp by 1 / 3 undoes it

    @torch.no_grad()
    def switch(self, weight: float, *, train: bool) -> None:
        if self.param_groups[0]["train_mode"] != train:
            self.param_groups[0]["train_mode"] = train
            for parameter, z in zip(self.param_groups[0]["params"], self.z, strict=True):
                parameter.lerp_(z, weight)


class TestAnOptimizerThatSwitchesTheParameters:
    def test_the_outer_ones_cannot_be_evaluated_by_a_trainer(self) -> None:
        model, collective = small_mlp(), Locked()
        with pytest.raises(ConfigError, match=r"^evaluate_outer = True: Switched has an eval\(\) and a train\(\)") as caught:
            Attachment(model, [Switched(model)], collective, worker_config(every=1), "outer", evaluate_outer=True)
        assert "\n" not in str(caught.value) and not collective.asked

    def test_it_is_not_switched_within_outer_parameters(self) -> None:
        model = small_mlp()
        optimizer, config = Switched(model), worker_config(every=9)
        with pytest.raises(KeyboardInterrupt), EditWorker(model, optimizer, Locked(), config) as worker:
            train_step(model, optimizer, next(regression_batches(0)))
            before = flat(model)
            with worker.outer_parameters():
                optimizer.eval()
                optimizer.train()
            assert same(flat(model), before)
            words = r"^the optimizer's eval\(\) or train\(\) within outer_parameters\(\)"
            with pytest.raises(ConfigError, match=words), worker.outer_parameters():
                optimizer.eval()
            assert same(flat(model), before)
            raise KeyboardInterrupt


class Adapter(nn.Module):
    """A frozen layer and what is trained beside it, added to it by `merge`, as PEFT's LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((2, 4), (3, 2)))
        self.merged = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) if self.merged else self.base(inputs) + inputs @ self.a.T @ self.b.T

    def merge(self, sign: int = 1) -> None:
        self.base.weight.data += sign * (self.b @ self.a).detach()
        self.merged = sign > 0


class Peft(Adapter):
    """`merged` is a property, as PEFT's."""

    @property
    def merged(self) -> bool:
        return self.__dict__.get("is_merged", False)

    @merged.setter
    def merged(self, merged: bool) -> None:
        self.__dict__["is_merged"] = merged


def answered(p: Peer) -> None:
    _, outer = p.worker.outer_of()
    theta = Snapshot(outer.outer_step, outer.digest, outer.fragments)
    p.collective.answers[outer.outer_step].append(committed(theta, random_steps(theta), [Verdict.OK] * len(theta.fragments))[0])


def left(p: Peer) -> None:
    p.worker.__exit__(None, None, None)


def merged_at_the_end_of_outer_parameters(p: Peer) -> None:
    adapter_of(p).merge(-1)
    with p.worker.outer_parameters():
        adapter_of(p).merge()


def in_outer_parameters(p: Peer) -> None:
    with p.worker.outer_parameters():
        pass


def adapter_of(p: Peer) -> Adapter:
    adapter = p.model[0]  # type: ignore[index]
    assert isinstance(adapter, Adapter)
    return adapter


class TestMergedAdapters:
    @pytest.mark.parametrize("mode", ["blocking", "forward"])
    @pytest.mark.parametrize("kind", [Adapter, Peft])
    def test_a_validation_with_them_takes_no_outcome_and_leaves_the_base_whole(self, kind: type[Adapter], mode: str) -> None:
        p = entered(nn.Sequential(kind()), mode=mode)
        before = adapter_of(p).base.weight.clone()
        p.step()
        answered(p)
        adapter_of(p).merge()
        p.forward()
        assert p.worker.pending
        adapter_of(p).merge(-1)
        torch.testing.assert_close(adapter_of(p).base.weight, before)
        p.forward()
        assert p.worker.outer_step == 1

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda p: p.optimizer.step(), r"optimizer\.step\(\)"),
            (lambda p: p.worker.synchronize(), r"synchronize\(\)"),
            (lambda p: next(p.worker.until_finished([0])), r"another batch of until_finished\(\)"),
            (lambda p: p.worker.take_awaited(), r"take_awaited\(\)"),
            (in_outer_parameters, r"outer_parameters\(\)"),
            (merged_at_the_end_of_outer_parameters, r"the end of outer_parameters\(\)"),
            (left, r"leaving the EditWorker"),
        ],
    )
    def test_what_would_move_them_is_an_error(self, call: Callable[[Peer], object], words: str) -> None:
        p = entered(nn.Sequential(Adapter()))
        p.step()
        answered(p)
        before = adapter_of(p).a.clone()
        adapter_of(p).merge()
        with pytest.raises(ConfigError, match=rf"^{words} while the adapter 0 is merged into its base: .* unmerge first"):
            call(p)
        assert torch.equal(adapter_of(p).a, before) and p.worker.outer_step == 0

    def test_entering_too(self) -> None:
        adapter = Adapter()
        adapter.merge()
        with pytest.raises(ConfigError, match=r"^entering the EditWorker while the adapter \(root\) is merged"):
            entered(adapter)

    def test_within_outer_parameters_they_may_be_merged(self) -> None:
        p = entered(nn.Sequential(Adapter()))
        before = adapter_of(p).base.weight.clone()
        p.step()
        with p.worker.outer_parameters():
            adapter_of(p).merge()
            p.forward()
            adapter_of(p).merge(-1)
        torch.testing.assert_close(adapter_of(p).base.weight, before)

    def test_nor_do_they_hide_the_error_that_ends_a_validation(self) -> None:
        model = nn.Sequential(Adapter())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = Attachment(model, optimizer, Locked(), worker_config(every=1, codec="fp32"), "outer")
        attached.show_outer()
        model[0].merge()
        attached.abandon(ValueError("of the validation"))
        assert not model._forward_pre_hooks and not attached.showing

    def test_not_after_the_end_of_the_run(self) -> None:
        p = entered(nn.Sequential(Adapter()))
        p.collective.answers[0].append(Finished(0))
        p.step()
        list(p.worker.until_finished(p.batches))
        adapter_of(p).merge()
        p.worker.__exit__(None, None, None)

    def test_an_attribute_of_the_same_name_of_a_layer_with_nothing_frozen_is_none(self) -> None:
        model = small_mlp()
        model[0].merged = True
        p = entered(model)
        p.step()
        assert p.worker.pending
