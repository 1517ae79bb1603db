"""Curves of other runs beside those of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.errors import ConfigError, TransportError
from edit.view.overlaid import mean, overlaid, read_beside
from editpb.run_status import Curve, RunStatus
from tests.edit.view.test_live import status


def curve(kind: str, peer_id: str, x: tuple[float, ...], y: tuple[float, ...]) -> Curve:
    return Curve(kind=kind, peer_id=peer_id, x=x, t=tuple(10 * each for each in x), y=y)


def run(*curves: Curve) -> RunStatus:
    return replace(status(), curves=curves)


def test_the_mean_is_taken_where_all_have_points_and_straight_between_them() -> None:
    found = mean([curve("loss", "a", (0, 10, 20), (4, 2, 1)), curve("loss", "b", (5, 15, 40), (3, 1, 0))])
    assert found is not None and found.x == (5, 10, 15, 20)
    assert found.y == pytest.approx((3.0, 2.0, 1.25, (1 + 0.8) / 2)) and found.t == (50, 100, 150, 200)
    assert mean([curve("loss", "a", (0, 1), (1, 1)), curve("loss", "b", (2, 3), (1, 1))]) is None
    assert mean([]) is None


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=20))
def test_the_mean_of_one_has_its_last_value_at_each_place(points: list[tuple[float, float]]) -> None:
    points.sort(key=lambda each: each[0])
    x, y = (tuple(each) for each in zip(*points, strict=True))
    found = mean([curve("loss", "a", x, y)])
    assert found is not None and dict(zip(found.x, found.y, strict=True)) == dict(points)


def test_a_run_that_does_not_answer_is_named_by_its_folder() -> None:
    def read(path: Path) -> RunStatus:
        if path.name == "gone":
            raise TransportError("no member answers")
        return run()

    one, other = read_beside([Path("a"), Path("b")], read)
    assert other == f"{one} (2)" and one == f"run {run().run_id}"
    with pytest.raises(TransportError, match=r"^--beside gone: no member answers$"):
        read_beside([Path("a"), Path("gone")], read)
    with pytest.raises(ConfigError, match="at most 8 runs"):
        read_beside([Path("a")] * 9, read)


def test_a_run_has_one_line_of_each_kind_and_its_name() -> None:
    own = run(curve("loss", "a", (1, 2), (3, 2)))
    other = run(
        curve("loss", "a", (1, 2), (5, 4)),
        curve("loss", "b", (1, 2), (3, 2)),
        curve("norm", "", (1,), (7,)),
        curve("norm", "a", (1,), (8,)),
        curve("bytes_in", "", (1,), (100,)),
        curve("bytes_out", "", (1,), (50,)),
        curve("held_out", "a", (), ()),
    )
    found = overlaid(own, {"run two": other}).curves
    assert found[0] == own.curves[0]
    assert [(each.kind, each.peer_id, each.y) for each in found[1:]] == [
        ("loss", "run two", (4, 3)),
        ("norm", "run two", (7,)),
        ("bytes_in", "run two received", (100,)),
        ("bytes_out", "run two sent", (50,)),
    ]
