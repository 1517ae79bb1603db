"""Every command line that the documents and the help name is one that its program takes; no command is run here.

Blocks of shell, code in a sentence that begins with a program or one of its commands, the examples of --help, and those at the
head of each benchmark. `tests/integration/test_readme.py` runs those that are cheap.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

import aggregator.cli
import aggregator.swarm.commands
import edit.lab.cli
import peers.cli
from tests.test_documented_settings import blocks, without_blocks
from tests.test_documents import DOCUMENTS, REPOSITORY
from tests.test_reference import reference_script

APPS = {
    "edit-coordinator": aggregator.cli.app,
    "edit-peer": peers.cli.app,
    "edit-lab": edit.lab.cli.app,
}
GROUPS: dict[str, Any] = {program: typer.main.get_command(app) for program, app in APPS.items()}
SWARM: Any = typer.main.get_command(aggregator.swarm.commands.app)  # of `python -m aggregator.swarm VERB FOLDER`
BENCHMARKS = sorted((REPOSITORY / "benchmarks").rglob("*.py"))
OTHERS = ("docker", "chmod", "ulimit")  # programs that are not ours
UsageError = typer.BadParameter.__mro__[1]  # of a command line that is wrong
EXIT_STATUS = 2  # argparse's for the same


def command_lines() -> Iterator[tuple[str, str]]:
    """(where, command line) of everything that is named."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in blocks(text, "sh"):
            yield from ((document.name, line) for line in block.splitlines())
        for code in re.findall(r"`([^`\n]+)`", without_blocks(text)):
            if is_command(code):
                yield document.name, code
    for program, group in GROUPS.items():
        for command in (group, *commands_of(group)):
            for example in re.findall(r"(?:Example: |^)((?:edit-|torchrun ).+)$", said_by(command), re.MULTILINE):
                yield f"{program} --help", example
    for path in BENCHMARKS:
        head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"^\s*((?:\.venv/bin/)?python benchmarks/.+)$", head, re.MULTILINE):
            yield path.name, line.strip().removeprefix(".venv/bin/")


def commands_of(group: Any) -> Iterator[Any]:
    """The commands of a program, and those of its groups of commands."""
    for command in group.commands.values():
        yield command
        if hasattr(command, "commands"):
            yield from commands_of(command)


def said_by(command: Any) -> str:
    return re.sub(r"(?<=\w)\n(?=[\w-])", " ", f"{command.help or ''}\n\n{command.epilog or ''}")


def is_command(code: str) -> bool:
    """A program with its arguments; or a command of ours with arguments, whose program the sentence leaves out."""
    first, *others = code.split()
    programs = (*GROUPS, "make", "torchrun", "python", "pip", *OTHERS)
    return (
        first in programs
        or re.fullmatch(r"benchmarks/[\w/]+\.py", first) is not None
        or (bool(others) and program_of(first) is not None)
    )


def program_of(command: str) -> str | None:
    return next((program for program, group in GROUPS.items() if command in group.commands), None)


def words_of(line: str) -> list[str]:
    """As the shell splits it, without comments and redirections. A capital letter is a number; brackets are left away."""
    words = shlex.split(re.sub(r"\s+#.*|;.*|\s+<\s.*", "", line).replace("[--", "--").replace("] ", " ").removesuffix("]"))
    return ["2" if re.fullmatch("[A-Z]", word) else word for word in words]


def check(words: Sequence[str]) -> None:
    """Raise whatever the program's parser raises for these arguments."""
    program, *arguments = words
    if "&&" in arguments:
        here = arguments.index("&&")
        check([program, *arguments[:here]])
        check(arguments[here + 1 :])
    elif program in GROUPS:
        check_ours(program, arguments)
    elif (ours := program_of(program)) is not None:
        check_ours(ours, words)
    elif program == "make":
        check_make(arguments)
    elif program == "torchrun":
        options = get_args_parser().parse_args(arguments)
        assert options.module and options.training_script == "peers"
        check_ours("edit-peer", options.training_script_args)
    elif program == "pip":
        assert arguments[0] == "install"
        check_package(arguments[1])
    elif program == "python" and arguments[:2] == ["-m", "aggregator.swarm"]:
        with SWARM.make_context("aggregator.swarm", arguments[2:]) as context:
            name, command, rest = SWARM.resolve_command(context, [*context._protected_args, *context.args])
            command.make_context(name, rest, parent=context).close()
    elif program == "python" or program.startswith("benchmarks/"):
        script, *options = arguments if program == "python" else words
        check_benchmark(REPOSITORY / script, options)
    else:
        assert program in OTHERS, program
        named = [word for word in arguments if "/" in word]
        assert all((REPOSITORY / path).exists() for path in named)


def check_ours(program: str, arguments: Sequence[str]) -> None:
    """As far as the function behind the command: names, numbers of arguments and types."""
    if not arguments:
        return  # the program is named
    group = GROUPS[program]
    with group.make_context(program, list(arguments), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        if hasattr(command, "commands"):
            if not rest:
                return  # the group is named
            name, command, rest = command.resolve_command(context, rest)
        if len(arguments) > 1 or program == "edit-lab":  # `edit-peer join` alone names the command
            command.make_context(name, rest, parent=context).close()


def check_make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    (target,) = (word for word in arguments if "=" not in word)
    assert target in targets
    assert not given or (target == "demo" and set(given) == {"ARGS"})
    if given:
        check_ours("edit-lab", ["demo", *given["ARGS"].split()])


def check_package(named: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.fullmatch(r"(\.|[\w-]+)(?:\[(\w+)\])?", named)
    assert found is not None and found[1] in (".", project["name"])
    assert found[2] is None or found[2] in project["optional-dependencies"]


class Parsed(Exception):
    """The arguments of a benchmark are good; it does not start."""


def check_benchmark(path: Path, arguments: Sequence[str]) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *_: Any) -> None:
        parse_args(self, list(arguments))
        raise Parsed

    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if path.stem == "source_lines":  # takes a folder, and has no parser
        assert len(arguments) <= 1
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setitem(sys.modules, path.stem, module)
        patch.syspath_prepend(str(path.parent))
        specification.loader.exec_module(module)
        with pytest.raises(Parsed):
            module.main()


def test_the_reference_is_up_to_date() -> None:
    script = reference_script()
    assert script.REFERENCE.read_text(encoding="utf-8") == script.reference(), "run: python docs/make_reference.py"


NAMED = sorted({(where, line) for where, line in command_lines() if line.strip()})


@pytest.mark.parametrize(("where", "line"), NAMED, ids=[f"{where}: {line}" for where, line in NAMED])
def test_a_command_that_is_named_is_taken(where: str, line: str) -> None:
    check(words_of(line))


@pytest.mark.parametrize(
    "line",
    [
        "edit-coordinator serve --state run --thread 2",
        "edit-coordinator serve --threads many",
        "edit-coordinator found --state run",
        "edit-peer run --home peer",
        "invite",
        "make everything",
        "make demo ARGS=--slow",
        "torchrun --nproc-per-node 8 -m peers run --hom peer --data text",
        "pip install edit-localsgd[jax]",
        "python benchmarks/overlap.py --mode blocking --threads 3",
        "benchmarks/gone.py",
        "edit-laboratory demo",
        "edit-lab bench exchange --codec int8 --codecs fp32",
        "edit-lab bench exchanges",
        "python -m aggregator.swarm stauts folder",
        "python -m aggregator.swarm evict folder",
    ],
)
def test_a_wrong_command_would_be_found(line: str) -> None:
    with pytest.raises((UsageError, AssertionError, FileNotFoundError, SystemExit)) as raised:
        check(words_of(line) if line != "invite" else ["edit-coordinator", "invite", "--state", "run"])
    assert not isinstance(raised.value, SystemExit) or raised.value.code == EXIT_STATUS


def test_many_commands_are_named() -> None:
    """Else the patterns above would find nothing, and prove nothing."""
    assert len(NAMED) > 60
    named = {words_of(line)[0] for _, line in NAMED}
    assert {*GROUPS, "make", "torchrun", "pip", "python", "docker"} <= named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_that_are_named_exist(document: Path) -> None:
    commands = [command for group in (*GROUPS.values(), SWARM) for command in (group, *commands_of(group))]
    options = {option for command in commands for each in command.params for option in (*each.opts, *each.secondary_opts)}
    options |= {option for action in get_args_parser()._actions for option in action.option_strings}
    options |= {option for path in BENCHMARKS for option in re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text())}
    named = re.findall(r"`(--[\w-]+)", document.read_text(encoding="utf-8"))
    assert [option for option in named if option not in options | {"--help"}] == []


# ---- Python ------------------------------------------------------------------------------------------------------------------

PYTHON = [(path.name, block) for path in DOCUMENTS for block in blocks(path.read_text(encoding="utf-8"), "python")]
OURS = ("edit", "aggregator", "peers", "editpb")


def resolve(dotted: str) -> object:
    """The module, or the attribute of one. Raises ImportError, AttributeError."""
    module, *names = dotted.split(".")
    found: Any = importlib.import_module(module)
    for name in names:
        module = f"{module}.{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(module)
    return found


@pytest.mark.parametrize(("where", "block"), PYTHON, ids=[where for where, _ in PYTHON])
def test_python_compiles_and_what_it_names_exists(where: str, block: str) -> None:
    tree = ast.parse(block)
    compile(tree, where, "exec")
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                for each in names:
                    resolve(each.name)
            case ast.ImportFrom(module=str(module), names=names):
                for each in names:
                    resolve(f"{module}.{each.name}")
            case ast.Attribute() if (dotted := ast.unparse(node)).split(".")[0] in OURS:
                resolve(dotted)
    for dotted in re.findall(rf"#.*?\b((?:{'|'.join(OURS)})(?:\.\w+)+)", block):
        resolve(dotted)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_and_attributes_that_are_named_exist(document: Path) -> None:
    groups = ("edit.data", "edit.models", "edit.trackers")  # of entry points
    for dotted in re.findall(rf"`((?:{'|'.join(OURS)})(?:\.\w+)+)(?:\(.*?\))?`", document.read_text(encoding="utf-8")):
        if dotted not in groups:
            resolve(dotted)
