"""Everything is killed with SIGKILL at several moments and started again; the run ends with the bits of a quiet one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, Site

STEPS = 16
TOML = f"""
name = "exact"
[model]
layers = 1
width = 16
heads = 2
context = 16
[inner]
lr = 3e-3
warmup_steps = 5
[sync]
every = 4
outer_steps = {STEPS}
strict = true
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[codec]
up = "int8"
down = "bf16"
[rounds]
start_peers = 2
quorum = 2
floor_s = 60.0
ceiling_s = 60.0
[membership]
heartbeat_s = 0.5
lease_s = 20.0
[storage]
checkpoint_every = 3
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""
Life = tuple[Daemon, Daemon, Daemon]


def start(site: Site) -> Life:
    return site.serve(), site.peer("a"), site.peer("b")


def finish(site: Site, life: Life) -> str:
    """Wait for the end; the digest, on which all three agree."""
    _, *peers = life
    for peer in peers:
        assert peer.finish() == 0, peer.lines
    status = site.status()
    for peer in peers:
        assert f"outer step {STEPS}, digest {status['digest'][:12]}" in peer.last("the run has finished")
    return str(status["digest"])


@pytest.mark.timeout(300)
def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    with Site(tmp_path / "quiet", TOML) as site:
        life = start_enrolled(site)
        expected = finish(site, life)

    moments: list[Callable[[Life], object]] = [
        lambda life: life[1].until("joined at outer step"),  # before anything is committed
        lambda life: life[0].until("committed"),  # the coordinator has it, the peers may not
        lambda life: [life[2].until("outer step") for _ in range(3)],  # a peer has it, and is a step further
        lambda life: [life[0].until("committed") for _ in range(4)],
    ]
    with Site(tmp_path / "killed", TOML) as site:
        life = start_enrolled(site)
        for moment in moments:
            moment(life)
            for daemon in life:
                daemon.kill()
            life = start(site)
        assert finish(site, life) == expected


def start_enrolled(site: Site) -> Life:
    coordinator = site.serve()
    site.enrol("a", "b")
    return coordinator, site.peer("a"), site.peer("b")
