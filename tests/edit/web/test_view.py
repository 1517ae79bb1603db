"""What the page shows of a status, without HTML: the colours of lines, and the key of the grid."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edit.records import Verdict
from edit.view.overlaid import overlaid
from edit.web import view
from edit.web.page import render_page
from editpb.run_status import RunStatus, Setting
from tests.support.statuses import WORSE, busy_run


def colours(status: RunStatus, chart: str) -> list[object]:
    (found,) = (each for each in view.charts(status) if each["id"] == chart)
    lines = found["lines"]
    assert isinstance(lines, list)
    return [line["colour"] for line in lines]


def test_the_time_of_the_peers_has_the_colours_of_the_table_of_members() -> None:
    assert colours(busy_run(), "time") == ["--good", "--accent", "--calm"]
    page = render_page(busy_run())
    assert all(f"{name}:" in page for name in colours(busy_run(), "time"))


def test_no_two_lines_of_a_chart_have_one_colour_also_beside_another_run() -> None:
    for status in (busy_run(), overlaid(busy_run(), {"run other": busy_run(20), "run third": busy_run(9)})):
        for chart in ("loss", "held-out", "norm", "bytes", "time"):
            found = sorted(map(str, colours(status, chart)))
            assert all(a != b for a, b in pairwise(found)), chart


def test_a_loss_of_many_digits_is_told_in_few() -> None:
    run = busy_run()
    members = tuple(replace(one, loss=1e300) for one in run.members)
    told = replace(run, members=members)
    assert ("1e+300", "mean training loss") in view.overview(told).tiles
    assert {row.loss for row in view.member_rows(told, told.t)} == {"1e+300", ""}


def test_the_key_of_the_grid_says_each_kind_of_cell_that_it_has_and_no_other() -> None:
    assert set(view.grid(busy_run()).kinds) == {"ok", "carried", "absent", *(each.value for each in WORSE.values())}
    round_ = busy_run().rounds[-1]
    fragments = tuple(
        replace(each, verdicts=(replace(each.verdicts[0], verdict=Verdict.OUTLIER), *each.verdicts[1:]))
        for each in round_.fragments
    )
    told = replace(busy_run(), rounds=(replace(round_, fragments=fragments),))
    assert view.grid(told).kinds == ("ok", "outlier")
    assert view.VERDICTS["outlier"] in render_page(told).split("Every round, every peer")[1].split("</p>")[0]


def test_nobody_is_here_in_a_run_that_nobody_serves() -> None:
    live, stopped = busy_run(), replace(busy_run(), phase="stopped")
    tiles = [{name: value for value, name in view.overview(each).tiles} for each in (live, stopped)]
    assert [each["peers here"] for each in tiles] == ["4 of 5", "0 of 5"]
    assert tiles[0]["tokens per second"] != "–" == tiles[1]["tokens per second"]
    assert tiles[0]["mean training loss"] == tiles[1]["mean training loss"]
    (row,) = (each for each in view.member_rows(stopped, stopped.t) if each.peer_id == "aurora")
    assert (row.tone, row.why, row.phase, row.tokens_per_s) == ("quiet", "when the run stopped", "", "")


def test_a_swarm_that_nobody_answers_for_is_told_no_coordinator_gets_what_leaves_a_site() -> None:
    swarm = replace(busy_run(), council=None, settings=(Setting(name="swarm.parts", value="2", default="4"),))
    hub, own = (" ".join(text for each in view.leaves(run) for text in each.as_json().values()) for run in (busy_run(), swarm))
    assert "the coordinator" in hub and "coordinator" not in own
    assert "the owner of each part of the model" in own and "the owner of each part of the model" in render_page(swarm)
