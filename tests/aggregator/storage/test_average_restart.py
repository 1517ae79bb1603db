"""The average of theta over a restart of an aggregator, and in an export."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from tests.support.encoded import encode

NUMEL = 600
SCHEMA = Schema((FragmentSpec(fragment_id=0, name="layer", tensors=(TensorSpec(name="layer.weight", shape=(20, 30)),)),))
KINDS = {"ema": 'kind = "ema"\ndecay = 0.6\n', "last": 'kind = "last"\nlast = 3\n'}


def begun(path: Path, average: str) -> StateFolder:
    folder = StateFolder.create(path, f'name = "test"\n[average]\n{average}')
    Authority.create(folder.path, folder.run_id, ("localhost",), now=time.time())
    return folder


def trained(folder: StateFolder, checkpoint: int) -> OuterState:
    """Five outer steps, with a checkpoint after so many of them; the others are in the journal."""
    store = Store(folder.outer, folder.config(), folder.run_id)
    outer = OuterState(SCHEMA, folder.config(), [torch.zeros(NUMEL)])
    store.found(outer)
    for number in range(1, 6):
        delta = encode("fp32", 0.01 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)))
        record = outer.record(outer.reduce(0, [Measured("peer", 1, 1, measure(delta), delta)]))
        store.begin_fragment(number, record).result()
        store.append_commit(number, number, "all in", 0, base=outer.digest)
        store.applied(outer.commit(number, "all in", [record]))
        if number == checkpoint:
            store.checkpoint(outer)
    store.close()
    return outer


@pytest.mark.parametrize("checkpoint", [0, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_and_an_export_find_the_average(tmp_path: Path, kind: str, checkpoint: int) -> None:
    folder = begun(tmp_path / "run", KINDS[kind])
    outer = trained(folder, checkpoint)
    again = Store(folder.outer, folder.config(), folder.run_id)
    recovered = again.recover()
    again.close()
    assert recovered is not None and recovered.digest == outer.digest
    assert torch.equal(recovered.averaged[0], outer.averaged[0])
    out = tmp_path / "model.safetensors"
    result = CliRunner().invoke(app, ["export", "--state", str(folder.path), "--out", str(out), "--averaged"])
    assert result.exit_code == 0, result.output
    shown = {"ema": "ema 0.6", "last": "last 3"}[kind]
    assert f"outer step 5, their average ({shown}), digest {outer.digest[:12]}" in result.output.replace("\n", "")
    with safe_open(out, framework="pt") as file:
        assert torch.equal(file.get_tensor("layer.weight"), outer.averaged[0].view(20, 30))
        assert file.metadata()["average"] == shown
    assert CliRunner().invoke(app, ["export", "--state", str(folder.path), "--out", str(out)]).exit_code == 0
    with safe_open(out, framework="pt") as file:
        assert torch.equal(file.get_tensor("layer.weight"), outer.theta[0].view(20, 30))
        assert "average" not in file.metadata()


def test_an_export_of_an_average_that_nobody_keeps_is_refused(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "")
    trained(folder, 0)
    out = tmp_path / "model.safetensors"
    result = CliRunner().invoke(app, ["export", "--state", str(folder.path), "--out", str(out), "--averaged"])
    assert result.exit_code != 0 and "average.kind" in str(result.exception) and not out.exists()
