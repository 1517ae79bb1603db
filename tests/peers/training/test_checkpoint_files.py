"""Checkpoints: going on is the same as not having stopped, saving changes nothing, and only whole ones are taken."""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from edit import plugins
from edit.config.run import InnerConfig, ModelConfig
from edit.errors import ConfigError, FormatError, StorageError
from edit.replica.ranks import ALONE, Ranks
from edit.worker.checkpoint import KINDS
from peers.models.gpt import GPT
from peers.training import checkpoint_files
from peers.training.checkpoint import Resumable
from peers.training.checkpoint_files import Checkpoints, Owner
from peers.training.data import Batches, Tokens
from peers.training.inner_optimizers import optimizers_of, saved_state
from peers.training.sharding import ONE_RANK, RankLayout, shard_model
from peers.training.trainer import Trainer
from tests.support.world import spawn

CPU = torch.device("cpu")
OWNER = Owner(run_id="run-1", peer_id="a", schema_hash="5c")


class Net(nn.Module):
    """Draws random numbers, keeps a running mean, has a frozen and an unused parameter."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.embedding = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.unused = nn.Linear(2, 3)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embedding(tokens), 0.3)
        for block in self.blocks:
            x = x + block(x).relu()
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x = self.frozen(x) - self.mean
        return nn.functional.cross_entropy(nn.functional.linear(x, self.embedding.weight).flatten(0, 1), targets.flatten())


class FakeWorker:
    """Has outer parameters laid out as the model's and a residual of one of them, moves both at each step."""

    def __init__(self, model: nn.Module) -> None:
        named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.outer = {name: p.clone().float() for name, p in named.items()}
        self.residual = {name: torch.zeros_like(p) for name, p in named.items() if name == "embedding.weight"}
        self.scalars: dict[str, Any] = {"outer_step": 0, "digest": "00", "work": [[0, 0.1]]}

    def step(self) -> None:
        self.scalars["outer_step"] += 1
        self.scalars["work"][0][1] += 0.1
        self.outer = {name: tensor + 0.1 * self.scalars["outer_step"] for name, tensor in self.outer.items()}
        for tensor in self.residual.values():
            tensor += 0.1 * self.scalars["outer_step"]

    def state_dict(self) -> dict[str, Any]:
        return {"outer": self.outer, "residual": self.residual, "scalars": self.scalars}

    def empty_state(self, kinds: Collection[str], scalars: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        return {kind: {name: torch.zeros_like(tensor) for name, tensor in getattr(self, kind).items()} for kind in kinds}

    def kinds_needed(self, scalars: Mapping[str, Any], run_step: int) -> frozenset[str]:
        behind = run_step - int(scalars["outer_step"])
        return frozenset(KINDS if behind <= 0 else {"outer"} if behind == 1 else ())

    def load_state_dict(self, state: Mapping[str, Any], *, forward: bool = False) -> None:
        self.scalars = state["scalars"]
        self.outer, self.residual = state.get("outer", self.outer), state.get("residual", self.residual)


class Peer:
    """A training whose state can be compared to the bit."""

    def __init__(
        self,
        folder: Path,
        *,
        owner: Owner = OWNER,
        keep: int = 2,
        ranks: Ranks = ALONE,
        model: nn.Module | None = None,
        tokens: int = 400,
        new_data: bool = False,
        optimizer: str = "adamw",
    ) -> None:
        layout = layout_of(ranks.size, split=isinstance(model, GPT))
        batches = Batches(Tokens(np.arange(tokens, dtype=np.uint8) % 16, "row", 16), 8, 6, 3)
        config = InnerConfig(lr=0.01, warmup_steps=0, optimizer=optimizer)
        self.trainer = Trainer(
            shard_model(model or Net(), layout), batches, config, total_steps=99, device=CPU, clock=lambda: 0.0, layout=layout
        )
        self.worker = FakeWorker(self.trainer.model)
        self.resumable = Resumable(self.trainer, batches, self.worker, ranks, new_data)
        self.checkpoints = Checkpoints(folder, owner, keep, ranks)

    def train(self, steps: int, *, save: bool = False) -> Peer:
        for _ in range(steps):
            self.trainer.step()
            self.worker.step()
            if save:
                self.save()
        return self

    def save(self) -> Peer:
        self.resumable.save(self.checkpoints)
        return self

    def wait(self) -> Peer:
        self.checkpoints.wait()
        return self

    def resume(self) -> Peer:
        saved = self.checkpoints.newest()
        assert saved is not None
        self.resumable.load(self.checkpoints, saved)
        return self

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, in full."""
        state: dict[str, Tensor] = dict(self.trainer.model.state_dict())
        for name, parameter in self.trainer.model.named_parameters():
            if not parameter.requires_grad:
                continue
            owner = optimizers_of(self.trainer.optimizers, {name: parameter})[name]
            state |= {f"{name} {key}": value for key, value in saved_state(owner, parameter).items()}
        state |= {f"outer {name}": tensor for name, tensor in self.worker.outer.items()}
        state |= {f"residual {name}": tensor for name, tensor in self.worker.residual.items()}
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}

    def check(self, other: Peer) -> None:
        self.check_state(other.state())
        assert self.trainer.steps == other.trainer.steps
        assert self.resumable.batches.state() == other.resumable.batches.state()
        assert self.worker.scalars == other.worker.scalars

    def check_state(self, expected: dict[str, Tensor]) -> None:
        mine = self.state()
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(mine[name], tensor), name


def layout_of(ranks: int, split: bool) -> RankLayout:
    if ranks == 1:
        return ONE_RANK
    if split:
        return RankLayout(init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp")))
    return RankLayout(init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))


@pytest.fixture(autouse=True)
def _random() -> None:
    torch.manual_seed(1)


class TestGoingOn:
    def test_it_is_the_same_as_not_having_stopped(self, tmp_path: Path) -> None:
        first = Peer(tmp_path).train(3).save().train(4).wait()
        torch.manual_seed(99)  # another life begins with other random numbers
        Peer(tmp_path).resume().train(4).check(first)

    def test_t8_saving_never_changes_training(self, tmp_path: Path) -> None:
        plain = Peer(tmp_path / "a").train(5)
        torch.manual_seed(1)
        saving = Peer(tmp_path / "b").train(5, save=True)
        saving.check(plain)

    def test_what_is_written_is_the_moment_of_saving(self, tmp_path: Path) -> None:
        peer = Peer(tmp_path).train(2)
        expected = {name: tensor.clone() for name, tensor in peer.state().items()}
        peer.save().train(1).wait()
        Peer(tmp_path).resume().check_state(expected)

    def test_theta_is_held_and_the_rest_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: dict[str, int] = {}

        def watched(tensors: dict[str, Tensor], path: Path) -> None:
            written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
            save_file(tensors, path)

        monkeypatch.setattr(checkpoint_files, "save_file", watched)
        peer = Peer(tmp_path).train(1).save()
        theta = {f"worker/outer/{name}": tensor.data_ptr() for name, tensor in peer.worker.outer.items()}
        peer.wait()
        assert {name: written[name] for name in theta} == theta
        for name, parameter in peer.trainer.model.named_parameters():
            assert not parameter.requires_grad or written[f"model/{name}"] != parameter.data_ptr()
        assert written["worker/residual/embedding.weight"] != peer.worker.residual["embedding.weight"].data_ptr()

    @pytest.mark.parametrize("behind", [1, 2])
    def test_a_run_that_is_further_needs_no_local_parameters_and_theta_only_for_updates(
        self, tmp_path: Path, behind: int
    ) -> None:
        first, fresh = Peer(tmp_path).train(3).save().wait(), Peer(tmp_path)
        own = {name: parameter.detach().clone() for name, parameter in fresh.trainer.model.named_parameters()}
        saved = fresh.checkpoints.newest()
        assert saved is not None
        fresh.resumable.load(fresh.checkpoints, saved, run_step=3 + behind)
        assert (fresh.trainer.steps, fresh.resumable.batches.state()) == (3, first.resumable.batches.state())
        assert fresh.worker.scalars == first.worker.scalars
        for name, tensor in fresh.state().items():
            assert torch.equal(tensor, own[name] if name in own else first.state()[name]) or name.startswith(
                ("outer", "residual")
            )
        theta = first.worker.outer if behind == 1 else own
        assert all(torch.equal(fresh.worker.outer[name], theta[name]) for name in fresh.worker.outer)
        assert not any(residual.any() for residual in fresh.worker.residual.values())
        assert any(residual.any() for residual in first.worker.residual.values())

    def test_with_other_data_all_but_the_position_goes_on(self, tmp_path: Path) -> None:
        first = Peer(tmp_path).train(3).save().wait()
        with pytest.raises(
            ConfigError, match=r"the data has changed since the checkpoint .400 tokens then, 480 now.: .*--new-data"
        ):
            Peer(tmp_path, tokens=480).resume()
        other = Peer(tmp_path, tokens=480, new_data=True).resume()
        other.check_state(first.state())
        assert other.trainer.steps == 3 and other.trainer.optimizer.state, "the moments are those of the checkpoint"
        assert other.resumable.batches.state() == Peer(tmp_path, tokens=480).resumable.batches.state()

    @pytest.mark.parametrize("optimizer", ["muon", "sgd", "torch:Adafactor", "torch:RAdam"])
    def test_with_another_optimizer(self, tmp_path: Path, optimizer: str) -> None:
        def peer() -> Peer:
            return Peer(tmp_path, model=GPT(ModelConfig(layers=1, heads=2, width=8, context=8), 0), optimizer=optimizer)

        first = peer().train(2).save().wait()
        other = peer().resume()
        other.check(first)
        other.train(2).check(first.train(2))

    def test_before_the_first_step(self, tmp_path: Path) -> None:
        first = Peer(tmp_path).save().wait()
        Peer(tmp_path).resume().check(first)

    def test_a_frozen_parameter_is_not_written(self, tmp_path: Path) -> None:
        peer = Peer(tmp_path).train(1).save()
        peer.wait()
        saved = peer.checkpoints.newest()
        assert saved is not None
        names: list[str] = []
        peer.checkpoints.load(saved, lambda name, size, dtype: names.append(name))  # type: ignore[func-returns-value]
        assert "model/unused.weight" in names and not any("frozen" in name for name in names if name.startswith("model/"))
        assert "rank/0/buffer.mean" in names and "rank/0/random" in names


class TestTheFolder:
    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    def test_the_last_few_are_kept(self, tmp_path: Path) -> None:
        peer = Peer(tmp_path, keep=2).train(4, save=True)
        peer.wait()
        assert self.names(tmp_path) == ["checkpoint-00000003", "checkpoint-00000004"]

    def test_a_later_life_counts_on(self, tmp_path: Path) -> None:
        Peer(tmp_path).train(1).save().wait()
        Peer(tmp_path).save().wait()
        assert self.names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]

    def test_half_written_ones_are_removed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / ".partial-00000007").mkdir()
        (tmp_path / ".partial-00000007" / "rank-00000.safetensors").write_bytes(b"half")
        with caplog.at_level(logging.INFO):
            peer = Peer(tmp_path)
        assert "unfinished" in caplog.text
        assert self.names(tmp_path) == [] and peer.checkpoints.newest() is None

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest", "torn manifest", "not a manifest"])
    def test_a_damaged_one_is_skipped_with_a_line(self, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
        peer = Peer(tmp_path).train(2).save()
        expected = {name: tensor.clone() for name, tensor in peer.state().items()}
        peer.train(1).save().wait()
        newest = tmp_path / "checkpoint-00000002"
        tensors, manifest = newest / "rank-00000.safetensors", newest / "peer.json"
        match damage:
            case "truncated":
                tensors.write_bytes(tensors.read_bytes()[:-1])
            case "flipped":
                data = bytearray(tensors.read_bytes())
                data[len(data) // 2] ^= 1
                tensors.write_bytes(data)
            case "missing":
                tensors.unlink()
            case "no manifest":
                manifest.unlink()
            case "torn manifest":
                manifest.write_bytes(manifest.read_bytes()[:50])
            case "not a manifest":
                manifest.write_text('{"format": 3}')
        Peer(tmp_path).resume().check_state(expected)
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "checkpoint-00000002" in line and "trying the checkpoint before it" in line and "\n" not in line

    def test_one_of_another_format_is_refused_not_passed_over(self, tmp_path: Path) -> None:
        Peer(tmp_path).save().wait()
        manifest = tmp_path / "checkpoint-00000001" / "peer.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 4}))
        with pytest.raises(FormatError, match=r"checkpoint-00000001/peer.json: format 4, this software reads format 3$"):
            Peer(tmp_path).checkpoints.newest()

    @pytest.mark.parametrize(
        ("other", "word"),
        [
            (Owner(run_id="run-2", peer_id="a", schema_hash="5c"), "checkpoint-00000001: belongs to another run"),
            (Owner(run_id="run-1", peer_id="b", schema_hash="5c"), "checkpoint-00000001: belongs to another peer"),
            (Owner(run_id="run-1", peer_id="a", schema_hash="77"), "^another model: .*checkpoint-00000001 says; set"),
        ],
    )
    def test_one_of_another_owner_is_an_error_that_names_the_folder(self, tmp_path: Path, other: Owner, word: str) -> None:
        Peer(tmp_path).save().wait()
        with pytest.raises(ConfigError, match=f"{word}.*--fresh"):
            Peer(tmp_path, owner=other).checkpoints.newest()

    def test_a_save_that_fails_is_said_and_leaves_the_earlier_ones(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        peer = Peer(tmp_path / "c").train(1).save()
        peer.wait()
        shutil.move(tmp_path / "c", tmp_path / "away")
        (tmp_path / "c").write_text("in the way")
        peer.train(1).save().wait()
        assert "checkpoint 2 was not written" in caplog.text
        (tmp_path / "c").unlink()
        shutil.move(tmp_path / "away", tmp_path / "c")
        peer.train(1).save().wait()
        assert self.names(tmp_path / "c") == ["checkpoint-00000001", "checkpoint-00000003"]

    def test_a_save_that_fails_for_another_reason_than_the_disk_ends_training(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = Peer(tmp_path).train(1)

        def parse(values: object) -> None:
            raise ValueError("tensor model/a: box has no file")

        monkeypatch.setattr(checkpoint_files, "parse", parse)
        peer.save()
        with pytest.raises(ValueError, match="tensor model/a: box has no file") as raised:
            peer.wait()
        assert "_publish" in [entry.name for entry in raised.traceback], "it shows where"
        with pytest.raises(ValueError, match="tensor model/a: box has no file"):
            peer.save()
        with pytest.raises(ValueError, match="tensor model/a: box has no file"):
            _ = peer.checkpoints.idle
        assert "not written" not in caplog.text and peer.checkpoints.newest() is None

    def test_a_folder_that_cannot_be_used_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="--checkpoints"):
            Peer(tmp_path / "file" / "deep")

    def test_tensors_that_do_not_fit_are_an_error(self, tmp_path: Path) -> None:
        peer = Peer(tmp_path).save()
        peer.wait()
        saved = peer.checkpoints.newest()
        assert saved is not None
        with pytest.raises(StorageError, match="checkpoint-00000001"):
            peer.checkpoints.load(saved, lambda name, size, dtype: torch.zeros(3))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda values: values["scalars"].update(steps=-1), "scalars.steps"),
            (lambda values: values["scalars"].update(steps="3"), "scalars.steps"),
            (lambda values: values["scalars"].update(data=[]), "scalars.data"),
            (lambda values: values["scalars"]["data"].update(index="1"), "scalars.data"),
            (lambda values: values["scalars"].pop("worker"), "scalars.worker"),
            (lambda values: values["tensors"].pop("model/unused.bias"), "model/unused.bias is missing"),
            (lambda values: values["tensors"].pop("rank/0/random"), "rank/0/random is missing"),
            (lambda values: values["tensors"].pop("optimizer/embedding.weight/exp_avg"), "exp_avg is missing"),
            (lambda values: values["tensors"].update({"model/x": values["tensors"]["model/unused.bias"]}), "model/x is not"),
            (
                lambda values: values["tensors"].update({"worker/what/x": values["tensors"]["model/unused.bias"]}),
                "worker/what/x",
            ),
            (
                lambda values: values["tensors"].update({"optimizer/x/y": values["tensors"]["model/unused.bias"]}),
                "optimizer/x/y",
            ),
        ],
    )
    def test_edited_metadata_is_an_error_of_one_line(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
    ) -> None:
        Peer(tmp_path).train(1).save().wait()
        manifest = tmp_path / "checkpoint-00000001" / "peer.json"
        values = json.loads(manifest.read_text())
        change(values)
        manifest.write_text(json.dumps(values))
        with pytest.raises(StorageError) as caught:
            Peer(tmp_path).resume()
        assert words in str(caught.value) and "checkpoint-00000001" in str(caught.value) and "\n" not in str(caught.value)


def save_on_ranks(rank: int, folder: str, expected: str) -> None:
    torch.manual_seed(rank)
    peer = Peer(Path(folder), ranks=Ranks.world()).train(2).save()
    peer.wait()
    torch.save(peer.state(), f"{expected}.saved.{rank}")
    peer.train(2)
    torch.save(peer.state(), f"{expected}.later.{rank}")


def load_on_ranks(rank: int, folder: str, expected: str, written_by: int) -> None:
    torch.manual_seed(77)
    ranks = Ranks.world()
    peer = Peer(Path(folder), ranks=ranks).resume()
    source = rank if written_by == ranks.size else 0
    peer.check_state(torch.load(f"{expected}.saved.{source}"))
    if written_by == ranks.size:
        peer.train(2).check_state(torch.load(f"{expected}.later.{rank}"))


@pytest.mark.timeout(240)
def test_two_ranks_go_on_to_the_bit_and_one_or_three_can_take_over(tmp_path: Path) -> None:
    folder, expected = tmp_path / "checkpoints", tmp_path / "expected"
    for ranks, (work, *rest) in zip((2, 2, 3), ((save_on_ranks,), (load_on_ranks, 2), (load_on_ranks, 2)), strict=True):
        meeting = tmp_path / f"world-{next(COUNT)}"
        meeting.mkdir()
        spawn(work, ranks, meeting, str(folder), str(expected), *rest)
    load_on_ranks(0, str(folder), str(expected), 2)


COUNT = itertools.count()
SPLIT = ModelConfig(layers=1, heads=2, width=8, context=8, vocabulary=16)


def split_peer(folder: Path, optimizer: str, seed: int, ranks: Ranks = ALONE) -> Peer:
    return Peer(folder, model=GPT(SPLIT, seed=seed), optimizer=optimizer, ranks=ranks)


def save_and_load_split(rank: int, folder: str, expected: str, optimizer: str) -> None:
    ranks = Ranks.world()
    peer = split_peer(Path(folder), optimizer, 0, ranks).train(2).save().wait()
    ranks.all([True])  # rank 0 has made it whole
    state = peer.state()
    if rank == 0:
        torch.save(state, expected)
    split_peer(Path(folder), optimizer, 1, ranks).resume().check_state(state)


@pytest.mark.sampled(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_tensor_parallel_ranks_go_on_and_one_rank_can_take_over(tmp_path: Path, optimizer: str) -> None:
    folder, expected = tmp_path / "checkpoints", tmp_path / "expected"
    spawn(save_and_load_split, 4, tmp_path, str(folder), str(expected), optimizer)
    split_peer(folder, optimizer, 1).resume().check_state(torch.load(expected))


class Counting(torch.optim.SGD):
    """Keeps state in its parameter groups, as schedule-free's AdamW and Prodigy do."""

    def __init__(self, groups: Any, lr: float, kept: object = None) -> None:
        super().__init__(groups, lr=lr)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": 0.0, "lr_max": -math.inf, "train_mode": False, "d_numerator": None, "kept": kept}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            group["lr_max"], group["train_mode"], group["d_numerator"] = math.inf, True, 0.5
            group["added"] = group["k"] / 3
            if isinstance(group["kept"], Tensor):
                group["kept"] += 1


class TestStateInParameterGroups:
    def peer(self, folder: Path, kept: object = None) -> Peer:
        plugins.register("optimizers", "test_counting", lambda groups, options: Counting(groups, options["lr"], kept))
        return Peer(folder, optimizer="entry:test_counting")

    @staticmethod
    def groups(peer: Peer) -> list[dict[str, Any]]:
        (optimizer,) = peer.trainer.optimizers
        return [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in optimizer.param_groups]

    def test_it_is_kept(self, tmp_path: Path) -> None:
        first = self.peer(tmp_path).train(3).save().wait()
        again = self.peer(tmp_path).resume()
        assert self.groups(again) == self.groups(first) and self.groups(again)[1]["k"] == 3
        again.save().wait()
        assert self.groups(self.peer(tmp_path).resume()) == self.groups(first)

    def test_settings_are_those_that_the_optimizer_was_made_with(self, tmp_path: Path) -> None:
        first = self.peer(tmp_path, kept=1).train(2).save().wait()
        again = self.peer(tmp_path, kept=2).resume()
        assert [group["kept"] for group in self.groups(first) + self.groups(again)] == [1, 1, 2, 2]

    def test_one_without_any_has_none_in_its_checkpoints(self, tmp_path: Path) -> None:
        saved = Peer(tmp_path).train(2).save().wait().checkpoints.newest()
        assert saved is not None and "groups" not in saved.scalars
        assert self.groups(self.peer(tmp_path).resume())[0]["k"] == 0, "as that of an older version"

    def test_what_is_no_number_is_refused(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path, kept=torch.zeros(2)).save().wait()
        with pytest.raises(
            ConfigError, match=r"^Counting keeps kept of its parameter groups as Tensor: set --checkpoint-every 0$"
        ):
            peer.train(1).save()

    @pytest.mark.parametrize(
        "groups", [7, [], [[{}]], [[{}, {}], [{}, {}]], [[{}, 7]], [[{}, {"k": "7"}]], [[{}, {"lr": 0.5}]], [[{}, {"k": [1]}]]]
    )
    def test_what_does_not_fit_is_damaged(self, tmp_path: Path, groups: object) -> None:
        self.peer(tmp_path).train(1).save().wait()
        peer = self.peer(tmp_path)
        saved = peer.checkpoints.newest()
        assert saved is not None
        with pytest.raises(StorageError, match=r"checkpoint-00000001: damaged \(scalars\.groups"):
            peer.resumable.load(peer.checkpoints, replace(saved, scalars={**saved.scalars, "groups": groups}))
