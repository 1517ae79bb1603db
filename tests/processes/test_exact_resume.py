"""Everything is killed with SIGKILL at several moments and started again; the run ends with the bits of a quiet one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, Site, small
from tests.support.exhaustive import rarely

STEPS = 16
SETTINGS = small(
    "exact",
    model={"width": 16, "context": 16},
    sync={"every": 4, "outer_steps": STEPS, "strict": True},
    codec={
        "up": "int8",
        "down": "bf16",
        "up_decay": 0.95,
        "up_residual": "int8",
        "fragments": {"blocks.*": {"up": "topk:k=9", "down": "e3m0"}, "norm": {"up": "sign", "down": "stat2"}},
    },
    rounds={"start_peers": 2, "quorum": 2, "floor_s": 60.0, "ceiling_s": 60.0},
    membership={"lease_s": 20.0},
    storage={"checkpoint_every": 3},
)
Life = tuple[Daemon, Daemon, Daemon]


def start(site: Site, every: int) -> Life:
    """every: outer steps between two checkpoints of a peer; so many it may be behind when it begins again."""
    return site.serve(), *(site.peer(name, "--checkpoint-every", every) for name in ("a", "b"))


def finish(site: Site, life: Life) -> str:
    """Wait for the end; the digest, on which all three agree."""
    _, *peers = life
    for peer in peers:
        assert peer.finish() == 0, peer.lines
    status = site.status()
    for peer in peers:
        assert f"outer step {STEPS}, digest {status['digest'][:12]}" in peer.last("the run has finished")
    return str(status["digest"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that a run ends with when nobody is killed."""
    with Site(tmp_path_factory.mktemp("quiet") / "site", SETTINGS) as site:
        return finish(site, start_enrolled(site, 1))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", rarely([1, 4], kept=[4]))
def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path, expected: str, every: int) -> None:
    moments: list[Callable[[Life], object]] = [
        lambda life: life[1].until("joined at outer step"),  # before anything is committed
        lambda life: life[0].until("committed"),  # the coordinator has it, the peers may not
        lambda life: [life[2].until("outer step") for _ in range(3)],  # a peer has it, and is a step further
        # the coordinator has its checkpoint of 6, the peers, saving every 4, begin again from 4: with the updates to 5 and 6
        lambda life: life[1].until("outer step 7,"),
    ]
    with Site(tmp_path / "killed", SETTINGS) as site:
        life = start_enrolled(site, every)
        for moment in moments:
            moment(life)
            for daemon in life:
                daemon.kill()
            life = start(site, every)
        assert finish(site, life) == expected


def start_enrolled(site: Site, every: int) -> Life:
    coordinator = site.serve()
    site.enrol("a", "b")
    return coordinator, *(site.peer(name, "--checkpoint-every", every) for name in ("a", "b"))
