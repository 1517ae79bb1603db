"""`torch.set_default_dtype` and `torch.set_default_device` in a user's script change nothing of the exchange: its vectors are
fp32 on the CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edit import kernels
from edit.config.run import CodecConfig, OuterConfig, RunConfig, SyncConfig
from edit.local import LocalRun
from edit.worker.worker import EditWorker, WorkerConfig

ROOT = Path(__file__).parents[2]
EXCHANGE = (
    *(f"edit/{name}" for name in ("codecs", "kernels", "merging", "replica", "trust", "worker")),
    *("edit/regional_peer.py", "peers/carriers", "aggregator"),
)
CONSTRUCTORS = {
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    )
}
RUNS = [  # up, down, mode, outer optimizer
    ("fp32", "fp32", "blocking", "nesterov"),
    ("topk", "int8", "delayed", "adam"),
    ("sdd", "sdd", "blocking", "sgd"),
    ("sign", "bf16", "eager", "sgd"),
    ("top1", "fp16", "forward", "delayed_nesterov"),
    ("e3m0", "stat2", "eager", "nesterov"),
    ("int4", "int4", "delayed", "yogi"),
]
DEFAULTS: tuple[torch.dtype | str, ...] = (torch.float64, torch.bfloat16, "meta")  # "meta" for "cuda": it is everywhere


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def set_default(value: torch.dtype | str) -> None:
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    else:
        torch.set_default_device(value)


def trained(up: str, down: str, mode: str, optimizer: str, default: torch.dtype | str | None) -> list[Tensor | str]:
    """What two peers end with under a default that is set before entering; the first one's checkpoint is loaded again."""
    run_config = RunConfig(
        codec=CodecConfig(up=up, down=down),
        outer=OuterConfig(optimizer=optimizer, lr=0.7),
        sync=SyncConfig(every=2, mode=mode),
    )
    run, generator = LocalRun(run_config, ["ada", "grace"]), torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 65, generator=generator) for _ in range(12)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 1)))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    if default is not None:
        set_default(default)
    workers = [
        EditWorker(model, inner, run.collective(name), WorkerConfig.of(run_config), leave="local")
        for model, inner, name in zip(models, optimizers, ("ada", "grace"), strict=True)
    ]
    with workers[0], workers[1]:
        for x in batches:
            for i, (model, inner) in enumerate(zip(models, optimizers, strict=True)):
                model(x + i).pow(2).mean().backward()
                inner.step()
                inner.zero_grad()
        assert workers[0].synchronize() and workers[1].synchronize()
        state = workers[0].state_dict()
    with workers[0].outer_parameters():
        outer = [parameter.detach().clone() for parameter in models[0].parameters()]
    resumed = EditWorker(models[0], optimizers[0], run.collective("ada"), WorkerConfig.of(run_config))
    empty = resumed.empty_state([kind for kind in state if kind != "scalars"], state["scalars"])
    for kind, tensors in empty.items():
        assert {tensor.device.type for tensor in tensors.values()} <= {"cpu"}
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in state[kind].items()}
    resumed.load_state_dict(state)
    locals_ = [parameter.detach().clone() for model in models for parameter in model.parameters()]
    return [workers[0].digest, workers[1].digest, *outer, *locals_]


@pytest.mark.covering
@pytest.mark.parametrize("fast", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize(("up", "down", "mode", "optimizer"), RUNS)
def test_every_codec_exchanges_the_same_bits(
    up: str, down: str, mode: str, optimizer: str, default: torch.dtype | str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.load()
    if not fast:
        monkeypatch.setattr(kernels, "_compiled", None)
    expected = trained(up, down, mode, optimizer, None)
    for one, other in zip(trained(up, down, mode, optimizer, default), expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def test_the_exchange_leaves_nothing_to_the_defaults() -> None:
    """Every constructor of a tensor says its dtype and its device."""
    files = [
        file for name in EXCHANGE for file in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    calls = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    made = [(file, node) for file, node in calls if ast.unparse(node.func) in CONSTRUCTORS]
    assert len(made) > 50
    assert [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file, node in made
        if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ] == []
