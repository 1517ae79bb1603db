"""The same run on one rank, on 2 and 3 with FSDP2, and on 2x2 with FSDP2 and tensor parallelism: the same outer parameters.

And all of these layouts as peers of ONE run. Real daemons, fp32 on the wire.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

import aggregator.cli
from edit.lab.run_toml import Settings
from tests.support.daemons import Daemon, Site, call, small

STEPS = 3
LR = 3e-3
LAYOUTS = {"whole": (1, 1), "two": (2, 1), "three": (3, 1), "two-by-two": (4, 2)}  # ranks, of which tensor-parallel


def settings(peers: int) -> Settings:
    return small(
        "layouts",
        model={"layers": 2, "context": 16},
        inner={"lr": LR, "warmup_steps": 2, "batch_size": 4},
        sync={"every": 4, "outer_steps": STEPS},
        codec={"up": "fp32", "down": "fp32"},
        rounds={"start_peers": peers, "quorum": peers, "floor_s": 60.0, "ceiling_s": 100.0},
        membership={"lease_s": 30.0},
    )


def replica(site: Site, name: str, layout: str) -> Daemon:
    ranks, tensor_parallel = LAYOUTS[layout]
    options = ["--tensor-parallel", tensor_parallel] if tensor_parallel > 1 else []
    return site.peer(name, *options, ranks=ranks)


def outer_parameters(folder: Path, layout: str) -> dict[str, Tensor]:
    """What a run of one replica in this layout ends with."""
    with Site(folder, settings(1)) as site:
        site.serve()
        site.enrol("peer")
        peer = replica(site, "peer", layout)
        assert peer.finish() == 0, peer.lines
        call(aggregator.cli.app, "export", "--state", site.state, "--out", folder / "outer.safetensors")
    return load_file(folder / "outer.safetensors")


@pytest.mark.timeout(240)
def test_every_layout_gives_the_same_outer_parameters(tmp_path: Path) -> None:
    expected = outer_parameters(tmp_path / "whole", "whole")
    for layout in ("two", "three", "two-by-two"):
        given = outer_parameters(tmp_path / layout, layout)
        assert given.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = given[name] - tensor
            assert difference.norm() <= 1e-5 * tensor.norm(), name
            assert difference.abs().max() <= 0.01 * LR, name  # AdamW divides rounding by itself where a gradient is almost 0


@pytest.mark.timeout(240)
def test_all_layouts_train_in_one_run(tmp_path: Path) -> None:
    with Site(tmp_path, settings(3)) as site:
        site.serve()
        site.enrol("whole", "two", "two-by-two")
        peers = [replica(site, name, name) for name in ("whole", "two", "two-by-two")]
        assert [peer.finish() for peer in peers] == [0, 0, 0]
        digest = site.status()["digest"]
        for peer in peers:
            assert f"outer step {STEPS}, digest {digest[:12]}" in peer.last("the run has finished")
