"""The shortest demo with the real daemons: two peers, three outer steps, no faults. Holds the lab to their command lines."""

import io
import json

import pytest
from rich.console import Console
from safetensors import safe_open

from edit.lab.demo.command import run_demo
from edit.lab.demo.plan import DemoOptions


@pytest.mark.timeout(240)
def test_two_real_peers_learn_together_and_agree_on_every_digest(tmp_path):
    output = io.StringIO()
    options = DemoOptions(peers=2, steps=30, faults=False, quick=True, out=tmp_path / "demo")
    results = run_demo(options, Console(file=output, width=120))
    assert (results.complete, results.committed) == (True, 3)
    assert results.digests.unequal == ()
    assert results.digests.compared >= 2 * 2  # the last one may race with the end
    assert results.losses.outer < results.losses.initial - 1
    assert results.lone_steps == 30
    assert all(peer.sent > results.parameters for peer in results.peers)  # int8: at least a byte per parameter
    values = json.loads((options.out / "results.json").read_text())
    assert values["run_id"].startswith("demo-")
    with safe_open(options.out / "outer.safetensors", "pt") as tensors:
        assert sum(tensors.get_tensor(name).numel() for name in tensors.keys()) == results.parameters  # noqa: SIM118
    assert len((options.out / "sample.txt").read_text()) > 0
    assert "peer-1" in (options.out / "report.html").read_text()
    kinds = {json.loads(line)["kind"] for line in (options.out / "metrics.jsonl").read_text().splitlines()}
    assert {"round", "peer", "member", "step", "outer", "lone", "validation", "event"} <= kinds
