"""--set: a setting is written into run.toml in its place, and the rest of the file stays as it is."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.run_template import RUN_TOML
from aggregator.storage.state_folder import StateFolder
from edit.config.overrides import commented_out, with_settings
from edit.config.run import RunConfig
from edit.errors import ConfigError


def changed(text: str, *settings: str) -> list[str]:
    """The lines that are new."""
    before = text.splitlines()
    return [line for line in with_settings(text, settings).splitlines() if line and line not in before]


DIGITS = "1" * 5000


@pytest.mark.parametrize(
    ("text", "setting", "lines"),
    [
        ("[sync]\nevery = 30  # H\n", "sync.every=60", ["every = 60                      # H"]),
        ("[sync]\n#every = 30\n[outer]\nlr = 1.0\n", "sync.every=60", ["every = 60"]),
        ("[sync]\ndelay = 1\n#every = 30\n", "sync.every=60", ["every = 60"]),
        ("[sync]\n# every = 30 is usual\nevery = 30\n", "sync.every=60", ["every = 60"]),
        ("[sync]\n[outer]\nevery = 30\n", "sync.every=60", ["every = 60"]),
        ("", "sync.every=60", ["[sync]", "every = 60"]),
        ("[sync]\nevery = 30\n", "seed=7", ["seed = 7"]),
        ("[sync]\nevery = 30\n", "sync.mode=delayed", ['mode = "delayed"']),
        ("[sync]\nevery = 30\n", "sync.every=30", []),
        ('name = "a#b" # c\n', "name=x", ['name = "x"                      # c']),
        ("[server]\n", 'server.advertise=["a", "b"]', ['advertise = ["a", "b"]']),
        ("[codec]\n", 'codec.fragments={"e*" = {up = "int8"}}', ['fragments = { "e*" = { "up" = "int8" } }']),
        ("[outer]\n", "outer.lr=0.5", ["lr = 0.5"]),
        ("[sync]\n", "sync.strict=true", ["strict = true"]),
        ("[sync]\nmilestones = [\n  [9, 8],\n]\nevery = 30\n", "sync.every=60", ["every = 60"]),
        ("[model]\nx = '''\n[sync]\nevery = 1'''\n[sync]\nevery = 30\n", "sync.every=60", ["every = 60"]),
    ],
)
def test_a_setting_is_written_in_its_place(text: str, setting: str, lines: list[str]) -> None:
    assert changed(text, setting) == lines


@pytest.mark.parametrize(
    ("text", "setting", "wrong"),
    [
        ("", "sync.every", "must be KEY=VALUE"),
        ("", "=3", "must be KEY=VALUE"),
        ("", "sync..every=3", "must be KEY=VALUE"),
        ("", "model.options.x=3", "edit run.toml instead"),
        ("sync = { every = 30 }\n", "sync.every=60", "edit run.toml instead"),
        ("[server]\nadvertise = [\n  'a',\n]\n", 'server.advertise=["b"]', "edit run.toml instead"),
        ("sync = 3\n", "sync.every=60", "sync is not a table"),
        ("", f"sync.every={DIGITS}", "--set sync.every: an integer has too many digits"),
        ("", f"codec.up=[{DIGITS}]", "--set codec.up: an integer has too many digits"),
    ],
)
def test_what_cannot_be_written_is_said(text: str, setting: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        with_settings(text, [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["0.5", "[\n  40,  # one ]\n  [80],\n\n]", '"""\n[x]\nkey = 1"""', "[]  # ["])
def test_a_key_becomes_a_comment_with_all_lines_of_its_value(value: str) -> None:
    text = f"[outer]\nother = [\n[1],\n]\nkey = {value}\nlr = 1.0\n[sync]\nkey = 2\n"
    out = commented_out(text, "outer", "key")
    assert tomllib.loads(out) == {"outer": {"other": [[1]], "lr": 1.0}, "sync": {"key": 2}}
    assert [line.removeprefix("#") for line in out.splitlines()] == text.splitlines()


def test_every_setting_of_the_template_can_be_set() -> None:
    template = RunConfig.from_mapping(tomllib.loads(RUN_TOML))
    for section in ("inner", "sync", "rounds", "storage", "membership", "server"):
        for each in dataclasses.fields(getattr(template, section)):
            value = getattr(getattr(template, section), each.name)
            text = with_settings(RUN_TOML, [f"{section}.{each.name}=9"])
            assert tomllib.loads(text)[section][each.name] == 9, value
            assert len(text.splitlines()) == len(RUN_TOML.splitlines()), each.name


def test_init_writes_the_settings_and_refuses_wrong_ones_as_run_toml_would(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/a", "--set", "sync.every=100", "--set", "codec.up=int4"])
    config = StateFolder(tmp_path / "a").config()
    assert done.exit_code == 0 and (config.sync.every, config.codec.up) == (100, "int4")
    for setting, wrong in (
        ("sync.evry=3", "sync.evry: unknown key; did you mean sync.every?"),
        ("sync.every=0", "sync.every = 0: must be between"),
        ("sync.alpha=0.1", 'sync.alpha has no effect with sync.mix other than "lerp"; remove it'),
    ):
        refused = CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/b", "--set", setting])
        assert isinstance(refused.exception, ConfigError) and wrong in str(refused.exception)
        with pytest.raises(ConfigError, match="holds no run"):
            StateFolder(tmp_path / "b")


def test_what_serve_changes_is_written_once_it_serves_and_a_wrong_setting_changes_nothing(tmp_path: Path) -> None:
    folder = StateFolder.create(tmp_path / "a", RUN_TOML)
    before = folder.run_toml.read_bytes()
    folder.change(["rounds.quorum=1", "rounds.floor_s=7"])
    assert folder.config().rounds.floor_s == 7 and folder.run_toml.read_bytes() == before
    folder.keep_settings()
    after = folder.run_toml.read_bytes()
    assert after != before and StateFolder(tmp_path / "a").config().rounds.floor_s == 7
    with pytest.raises(ConfigError, match=r"run\.toml: rounds\.floor_s"):
        folder.change(["rounds.spread=1", "rounds.floor_s=-1"])
    folder.keep_settings()
    assert folder.run_toml.read_bytes() == after


def test_an_integer_of_more_digits_than_python_reads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[sync]\nevery = {DIGITS}\n")
    for more in ([], ["--set", "rounds.quorum=1"]):
        command = ["init", "--state", f"{tmp_path}/a", "--config", f"{tmp_path}/run.toml", *more]
        refused = CliRunner().invoke(app, command).exception
        assert isinstance(refused, ConfigError) and str(refused).endswith(
            "run.toml: is not TOML: an integer has too many digits"
        )


def test_a_run_toml_that_is_edited_while_serve_begins_with_other_settings_is_left_as_it_is(tmp_path: Path) -> None:
    folder = StateFolder.create(tmp_path / "a", RUN_TOML)
    folder.change(["rounds.floor_s=7"])
    folder.change(["rounds.quorum=1"])
    edited = RUN_TOML + "# a note\n"
    folder.run_toml.write_text(edited)
    with pytest.raises(ConfigError, match=r"run\.toml: was edited while"):
        folder.keep_settings()
    assert folder.run_toml.read_text() == edited
    folder = StateFolder(folder.path)
    folder.change(["rounds.floor_s=7"])
    folder.keep_settings()
    assert folder.run_toml.read_text().endswith("# a note\n") and folder.config().rounds.floor_s == 7


def test_settings_of_a_served_folder_are_not_changed(tmp_path: Path) -> None:
    folder = StateFolder.create(tmp_path / "a", RUN_TOML)
    folder.lock()
    before = folder.run_toml.read_bytes()
    refused = CliRunner().invoke(app, ["serve", "--state", f"{tmp_path}/a", "--set", "sync.every=60"])
    assert "another coordinator is serving this folder" in str(refused.exception)
    assert folder.run_toml.read_bytes() == before
