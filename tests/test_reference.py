"""The script that writes docs/reference.md. That the file is up to date is tested in `test_documented_commands.py`."""

from __future__ import annotations

import importlib.util
import typing
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from edit.config.run import NO_EFFECT, RunConfig, SwarmConfig
from tests.test_documents import REPOSITORY

PATH = REPOSITORY / "docs" / "make_reference.py"


def reference_script() -> Any:
    specification = importlib.util.spec_from_file_location("make_reference", PATH)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    return reference_script()


def test_check_fails_when_it_is_not(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "reference.md"
    stale.write_text("# Reference\n")
    monkeypatch.setattr(script, "REFERENCE", stale)
    monkeypatch.setattr("sys.argv", ["make_reference.py", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        script.main()
    assert stale.read_text() == "# Reference\n"


def test_every_rule_without_effect_names_settings_that_exist() -> None:
    hints = typing.get_type_hints(RunConfig) | {"swarm": SwarmConfig}
    for rule in NO_EFFECT:
        section, key = rule.setting.split(".")
        assert key in typing.get_type_hints(hints[section]), rule
        assert set(rule.keys) <= set(typing.get_type_hints(hints[rule.section])), rule


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (1 << 20, "2^20"), (2**63 - 1, "2^63 - 1"), (0.9999, "0.9999"), (1e-6, "1e-06"), (1e12, "1e12")],
)
def test_numbers_are_written_as_people_do(script: Any, value: float, text: str) -> None:
    assert script.number(value) == text


def example(
    name: Annotated[str, typer.Argument(help="A name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sizes: Annotated[list[int] | None, typer.Option(help="Sizes.", min=1)] = None,
    hours: Annotated[float, typer.Option(help="Hours.", max=24)] = 2.0,
) -> None:
    """A command."""


def test_options_are_read_off_a_command(script: Any) -> None:
    assert script.signature_rows(example) == [
        ("NAME", "text", "required", "A name."),
        ("`--json`", "", "", "Print JSON."),
        ("`--sizes`", "integer from 1, repeatable", "", "Sizes."),
        ("`--hours`", "number to 24", "2", "Hours."),
    ]
