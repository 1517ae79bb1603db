"""The table of members on terminals of any width."""

import time

import pytest
from rich.console import Console

from edit.view.status import print_members
from editpb.run_status import MemberStatus

DAY_S = 86400.0
NAMES = ("university-a", "hospital-of-the-north")


def printed(width: int) -> list[str]:
    busy = MemberStatus(
        peer_id=NAMES[0],
        role="peer",
        state="exchanging",
        reason="heartbeats",
        outer_step=5,
        inner_steps=29,
        loss=4.32,
        tokens_per_s=578.0,
        contributions=5,
        phase="upload",
        upload_bytes=3_100_000,
        upload_total_bytes=12_000_000,
        expires=time.time() + 364 * DAY_S,
    )
    lost = MemberStatus(
        peer_id=NAMES[1],
        role="peer",
        state="lost",
        reason="silent for 30 s",
        outer_step=4,
        rejections=1,
        expires=time.time() + 3 * DAY_S,
    )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_members(console, [busy, lost])
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_word_is_broken_and_what_is_wrong_is_said_at_every_width(width: int) -> None:
    lines = printed(width)
    assert all(len(line.rstrip()) <= width for line in lines[:3])
    assert [line.split()[0] for line in lines[:3]] == ["member", *NAMES]
    assert all(word in " ".join(lines) for word in ("exchanging", "lost", "silent for 30 s", "2 days"))
    named = set(lines[0].split())
    hidden = [line for line in lines if line.startswith("not shown")]
    assert {"member", "state", "outer"} <= named
    assert bool(hidden) == (width < 200)
    assert not hidden or named.isdisjoint(hidden[0].removesuffix("(--json has all)").replace(",", " ").split())


def test_a_column_that_says_nothing_of_anybody_takes_no_room() -> None:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        print_members(console, [MemberStatus(peer_id="a", role="peer", state="invited", reason="")])
    header = capture.get().splitlines()[0].split()
    assert header == ["member", "role", "state", "outer", "steps", "in", "out", "absent"]
