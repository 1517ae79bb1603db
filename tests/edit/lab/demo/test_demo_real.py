"""The shortest demos with the real daemons: two peers, three outer steps, no faults. Hold the lab to their command lines."""

import io
import json
from pathlib import Path

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
    assert (results.complete, results.committed, results.losses.outer_step) == (True, 3, 3)
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
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    curve = [line["step"] for line in lines if line["kind"] == "validation" and line["who"] == "outer"]
    assert curve[0] == 0 and curve[-1] == 30 and curve == sorted({*curve}), "each point is of another outer step"
    kinds = {line["kind"] for line in lines}
    assert {"round", "peer", "member", "step", "outer", "lone", "validation", "event"} <= kinds


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_two_real_members_of_a_swarm_learn_together_and_have_the_same_parameters_on_disk(tmp_path):
    output = io.StringIO()
    options = DemoOptions(peers=2, steps=30, faults=False, quick=True, swarm=True, out=tmp_path / "demo")
    results = run_demo(options, Console(file=output, width=120))
    assert (results.complete, results.swarm, results.committed) == (True, True, 3)
    assert results.digests.unequal == () and results.digests.compared >= 2 * 2 * 2  # members, parts, outer steps
    assert (results.agreement.members, results.agreement.unequal, results.agreement.outer_step) == (2, (), 3)
    assert results.losses.outer < results.losses.initial - 1
    assert all(peer.sent > results.parameters for peer in results.peers)
    with safe_open(options.out / "outer.safetensors", "pt") as tensors:
        assert sum(tensors.get_tensor(name).numel() for name in tensors.keys()) == results.parameters  # noqa: SIM118
    assert "2 peers without a coordinator trained one model" in (options.out / "report.html").read_text()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(options.out).encode() in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
