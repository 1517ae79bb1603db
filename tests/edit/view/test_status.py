"""`status` on a terminal of 80 columns: no fact is broken, and rounds have the numbers that people count by."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from aggregator.control.shown_settings import settings_of
from edit.config.run import RunConfig
from edit.plain_text import printable
from edit.view.status import print_status
from editpb.run_status import RoundReport, Setting
from tests.edit.view.test_live import status

FACTS = ["collecting", "outer step 5 of 40", "820,352 parameters", f"digest {'d' * 12}", "draining"]
ROUND = RoundReport(
    round_id=10_000_000_001,
    outer_step=1,
    committed=True,
    reason="all 2 contributors in",
    seconds=3.4,
    bytes_in=1,
    bytes_out=1,
    missing=(),
    digest="d",
    fragments=(),
)


def lines(width: int, **changed: object) -> list[str]:
    values = {"phase": "collecting", "outer_step": 5, "outer_steps": 40, "parameters": 820_352, "digest": "d" * 64}
    run = replace(status(), **values | changed)  # type: ignore[arg-type]
    print_status(Console(file=(screen := io.StringIO()), width=width), run, 8)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_fact_of_the_headline_is_broken(width: int) -> None:
    told = lines(width, run_id="run-" + "x" * 20, draining=True)
    for fact in FACTS:
        assert any(fact in line and len(line) <= width for line in told), fact


@pytest.mark.parametrize("width", [40, 60, 80])
def test_nothing_of_the_last_rounds_is_cut(width: int) -> None:
    words = "all 4 contributors in, of whom incomprehensibilities took longest"
    told = lines(width, rounds=(replace(status().rounds[-1], outer_step=123456, reason=words),), members=())
    assert "MB" in "".join(told) and "…" not in "".join(told)


def test_no_name_of_a_member_is_cut() -> None:
    names = [f"hospital-of-saint-john-in-north-{which}" for which in ("wing", "ward", "gate")]
    members = tuple(replace(member, peer_id=name) for member, name in zip(status().members, names, strict=False))
    told = "".join("".join(lines(36, members=members, rounds=())).split())
    assert "…" not in told and len(members) >= 2
    assert all(member.peer_id[-4:] in told for member in members)


def test_what_is_not_known_is_left_out() -> None:
    told = "\n".join(lines(80, digest="", parameters=0, rounds=()))
    assert "digest" not in told and "parameters" not in told and "MB in" not in told


@pytest.mark.parametrize(("value", "said"), [('"co2 0.3: short"', True), ('""', False), ("no JSON", False), ("3", False)])
def test_what_auto_chose_is_said_where_it_chose(value: str, said: bool) -> None:
    told = "\n".join(lines(80, settings=(Setting(name="outer.chosen", value=value, default='""'),)))
    assert ("outer.preset = auto chose co2 0.3: short" in told) == ("auto chose" in told) == said


def test_what_privacy_of_organisations_has_cost_the_run_is_said() -> None:
    said = "organisation-level, eps 1.53 of at most 4 at delta 1e-05 (exact; 10 attempts counted)"
    assert f"privacy: {said}" in " ".join(lines(200, privacy=said))


def test_what_privacy_has_cost_each_peer_is_said_to_who_may_see_it() -> None:
    base = status()
    settings = settings_of(
        RunConfig.from_mapping(
            {"privacy": {"level": "example", "delta": 1e-6, "epsilon_max": 8, "noise_multiplier": 1.0}},
        )
    )
    members = tuple(replace(member, metrics={"epsilon": 1.4375}) for member in base.members)
    line = next(line for line in lines(80, settings=settings, members=members) if line.startswith("privacy"))
    said = ", ".join(f"{printable(member.peer_id)} 1.44" for member in members)
    assert line == f"privacy: example-level, unit sequence, eps at most 8.0 for each peer at delta 1e-06; now {said}"
    hidden = replace(base, settings=settings, members=members).shown_to("observer", "o", False)
    assert "now" not in next(
        line for line in lines(80, settings=settings, members=hidden.members) if line.startswith("privacy")
    )
    assert not any(line.startswith("privacy") for line in lines(80, settings=settings_of(RunConfig())))


def test_a_rounds_number_counts_from_1() -> None:
    row = next(line for line in lines(80, rounds=(ROUND,)) if "all 2 contributors in" in line)
    assert row.split()[0] == "1"


def test_who_has_consented_has_a_column_where_anybody_has() -> None:
    members = status().members
    assert not any("consent" in line for line in lines(200))
    told = lines(200, members=(replace(members[0], consented=True), *members[1:]))
    (head,) = (line for line in told if line.startswith("member"))
    (row,) = (line for line in told if line.startswith(members[0].peer_id))
    assert row[head.index("consent") :].startswith("yes")


def test_what_the_last_outer_step_was_taken_with_is_said() -> None:
    taken = replace(ROUND, every=8, batch=4, outer_lr=0.7, outer_momentum=0.6)
    lost = replace(taken, round_id=ROUND.round_id + 1, outer_step=2, committed=False)
    told = "\n".join(lines(100, rounds=(taken, lost)))
    assert "outer step 1 was taken with H 8, batch 4, outer lr 0.7, outer momentum 0.6" in told
    assert "was taken with" not in "\n".join(lines(100, rounds=(ROUND,))), "an older coordinator does not say it"
