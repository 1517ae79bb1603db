"""`edit-lab simulate` as a user meets it: help, results, progress, one line for what is wrong."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edit.errors import ConfigError
from edit.lab.cli import SIMULATE_EXAMPLE, app
from edit.lab.simulation.scenario import Scenario

SMALL = ["--peers", "5", "--rounds", "10", "--set", "sync.every=10", "--set", "size.parameters=1e6"]


def simulate(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout, result.stderr


def test_a_table_with_every_number_and_lines_of_progress() -> None:
    out, err = simulate(*SMALL)
    for word in ("goodput", "compute utilisation", "participation", "commits", "sent by peers", "staleness", "virtual"):
        assert word in out
    assert err.splitlines()[-1].startswith("10 of 10 commits, virtual time 1:4")


def test_json_is_one_object_and_the_same_each_time_but_for_the_seconds_it_took() -> None:
    first, second = (json.loads(simulate(*SMALL, "--json", "--seed", "3")[0]) for _ in range(2))
    assert first.pop("needed_s") >= 0 and second.pop("needed_s") >= 0
    assert first == second
    assert (first["commits"], first["finished"], first["steps_counted"]) == (10, True, 500.0)


def test_the_files_keys_hold_and_options_come_on_top(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATE_EXAMPLE.split("```")[1], encoding="utf-8")
    scenario = Scenario.read(file, ["peers=400", "sync.mode=eager", "rounds.quorum=7"])
    assert (scenario.peers, scenario.run.sync.mode, scenario.run.rounds.quorum) == (400, "eager", 7)
    assert (scenario.compute.sigma, scenario.classes[0].slower, scenario.run.sync.every) == (0.3, 4.0, 100)


def test_help_shows_an_example() -> None:
    out, _ = simulate("--help")
    lines = [line.strip() for line in out.splitlines()]
    assert "edit-lab simulate --peers 500" in out and "link.up_mbit = 100.0" in lines  # a line of its own, as in the file


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("compute.sigma=9", "compute.sigma = 9.0: must be between 0 and 3"),
        ("compute.sgma=1", "compute.sgma: unknown key; did you mean compute.sigma?"),
        ("linc.up_mbit=1", "linc: unknown key; did you mean link?"),
        ("peers=many", "peers: must be int, not str"),
        ("peers=0", "peers = 0: must be between 1"),
        ("rounds.quorum=101", "rounds.quorum = 101: there are 100 peers"),
        ("rounds.start_peers=101", "rounds.start_peers = 101: there are 100 peers"),
        ("sync.groups=2", "sync.groups = 2: size.fragments is 1"),
        ("sync.delay=2", "sync.delay has no effect"),
        ("penalty.clip=2.0", "penalty has no effect without merge = true"),
        ("damaged=0.5", "damaged has no effect without merge = true"),
        ("classes=[{slower=2.0}]", "classes[0].share is missing"),
        ("classes=[{share=0.6},{share=0.6}]", "classes: the shares are more than 1 together"),
        ("classes=3", "classes: must be a list of tables"),
        ("peers", "--set peers: must be KEY=VALUE"),
        ("seed.more=1", "seed: must be int"),
        ("faults.silent=nan", "faults.silent = nan: must be between 0 and 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        simulate("--set", setting)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    with pytest.raises(ConfigError, match=r"fleet\.toml: cannot be read"):
        simulate("--scenario", str(file))
    file.write_text("peers = ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"fleet\.toml: is not TOML"):
        simulate("--scenario", str(file))
    file.write_text("peers = 5\nhours = -1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"fleet\.toml: hours = -1\.0: must be between"):
        simulate("--scenario", str(file))


def test_a_run_in_which_nothing_commits_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing was ever committed"):
        simulate(*SMALL, "--set", "hours=0.001")
