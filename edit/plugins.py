"""Plug-ins: code of other packages, or plain objects, that a configuration names and this process may run.

A plug-in is an entry point of the group `edit.KIND`, or what `register` was given. A setting names it as `entry:NAME`, where it
could also name a built-in one, which is registered here too (`built_in`). Only the name travels: `admit` loads what a
configuration names, once this process's operator has allowed the name, and no name from the wire loads anything.
docs/plugins.md has the contract of each kind.

What takes part in an outer step (AGREED) must be the same wherever it is computed or replayed. So the configuration pins it, by
the version of its package and a hash of its files, in the section [plugins].

The table of what is admitted is this process's, as its imports are: bytes that name a codec arrive everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from edit.config.plugins import AGREED, KINDS, LOCAL, PREFIX, pin_key
from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, PluginError
from edit.plain_text import parse_toml

__all__ = [
    "Plugin",
    "admit",
    "blame",
    "built_in",
    "built_in_names",
    "check",
    "find",
    "get",
    "make",
    "named",
    "pin",
    "pinned",
    "register",
    "resolve",
    "without_pins",
]


@dataclass(frozen=True, slots=True, eq=False)
class Plugin:
    """One plug-in, found and not necessarily loaded."""

    kind: str
    name: str
    # Imports the code and returns what makes the plug-in's object.
    load: Callable[[], Any]
    # Of the package that it comes with; "": a plain object, or a package without metadata.
    version: str
    # Of its files, in hexadecimal, see `_hash`; "": it has none.
    sha256: str
    # A plain object of this process, which `register` was given: its operator wrote it.
    plain: bool = False
    # Of this project: trusted as the rest of it is, and not pinned.
    built_in: bool = False

    @property
    def pin(self) -> str:
        """What the section [plugins] says of it."""
        return f"{self.version} sha256:{self.sha256}".strip()

    def __str__(self) -> str:
        return f"{'' if self.built_in else PREFIX}{self.name} (edit.{self.kind})"


_admitted: dict[tuple[str, str], tuple[Plugin, Any]] = {}  # with what makes its object
_built_in: dict[tuple[str, str], tuple[Plugin, Any]] = {}  # likewise
_Make = TypeVar("_Make")


def built_in(kind: str, name: str) -> Callable[[_Make], _Make]:
    """Register what is decorated as this project's own NAME of a kind: settings name it without `entry:`, nobody allows it.

    It makes its object as a plug-in of that kind does; but it may be given more than those, and what it gives is not checked.
    """

    def registered(make: _Make) -> _Make:
        _built_in[kind, name] = Plugin(kind, name, lambda: make, "", "", built_in=True), make
        return make

    return registered


def built_in_names(kind: str) -> tuple[str, ...]:
    """Return the names of the built-in ones of a kind whose modules are imported, in the order of their registration."""
    return tuple(name for each, name in _built_in if each == kind)


def register(kind: str, name: str, make: Any) -> None:
    """Let configurations and options in this process name `make` as `entry:NAME`, where a KIND is chosen.

    make: as an entry point's object.

    Raises ConfigError for an unknown kind, a name that is no identifier, and something that cannot be called.
    """
    if kind not in (kinds := (*KINDS, *LOCAL)):
        raise ConfigError(f"plug-in {name}: there is no kind {kind!r}; the kinds are {', '.join(kinds)}")
    if not (name.isascii() and name.isidentifier()):
        raise ConfigError(f"plug-in {name!r}: its name must be an identifier")
    module = getattr(make, "__module__", "")
    files = _hash(module) if module and module != "__main__" else ""
    plugin = Plugin(kind, name, lambda: make, "", files, plain=True)
    _admitted[kind, name] = plugin, _callable(plugin, make)


def named(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Return (kind, name) of every plug-in that the configuration names."""
    codecs = sorted(config.codec.uplink.names | config.codec.downlink.names)
    texts = [
        ("outer", config.outer.optimizer),
        ("mergers", config.outer.merger),
        ("penalties", config.penalty.detector),
        *(("codecs", name) for name in codecs),
        ("models", config.model.name),
        ("optimizers", config.inner.optimizer),
    ]
    return tuple((kind, text.removeprefix(PREFIX)) for kind, text in texts if text.startswith(PREFIX))


def find(kind: str, name: str, installed: Iterable[EntryPoint] | None = None) -> Plugin:
    """Return a plug-in of the group `edit.KIND`; nothing of it is imported. installed: to choose from; None: what is installed.

    Raises ConfigError when no package offers it, or several do.
    """
    group = f"edit.{kind}"
    offered = importlib.metadata.entry_points(group=group) if installed is None else installed
    found = [each for each in offered if each.name == name and each.group == group]
    if not found:
        raise ConfigError(
            f"{PREFIX}{name}: no installed package offers it in entry point group {group}; install the one that does"
        )
    if len({each.value for each in found}) > 1:
        offers = ", ".join(sorted(each.value for each in found))
        raise ConfigError(f"{PREFIX}{name}: offered more than once ({offers}); uninstall all but one")
    chosen = found[0]
    distribution = getattr(chosen, "dist", None)
    return Plugin(kind, name, chosen.load, distribution.version if distribution is not None else "", _hash(chosen.module))


def admit(config: RunConfig, allowed: Collection[str], kinds: Collection[str] = KINDS) -> None:
    """Load the plug-ins of these kinds that the configuration names, and compare them with its pins.

    allowed: names that this process's operator trusts; what was registered is trusted.

    Raises ConfigError, one line that names the plug-in, where one is not allowed, not installed, not pinned although it takes
    part in outer steps, another than the pinned one, or cannot be imported.
    """
    for kind, name in named(config):
        if kind not in kinds:
            continue
        plugin = _trusted(kind, name, allowed)
        _check_pin(plugin, str(config.plugins.get(pin_key(kind, name), "")))
        if (kind, name) not in _admitted:
            _admitted[kind, name] = plugin, _load(plugin)


def check(kind: str, name: str, allowed: Collection[str]) -> Plugin:
    """Return a plug-in that this process may load; nothing of it is imported.

    Raises ConfigError where it is not allowed, or not found.
    """
    return _trusted(kind, name, allowed)


def resolve(
    kind: str, text: str, allowed: Collection[str], installed: Iterable[EntryPoint] | None = None
) -> tuple[Plugin, Callable[..., Any]]:
    """Return a plug-in, `entry:NAME`, or a built-in one, and what makes its object, admitted before or not.

    Raises ConfigError as `admit`, and for a text that names neither; PluginError.
    """
    if not text.startswith(PREFIX):
        return _of_this_project(kind, text)
    name = text.removeprefix(PREFIX)
    plugin = _trusted(kind, name, allowed, installed)
    known = _admitted.get((kind, name))
    return plugin, known[1] if known is not None else _load(plugin)


def _trusted(kind: str, name: str, allowed: Collection[str], installed: Iterable[EntryPoint] | None = None) -> Plugin:
    if (known := _admitted.get((kind, name))) is not None:
        return known[0]
    if name not in allowed:
        user = "an option" if kind in LOCAL else "the run"
        raise ConfigError(
            f"{user} uses {PREFIX}{name} (edit.{kind}), code of another package: "
            f"add `--allow {name}` if you trust that code here"
        )
    return find(kind, name, installed)


def pin(text: str, allowed: Collection[str]) -> str:
    """Return run.toml's text with the section [plugins] for what is installed here and allowed; else with the pins it has.

    Raises ConfigError when it names a plug-in that takes part in outer steps and is neither allowed nor pinned; and as `find`.
    """
    if PREFIX not in text and "[plugins]" not in text:
        return text
    bare = without_pins(text)
    try:
        before = parse_toml(text)
        config = RunConfig.from_mapping(parse_toml(bare))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"run.toml: {error}") from error
    written = before.get("plugins", {})
    pins = {}
    for kind, name in named(config):
        key = pin_key(kind, name)
        if name in allowed:
            if kind in AGREED or any(each.name == name for each in importlib.metadata.entry_points(group=f"edit.{kind}")):
                pins[key] = _pinned(find(kind, name))
        elif isinstance(written, Mapping) and key in written:
            pins[key] = str(written[key])
        elif kind in AGREED:
            raise ConfigError(
                f"run.toml names {PREFIX}{name} (edit.{kind}), code of another package: "
                f"add `--allow {name}` if you trust that code"
            )
    if pins == written:
        return text
    lines = [f'"{key}" = "{value}"' for key, value in sorted(pins.items())]
    return bare if not lines else "\n".join([bare.rstrip("\n"), "", "[plugins]", *lines, ""])


def _pinned(plugin: Plugin) -> str:
    if not plugin.sha256:
        raise ConfigError(f"{plugin}: has no file that could be hashed; install it as files")
    return plugin.pin


def without_pins(text: str) -> str:
    """Return run.toml's text without its section [plugins]."""
    return re.sub(r"\n*^\[plugins\][^\n]*\n(?:(?!\[)[^\n]*(?:\n|\Z))*", "\n", text, flags=re.MULTILINE)


def pinned(config: RunConfig) -> frozenset[str]:
    """Return the names that the configuration pins: where its own operator wrote them, they are what that operator allows."""
    return frozenset(key.partition(":")[2] for key in config.plugins)


def get(kind: str, name: str) -> Plugin | None:
    """Return a plug-in that is admitted, or None."""
    known = _admitted.get((kind, name))
    return known[0] if known is not None else None


def make(kind: str, text: str, *arguments: object) -> tuple[Plugin, Any]:
    """Return the plug-in that `entry:NAME` names, or the built-in one, and its object, made of `arguments`.

    Raises ConfigError when it is not admitted in this process, or unknown; PluginError when a plug-in raises.
    """
    if not text.startswith(PREFIX):
        own, maker = _of_this_project(kind, text)
        return own, maker(*arguments)
    name = text.removeprefix(PREFIX)
    if (known := _admitted.get((kind, name))) is None:
        raise ConfigError(f"{PREFIX}{name}: this process has loaded no such plug-in of edit.{kind}")
    plugin, maker = known
    with blame(plugin):
        return plugin, maker(*arguments)


def _of_this_project(kind: str, name: str) -> tuple[Plugin, Any]:
    if (known := _built_in.get((kind, name))) is None:
        raise ConfigError(f"{name}: edit.{kind} has {', '.join(built_in_names(kind))}, and plug-ins, {PREFIX}NAME")
    return known


@contextlib.contextmanager
def blame(plugin: Plugin, error: type[EditError] = PluginError, doing: str = "") -> Iterator[None]:
    """Turn whatever is raised inside, by code of others, into one line that names the plug-in."""
    try:
        yield
    except EditError as said:
        raise type(said)(f"{plugin}: {said}") from said
    except Exception as said:
        where = traceback.extract_tb(said.__traceback__)[-1]
        text = " ".join(str(said).split())
        raise error(f"{plugin}: {doing}{type(said).__name__}: {text} ({Path(where.filename).name}:{where.lineno})") from said


def _callable(plugin: Plugin, maker: Any) -> Any:
    if not callable(maker):
        raise PluginError(f"{plugin}: is not callable, but a {type(maker).__name__}")
    return maker


def _load(plugin: Plugin) -> Any:
    with blame(plugin, doing="cannot be loaded: "):
        maker = plugin.load()
    return _callable(plugin, maker)


def _check_pin(plugin: Plugin, pinned: str) -> None:
    if not pinned:
        if plugin.kind in AGREED and not plugin.plain:
            raise ConfigError(
                f"{plugin}: the run's settings do not pin it in [plugins]; its operator starts with `--allow {plugin.name}`"
            )
        return
    same = pinned.partition("sha256:")[2] == plugin.sha256 if plugin.plain else pinned == plugin.pin
    if not same:
        raise ConfigError(f"{plugin}: the run has {pinned}, and here is {plugin.pin}; install the same")


def _hash(module: str) -> str:
    """Return the SHA-256 of a module's file, or of all Python files of the package that it is in; "": there is no file.

    Of a package it is that of the lines `HASH  PATH` that sha256sum prints for them, sorted by path. Imports nothing.
    """
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    if not (folders := [Path(each) for each in spec.submodule_search_locations or ()]):
        file = Path(spec.origin or "")
        return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    lines = [
        f"{sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for folder in folders
        for path in folder.rglob("*.py")
    ]
    return sha256("".join(sorted(lines, key=lambda line: line[64:])).encode()).hexdigest()
