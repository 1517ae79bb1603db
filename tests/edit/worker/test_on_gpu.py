"""What a worker computes on the GPU of its model, computed by the same code on the CPU: the bits of a model on the CPU.

`benchmarks/gpu.py --parts paths` compares a GPU's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edit.config.algorithm import SyncConfig
from edit.config.codec import CodecConfig
from edit.config.run import RunConfig
from edit.local import LocalRun
from edit.replica import replica
from edit.replica.flat import LocalVector
from edit.worker.worker import EditWorker, WorkerConfig

MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "delayed": {"mode": "delayed", "delay": 2},
    "delayed, lerp": {"mode": "delayed", "delay": 2, "mix": "lerp"},
    "streaming": {"mode": "delayed", "delay": 1, "groups": 2},
    "eager": {"mode": "eager", "delay": 2},
}


def trained(mode: Mapping[str, Any], codec: Mapping[str, str], dtype: torch.dtype) -> list[tuple[int, str, list[Tensor]]]:
    """Return (outer step, digest of theta, local parameters) after each of some steps of a lone peer, its gradients given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 700), nn.Tanh(), nn.Linear(700, 40)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = RunConfig(sync=SyncConfig(every=4, **mode), codec=CodecConfig(**codec))  # type: ignore[arg-type]
    seen = []
    with EditWorker(model, optimizer, LocalRun(config, ["me"]).collective("me"), WorkerConfig.of(config)) as worker:
        for _ in range(13):
            with torch.no_grad():
                model(torch.zeros(1, 40, dtype=dtype))  # where updates come in
            for parameter in model.parameters():
                parameter.grad = (torch.randn(parameter.shape) * 1e-2).to(dtype)
            optimizer.step()
            with worker.outer_parameters():
                pass
            seen.append((worker.outer_step, worker.digest, [parameter.detach().clone() for parameter in model.parameters()]))
    return seen


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "codec", [{"up": "fp32", "down": "fp32"}, {"up": "int8", "down": "int8", "up_residual": "int8"}, {"up": "int4"}]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_those_of_a_model_on_the_cpu(
    mode: str, codec: Mapping[str, str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(MODES[mode], codec, dtype)
    used: list[Sequence[Tensor]] = []

    def on_gpu(parameters: Sequence[Tensor]) -> torch.device:
        used.append(parameters)
        return torch.device("cpu")

    monkeypatch.setattr(replica, "on_gpu", on_gpu)
    monkeypatch.setattr(LocalVector, "readable", staticmethod(lambda parameters: False))
    found = trained(MODES[mode], codec, dtype)
    assert used and expected[-1][0] >= 2
    for (step, digest, local), (other_step, other_digest, other_local) in zip(expected, found, strict=True):
        assert (step, digest) == (other_step, other_digest)
        assert all(map(torch.equal, local, other_local))
