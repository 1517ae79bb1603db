"""Write docs/reference.md from the code: every setting, command, exit code and line of metrics.

    python docs/make_reference.py            # writes it
    python docs/make_reference.py --check    # says whether it is up to date; exit code 1 if not

What a setting means is the comment above its field in `edit/config`; its bounds are those that are checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import aggregator.cli
import edit.lab.cli
import peers.cli
import peers.training.metrics
from aggregator.services.metrics_page import run_metrics
from aggregator.swarm.metrics import council_metrics
from aggregator.swarm.standing import Standing
from edit.command_line import EXIT_CODES
from edit.config.codec import CODECS, FragmentCodec
from edit.config.run import MEMBERSHIP_IN_A_SWARM, NO_EFFECT, RunConfig, SwarmConfig
from edit.config.validation import Between, Bound, OneOf, bounds_of
from edit.errors import EditError
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import MemberStatus, RoundReport, RunStatus

REFERENCE = Path(__file__).with_name("reference.md")
PROGRAMS = {
    "edit-coordinator": aggregator.cli.app,
    "edit-peer": peers.cli.app,
    "edit-lab": edit.lab.cli.app,
}
HEAD = """\
# Reference

Written by `python docs/make_reference.py` from the code; `make check` fails when it is out of date. Do not edit it.

- [Settings](#settings)
- [Codecs](#codecs)
- [Commands](#commands)
- [Exit codes](#exit-codes)
- [Metrics](#metrics)
- [Status as JSON](#status-as-json)
"""


def comments_of(cls: type) -> dict[str, str]:
    """Return what the comments above each field of a dataclass, or behind it, say; of several fields in a row, the first's."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if comment := re.fullmatch(r"    # ?(.*)", line):
            above.append(comment[1])
        elif named := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
            found[named[1]] = " ".join(above) or named[2] or ""
            above = []
        elif line.strip():
            above = []
    return found


def table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# ---- settings ------------------------------------------------------------------------------------------------------------


def sections() -> Iterator[tuple[str, type]]:
    """Yield the name and the class of each section of run.toml, in its order."""
    hints = typing.get_type_hints(RunConfig)
    for each in dataclasses.fields(RunConfig):
        hint = hints[each.name]
        if dataclasses.is_dataclass(hint):
            yield each.name, typing.cast(type, hint)
    yield "swarm", SwarmConfig


def number(value: float) -> str:
    """Return a bound as people write it."""
    if isinstance(value, int) and value >= 1 << 20:
        power = value.bit_length() - (0 if value & (value + 1) == 0 else 1)
        return f"2^{power}{' - 1' if value & (value + 1) == 0 else ''}"
    return f"{value:g}" if value < 1e5 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def bounds(bound: Bound | None) -> str:
    """Return what a setting may be."""
    if bound is None:
        return ""
    if isinstance(bound, Between):
        return f"{number(bound.low)} to {number(bound.high)}"
    if isinstance(bound, OneOf):
        return ", ".join(bound.allowed)
    return bound.rule.removeprefix("must be ").removeprefix("one of ")


def no_effect(section: str, key: str) -> str:
    """Return the values of other settings with which this one means nothing, and is refused."""
    found = []
    for rule in NO_EFFECT:
        if rule.section == section and key in rule.keys:
            *rest, last = [json.dumps(value).replace('"', "") for value in rule.values or ("",)]
            values = f"{', '.join(rest)} or {last}" if rest else last
            found.append(" ".join(filter(None, (f"`{rule.setting}`", values, rule.beside))))
    return "; ".join(found)


def type_of(hint: Any) -> str:
    """Return the type of a setting, in words."""
    origin = typing.get_origin(hint) or hint
    words = {int: "integer", float: "number", str: "text", bool: "true, false", tuple: "list of texts"}
    if origin is tuple and typing.get_args(hint)[0] is int:
        return "list of integers"
    if origin in words:
        return words[origin]
    return "table of tables" if dataclasses.is_dataclass(typing.get_args(hint)[1]) else "table"


def default_of(value: Any) -> str:
    """Return a default as run.toml has it."""
    if isinstance(value, Mapping):
        return "{}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def settings(section: str, cls: type) -> str:
    """Return the table of one section; '' for the settings above all sections."""
    hints, limits, comments = typing.get_type_hints(cls), bounds_of(cls), comments_of(cls)
    rows, defaults = [], cls()
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        if not section and (dataclasses.is_dataclass(hint) or each.name == "swarm"):
            continue
        default = getattr(defaults, each.name)
        text = default_of(default)
        if section == "membership" and each.name in MEMBERSHIP_IN_A_SWARM:
            text += f" ({MEMBERSHIP_IN_A_SWARM[each.name]} in a swarm)"
        meaning = comments[each.name] or sys.exit(f"{cls.__name__}.{each.name} has no comment that says what it means")
        if without := no_effect(section, each.name):
            meaning += f" No effect with: {without}."
        rows.append((each.name, type_of(hint), text, bounds(limits.get(each.name)), meaning))
    return table((f"`[{section}]`" if section else "setting", "type", "default", "bounds", "meaning"), rows)


def all_settings() -> Iterator[str]:
    """Yield the chapter of settings."""
    yield "## Settings\n"
    yield (
        "A run's settings are in run.toml, which `edit-coordinator init` writes. The option `--set SECTION.KEY=VALUE` of\n"
        "`edit-coordinator init`, `edit-coordinator serve` and edit-peer swarm start writes one into that file. An "
        "unknown key, a value\noutside its bounds, and a key that is written although other settings take its effect away are "
        "errors that name the key. Some settings\nalso restrict each other; the message then names both.\n"
    )
    yield settings("", RunConfig)
    for name, cls in sections():
        yield f"### {name}\n"
        about = (inspect.getdoc(cls) or "").split("\n\n")
        yield textwrap.fill(about[0].split(": ", 1)[1][0].upper() + about[0].split(": ", 1)[1][1:], 128) + "\n"
        yield from (f"{paragraph}\n" for paragraph in about[1:])
        yield settings(name, cls)
    yield "An entry of codec.fragments is a table with these keys; its own key is a pattern of fragments' names.\n"
    entry = dataclasses.fields(FragmentCodec)
    yield table(("key", "default"), [(each.name, json.dumps(each.default)) for each in entry])


def codecs() -> Iterator[str]:
    """Yield the chapter of codecs."""
    yield "## Codecs\n"
    yield "A codec is named `NAME` or `NAME:OPTION=VALUE`, with commas between options. [codecs.md](codecs.md) compares them.\n"
    rows = []
    for name, options in CODECS.items():
        told = [
            f"{key}: {option.default}, from {option.low} to {option.high}{', a power of two' if option.power_of_two else ''}"
            for key, option in options.items()
        ]
        rows.append((name, "; ".join(told)))
    yield table(("codec", "options and their defaults"), rows)


# ---- commands ------------------------------------------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[str]:
    """Yield what a help says; its examples as blocks."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("```"):  # as it stands
            yield paragraph.rstrip("\n") + "\n"
        elif paragraph.startswith("Example: "):
            yield "```sh\n" + paragraph.removeprefix("Example: ") + "\n```\n"
        else:
            yield paragraph.replace("\n", " ") + "\n"


def option_row(parameter: inspect.Parameter, hint: Any) -> tuple[str, str, str, str]:
    """Return the name, the value, the default and the meaning of an option or an argument."""
    annotated = typing.get_origin(hint) is typing.Annotated
    kind, info = typing.get_args(hint)[:2] if annotated else (hint, parameter.default)
    default = parameter.default if annotated else info.default
    if isinstance(info, typer.models.ArgumentInfo):
        name = info.metavar or parameter.name.upper()
    else:
        given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str) and each.startswith("--")]
        name = f"`{given[0] if given else '--' + parameter.name.replace('_', '-')}`"
    kinds = [each for each in typing.get_args(kind) if each is not type(None)]
    repeated = typing.get_origin(kinds[0] if kinds else kind) is list
    while kinds:
        kind = kinds[0]
        kinds = [each for each in typing.get_args(kind) if each is not type(None)]
    value = {int: "integer", float: "number", str: "text", Path: "path", bool: ""}[kind]
    if info.min is not None:
        value += f" from {info.min:g}"
    if info.max is not None:
        value += f" to {info.max:g}"
    if repeated:
        value += ", repeatable"
    if default in (inspect.Parameter.empty, ...):
        shown = "required"
    elif isinstance(info.show_default, str):
        shown = info.show_default
    elif default is None or kind is bool or default == "":
        shown = ""
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    return name, value, shown, info.help or ""


def signature_rows(callback: Any) -> list[tuple[str, str, str, str]]:
    """Return a row for each option and argument of a command."""
    hints = typing.get_type_hints(callback, include_extras=True)
    return [option_row(each, hints[each.name]) for each in inspect.signature(callback).parameters.values()]


def program_pages(path: str, app: typer.Typer) -> Iterator[str]:
    """Yield the pages of a program, or of a group of its commands, and of all commands in it."""
    yield f"### {path}\n"
    yield from paragraphs(app.info.help or "")
    for info in app.registered_commands:
        assert info.callback is not None
        if not info.hidden:
            yield f"#### {path} {info.name or info.callback.__name__.replace('_', '-')}\n"
            for text in (info.help or info.callback.__doc__, info.epilog):
                yield from paragraphs(text) if text else ()
            if rows := signature_rows(info.callback):
                yield table(("argument or option", "value", "default", "meaning"), rows)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from program_pages(f"{path} {group.name}", group.typer_instance)


def all_commands() -> Iterator[str]:
    """Yield the chapter of commands."""
    yield "## Commands\n"
    yield "Every command has `--help` (`-h`), and each program `--version`.\n"
    for program, app in PROGRAMS.items():
        yield from program_pages(program, app)


# ---- exit codes, metrics, status -----------------------------------------------------------------------------------------


def errors_below(cls: type[EditError]) -> Iterator[type[EditError]]:
    """Yield an exception and all that are derived from it."""
    yield cls
    for each in cls.__subclasses__():
        yield from errors_below(each)


def exit_codes() -> Iterator[str]:
    """Yield the chapter of exit codes."""
    yield "## Exit codes\n"
    raised: dict[int, list[str]] = {}
    for cls in errors_below(EditError):
        if cls.__module__ == EditError.__module__:
            raised.setdefault(cls.exit_code, []).append(cls.__name__)
    rows = [(str(code), meaning, ", ".join(raised.pop(code, []))) for code, meaning in EXIT_CODES.items()]
    if raised:
        sys.exit(f"edit.command_line.EXIT_CODES lacks {raised}")
    yield table(("code", "meaning", "raised in Python as (`edit.errors`)"), rows)


def keys(values: Mapping[str, object], cls: type) -> str:
    """Return a table of what a line says, with the comments of the record that it is made of."""
    comments = {**comments_of(MemberStatus), **comments_of(cls)}
    comments["verdicts"] = comments.get("fragments", "")
    return table(("key", "meaning"), [(key, comments[key]) for key in values])


def metrics() -> Iterator[str]:
    """Yield the chapter of metrics."""
    yield "## Metrics\n"
    yield (
        "The coordinator writes metrics.jsonl in its folder: one JSON object per line, with its `kind` and `t`, the seconds "
        "since 1970.\n"
    )
    report = RoundReport(
        round_id=1,
        outer_step=1,
        committed=False,
        reason="",
        seconds=0,
        bytes_in=0,
        bytes_out=0,
        missing=(),
        digest="",
        fragments=(),
    )
    yield "### kind round: a round closed\n"
    yield keys(report.as_json(), RoundReport)
    yield "### kind peer: a peer's report, at most one a second\n"
    yield keys({"peer_id": "", **Heartbeat(state=next(iter(PeerState)), loss=math.nan).as_json()}, Heartbeat)
    yield "### kind member: a member's state changed\n"
    yield keys({"peer_id": "", "state": "", "reason": ""}, MemberStatus)
    yield "### kind end: the run has ended, by its outer steps, its tokens or `drain`\n"
    yield keys({"outer_step": 0, "tokens": 0}, RunStatus)
    yield from prometheus()
    yield "A peer writes the file of `--metrics`:\n"
    doc = inspect.getdoc(peers.training.metrics.Metrics) or ""
    yield "```\n" + doc.split("\n\n", 1)[1] + "\n```\n"


def prometheus() -> Iterator[str]:
    """Yield what /metrics has, at a coordinator and at a host of a swarm."""
    run = RunStatus(
        run_id="",
        phase="",
        outer_step=0,
        outer_steps=0,
        round_id=0,
        reason="",
        waiting_for="",
        draining=False,
        tokens=0,
        stop_tokens=0,
        digest="",
        parameters=0,
        peak_memory_bytes=0,
        expected=(),
        arrived=(),
        deadline_in_s=None,
        members=(),
        rounds=(),
    )
    host = Standing(run_id="", peer_id="", role="follower", leader="", term=0, committed=False, record=None, parts=(), peers=())
    of_parts = "### /metrics of a run: `server.metrics_listen`, and with the label `part` of each part that a host owns"
    for title, families in (
        (of_parts, run_metrics(run, 0, 0, (0, 0))),
        ("### /metrics of a swarm's host: `--metrics-listen`, which has those of its parts, too", council_metrics(host)),
    ):
        yield f"{title}\n"
        rows = [
            (f"{each.name}{'_total' if each.type == 'counter' else ''}", each.type, each.documentation) for each in families
        ]
        yield table(("name", "type", "meaning"), rows)


def status() -> Iterator[str]:
    """Yield the chapter of the status."""
    yield "## Status as JSON\n"
    yield "What `edit-coordinator status --json` prints. `rounds` are as in metrics.jsonl.\n"
    for title, cls in (("The run", RunStatus), ("Each of `members`", MemberStatus)):
        yield f"{title}:\n"
        comments = comments_of(cls)
        yield table(("key", "meaning"), [(each.name, comments[each.name]) for each in dataclasses.fields(cls)])


def reference() -> str:
    """Return the whole document."""
    chapters = (all_settings(), codecs(), all_commands(), exit_codes(), metrics(), status())
    return HEAD + "\n" + "\n".join(part for chapter in chapters for part in chapter)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/reference.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when it is out of date")
    text = reference()
    if not parser.parse_args().check:
        REFERENCE.write_text(text, encoding="utf-8")
    elif not REFERENCE.exists() or REFERENCE.read_text(encoding="utf-8") != text:
        sys.exit("docs/reference.md is out of date; run: python docs/make_reference.py")


if __name__ == "__main__":
    main()
