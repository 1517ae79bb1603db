"""AdamW with moments in 8 or 4 bits: near AdamW's steps, in a fraction of its memory, and resumed to the bit.

What needs torchao is skipped where it is not installed. torchao's step is not compiled here, which would take most of a minute.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import InnerConfig, RunConfig
from edit.errors import ConfigError, StorageError
from edit.replica.ranks import ALONE
from edit.worker.checkpoint import KINDS
from edit.worker.local_progress import scrub
from peers.training import quantized_state
from peers.training.checkpoint import Resumable
from peers.training.checkpoint_files import Checkpoints, Owner
from peers.training.inner_optimizers import inner_optimizers, saved_state
from peers.training.trainer import Trainer

CPU = torch.device("cpu")
SIZES = {"int8": 2.03, "int4": 1.06}


class Net(nn.Module):
    """One matrix that is quantized, one that is too small to be, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.large, self.small = nn.Linear(128, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.small(self.large(x).relu()), y)


class Rows:
    """Random rows, with a position that a checkpoint has."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(self.position))
        self.position += 1
        return x, x[:, :8]

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load(self, state: Mapping[str, Any], *, new_data: bool = False) -> None:
        self.position = state["position"]

    @property
    def fingerprint(self) -> str:
        return ""


class NoWorker:
    """A worker that has nothing to save."""

    def state_dict(self) -> dict[str, Any]:
        return {"scalars": {}}

    def empty_state(self, kinds: Collection[str], scalars: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        return {}

    def kinds_needed(self, scalars: Mapping[str, Any], run_step: int) -> frozenset[str]:
        return frozenset(KINDS)

    def load_state_dict(self, state: Mapping[str, Any], *, forward: bool = False) -> None:
        pass


class Peer:
    """A training with its checkpoints."""

    def __init__(self, state: str, folder: Path) -> None:
        rows, config = Rows(), InnerConfig(state=state, lr=0.01, warmup_steps=2)
        self.trainer = Trainer(Net(), rows, config, total_steps=20, device=CPU, clock=lambda: 0.0)
        self.checkpoints = Checkpoints(folder, Owner(run_id="run-1", peer_id="a", schema_hash="5c"), 2, ALONE)
        self.resumable = Resumable(self.trainer, rows, NoWorker(), ALONE)

    @property
    def weight(self) -> nn.Parameter:
        """The matrix whose moments are quantized."""
        return next(self.trainer.model.parameters())

    def train(self, steps: int) -> float:
        loss = 0.0
        with torch.compiler.set_stance("force_eager"):
            for _ in range(steps):
                loss = self.trainer.step().loss
        return loss

    def save(self) -> None:
        self.resumable.save(self.checkpoints)
        self.checkpoints.wait()

    def resume(self) -> None:
        saved = self.checkpoints.newest()
        assert saved is not None
        self.resumable.load(self.checkpoints, saved)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # it warns of libraries for other hardware
    return pytest.importorskip("torchao", reason="the extra lowbit is not installed")


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"inner.state = \"int8\" needs torchao .*pip install 'edit-localsgd\[lowbit\]'"):
        inner_optimizers(Net(), InnerConfig(state="int8"), CPU)


@pytest.mark.parametrize("optimizer", ["muon", "sgd", "torch:Adam", "entry:lion"])
def test_it_is_adamws(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=r"inner\.state has no effect with inner\.optimizer"):
        RunConfig.from_mapping({"inner": {"optimizer": optimizer, "state": "int8"}})


def test_a_configuration_without_it_is_what_it_was() -> None:
    assert '"state"' not in RunConfig().to_json()
    quantized = RunConfig.from_mapping({"inner": {"state": "int8"}})
    assert RunConfig.from_json(quantized.to_json()) == quantized


def test_a_step_that_cannot_be_compiled_is_one_line() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise torch._dynamo.exc.TorchDynamoException("InvalidCxxCompiler: no compiler\nand a long trace")

    with pytest.raises(ConfigError, match=r"^Fails cannot be compiled here .InvalidCxxCompiler: no compiler.: install [^\n]*$"):
        quantized_state.step(Fails(Net().parameters(), lr=0.1))


def test_where_torch_compiles_nothing_the_step_is_taken_as_it_is() -> None:
    class Whole(torch.optim.SGD):
        """Compiles a part of its step as a whole, as torchao's do."""

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                torch.compile(torch.Tensor.zero_, fullgraph=True, backend=lambda graph, _: graph)(parameter.data)

    net = Net()
    with torch._dynamo.config.patch(disable=True):  # TORCH_COMPILE_DISABLE=1
        quantized_state.step(Whole(net.parameters(), lr=0.1))
    assert not any(parameter.any() for parameter in net.parameters())


@pytest.mark.parametrize("state", SIZES)
class TestWithTorchao:
    @pytest.fixture(autouse=True)
    def _torchao(self, torchao: Any) -> None:
        """Skip without it."""

    def test_the_steps_are_near_those_of_adamw_and_the_rate_is_the_schedules(self, state: str, tmp_path: Path) -> None:
        plain, quantized = Peer("fp32", tmp_path / "a"), Peer(state, tmp_path / "b")
        expected = plain.train(8)
        assert abs(quantized.train(8) - expected) < 0.05 * expected
        groups = quantized.trainer.optimizer.param_groups, plain.trainer.optimizer.param_groups
        for mine, theirs in zip(*groups, strict=True):
            assert float(mine["lr"]) == pytest.approx(theirs["lr"]) and mine["weight_decay"] == theirs["weight_decay"]
            assert mine["betas"] == (0.9, 0.95)

    def test_the_bytes_of_a_large_matrix_are_those_that_are_documented(self, state: str, tmp_path: Path) -> None:
        peer = Peer(state, tmp_path)
        peer.train(1)
        kept = saved_state(peer.trainer.optimizer, peer.weight)
        assert sum(tensor.nbytes for tensor in kept.values()) / peer.weight.numel() == pytest.approx(SIZES[state], abs=0.01)

    def test_it_resumes_to_the_bit(self, state: str, tmp_path: Path) -> None:
        first = Peer(state, tmp_path)
        first.train(3)
        first.save()
        first.train(3)
        again = Peer(state, tmp_path)
        again.resume()
        again.train(3)
        pairs = zip(again.trainer.model.parameters(), first.trainer.model.parameters(), strict=True)
        for mine, theirs in pairs:
            assert torch.equal(mine, theirs)
            left, right = saved_state(again.trainer.optimizer, mine), saved_state(first.trainer.optimizer, theirs)
            assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    def test_a_checkpoint_of_another_kind_of_state_is_an_error_of_one_line(self, state: str, tmp_path: Path) -> None:
        plain = Peer("fp32", tmp_path)
        plain.train(1)
        plain.save()
        with pytest.raises(StorageError, match=r"damaged .tensor optimizer/large.weight/exp_avg is not this training's.$"):
            Peer(state, tmp_path).resume()

    def test_a_missing_part_is_named(self, state: str, tmp_path: Path) -> None:
        peer = Peer(state, tmp_path)
        peer.train(1)
        peer.save()
        manifest = tmp_path / "checkpoint-00000001" / "peer.json"
        values = json.loads(manifest.read_text())
        del values["tensors"]["optimizer/large.weight/exp_avg.scale"]
        manifest.write_text(json.dumps(values))
        with pytest.raises(StorageError, match=r"exp_avg\.scale is missing"):
            Peer(state, tmp_path).resume()

    def test_a_gradient_that_is_not_finite_leaves_nothing_behind(self, state: str, tmp_path: Path) -> None:
        peer = Peer(state, tmp_path)
        peer.train(2)
        parameters = list(peer.trainer.model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float("nan"))
        with torch.compiler.set_stance("force_eager"):
            peer.trainer.optimizer.step()
        scrub(peer.trainer.optimizer, parameters)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        peer.train(1)
        assert all(bool(parameter.isfinite().all()) for parameter in parameters)
