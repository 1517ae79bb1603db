import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from rich.console import Console

from edit.lab.demo.command import results_table
from edit.lab.demo.report import headline, render_report, result_rows
from edit.lab.demo.results import Losses, Restart, collect
from edit.view.charts import Bar, Mark, Series, Tile, line_chart, log_bars, tile_grid
from edit.view.charts import ticks as round_ticks


@pytest.fixture
def page(make_state):
    state = make_state()
    return render_report(state, results_of(state), 'name = "demo"\n', started=100.0)


def results_of(state, **changes):
    values = {
        "run_id": "demo-<1>",
        "seed": 3,
        "wall_s": 61.5,
        "losses": Losses(outer_step=20, initial=5.5, outer=1.8, lone=2.0, windows=512),
        "restart": Restart(6, "d6", "d6"),
        "sample": "if a < b & c:",
    }
    return collect(state, **{**values, **changes})


class Tags(HTMLParser):
    """Checks that every tag that needs closing is closed in order, and collects what could load from elsewhere."""

    VOID = frozenset({"meta", "br", "line", "rect", "circle", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.sources == []
    assert "<script" not in page
    assert "url(http" not in page
    assert "@import" not in page


def test_every_chart_is_valid_xml(page):
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        ElementTree.fromstring(chart)


def test_the_page_says_what_was_measured_and_what_was_computed(page):
    assert "Four peers" not in page
    assert "4 peers trained one model 10.0 % better than one alone" in page
    assert "−10.0 %" in page
    assert re.search(r"data-parallel would send per peer</td><td>1.6 GB</td><td>computed", page)
    assert re.search(r"held-out loss, outer parameters</td><td>1.8000</td><td>measured", page)
    assert "digest over the coordinator&#x27;s restart</td><td>unchanged" in page


def test_text_from_the_run_is_escaped(page):
    assert "demo-&lt;1&gt;" in page
    assert "if a &lt; b &amp; c:" in page
    assert "peer-3 sent NaN &amp; more" in page


def test_verdicts_and_absences_are_tiles_with_their_story(page):
    assert "peer-3, outer step 4: nonfinite, weight 0.000, norm inf" in page
    assert page.count('class="tile anomalous"') == 1
    assert page.count('class="tile absent"') == 2
    assert page.count('class="tile ok"') == 40 - 2 - 2


def test_a_partial_run_says_so(make_state):
    state = make_state(3)
    page = render_report(state, results_of(state, losses=None, restart=None, sample=""), "", started=100.0)
    assert "Stopped after outer step 3: partial results of 4 peers" in page


def test_an_empty_run_has_a_page_too(make_state):
    state = make_state(0)
    assert "Nothing was measured" in render_report(state, results_of(state, losses=None), "", started=100.0)


@pytest.mark.parametrize(("outer", "words"), [(1.8, "10.0 % better"), (2.2, "10.0 % worse")])
def test_the_headline_does_not_hide_a_bad_result(make_state, outer, words):
    assert words in headline(
        results_of(make_state(), losses=Losses(outer_step=20, initial=5.0, outer=outer, lone=2.0, windows=512))
    )


def test_the_terminal_prints_the_rows_of_the_page(make_state):
    results = results_of(make_state())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(results_table(results))
    text = console.export_text()
    for name, value, how in result_rows(results):
        assert re.search(rf"{re.escape(name)}\s+{re.escape(value)}\s+{re.escape(how)}", text)
    assert "if a < b & c:" in text


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_nothing_off_the_results(make_state, width):
    results = replace(results_of(make_state()), swarm=True)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(results_table(results))
    words = console.export_text().split()
    for row in result_rows(results):
        assert all(words.count(word) for cell in row for word in cell.split()), row


def test_ticks_are_round_and_inside():
    assert round_ticks(0, 1500) == [0, 250, 500, 750, 1000, 1250, 1500]
    assert round_ticks(1.83, 3.1) == [2.0, 2.25, 2.5, 2.75, 3.0]
    assert round_ticks(2.0, 2.0) == [2.0]


def coordinates(chart: str, style: str) -> list[tuple[float, float]]:
    path = re.search(rf'class="line {style}"[^>]* d="([^"]+)"', chart)[1]
    return [tuple(map(float, pair[1:].split(","))) for pair in path.split()]


def test_a_falling_curve_falls_on_the_picture():
    chart = line_chart([Series("a", "s0", [(0, 3.0), (50, 2.5), (100, 2.0)])], [Mark(50, "kill", "fault")], 100, "steps")
    points = coordinates(chart, "s0")
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)
    assert re.search(rf'class="mark fault".* L{points[1][0]:.1f},', chart)  # the mark stands where the curve is at step 50


def test_a_steep_beginning_enters_the_plot_at_its_edge_and_no_line_leaves_it():
    points = [(0, 9.0), (10, 5.0), (20, 2.0), (30, 6.0), (40, 2.2), (100, 2.1)]
    chart = line_chart([Series("a", "s0", points)], [], 100, "steps", height=300)
    drawn = coordinates(chart, "s0")
    assert min(y for _, y in drawn) == pytest.approx(40, abs=0.1) == drawn[0][1]
    assert max(y for _, y in drawn) < 300 - 38 and all(46 <= x <= 750 for x, _ in drawn)
    assert drawn[0][0] > 46, "it comes in where it crosses the edge"
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert re.search(r'd="M[^M]+M', chart), "what is above is left out in the middle, too"
    dots = [float(y) for y in re.findall(r'class="dot s0" cx="[\d.]+" cy="([-\d.]+)"', chart)]
    assert len(dots) == 3 and min(dots) >= 40


def test_each_line_has_its_colour_beside_its_name_and_no_name_reaches_the_ticks():
    series = [Series(f"line {place}", f"s{place}", [(0, 3.0), (1500, 2.0 + place / 1000)]) for place in range(8)]
    chart = line_chart(series, [], 1500, "steps", height=200)
    for place in range(8):
        (y,) = re.findall(rf'class="label s{place}" x="[\d.]+" y="([\d.]+)"', chart)
        assert f'<path class="line s{place} key" d="M760,{float(y) - 4:.1f} h16"/>' in chart
        assert float(y) <= 200 - 38, "the plot's lower edge; the ticks stand below it"


@pytest.mark.parametrize("name", ["outer parameters", "hospital-of-the-north.gpu1"])
def test_a_long_name_at_the_end_of_a_line_is_not_cut_off(name: str):
    chart = line_chart([Series(name, "s0", [(0, 3.0), (1500, 2.0)])], [], 1500, "steps")
    (x,) = re.findall(r'class="label s0" x="([\d.]+)"', chart)
    assert float(x) + 6.7 * len(f"{name} 2.000") <= 920, "the picture's width"
    (end,) = re.findall(r'<path class="line s0" d="[^"]*L([\d.]+),[\d.]+"', chart)
    assert float(end) < float(x) - 22


def test_badges_of_late_events_stay_on_the_page():
    marks = [Mark(100, f"fault {number}", "fault") for number in range(20)]
    chart = line_chart([Series("a", "s0", [(0, 3.0), (100, 2.0)])], marks, 100, "steps")
    places = sorted(float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart))
    assert len(places) == 20 and places[-1] <= 912 and min(b - a for a, b in pairwise(places)) >= 17.9


def test_a_grid_has_room_for_long_names_and_counts_rounds_in_whole_numbers():
    chart = tile_grid(["university-of-somewhere"], 14, [Tile(0, 0, "ok", 0.5, "t")], [])
    assert float(re.search(r'<rect[^>]* x="([\d.]+)"', chart)[1]) > 23 * 6.5
    numbers = re.findall(r'class="tick"[^>]*>([^<]+)<', chart)
    assert len(numbers) >= 2 and all(each.isdecimal() for each in numbers)


def test_names_at_the_ends_of_lines_do_not_cover_one_another():
    series = [Series(f"line {place}", f"s{place}", [(0, 3.0), (10, 2.0 + place / 1000)]) for place in range(8)]
    chart = line_chart(series, [], 10, "steps", height=200)
    places = sorted(float(y) for y in re.findall(r'class="label s\d" x="[\d.]+" y="([\d.]+)"', chart))
    assert len(places) == 8
    assert min(b - a for a, b in pairwise(places)) >= 14
    assert places[-1] < 200


def test_bars_are_logarithmic():
    chart = log_bars([Bar("a", 1e6, "1 MB", "s0"), Bar("b", 1e9, "1 GB", "s1"), Bar("none", 0, "0 B", "s2")])
    widths = [float(width) for width in re.findall(r'class="bar s\d"[^>]* width="([\d.]+)"', chart)]
    assert widths[2] == 0
    assert widths[1] / widths[0] == pytest.approx(4)  # from 100 kB on: one decade against four


def test_a_grid_of_many_rounds_stays_on_the_page():
    tiles = [Tile(column, 0, "ok", 0.5, "t") for column in range(500)]
    places = [float(x) for x in re.findall(r'<rect[^>]* x="([\d.]+)"', tile_grid(["peer-0"], 500, tiles, []))]
    assert max(places) < 920
