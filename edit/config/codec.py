"""The choice of codecs: the section [codec], the text of a codec and its options. Their formats are in `edit.codecs`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated

from edit.config.plugins import PREFIX, is_entry
from edit.config.validation import Between, OneOf, check_bounds, one_of, require, within
from edit.errors import ConfigError

__all__ = [
    "CODECS",
    "MAX_SPEC_CHARS",
    "RESIDUAL_FORMS",
    "CodecChoice",
    "CodecConfig",
    "CodecOption",
    "CodecSpec",
    "FragmentCodec",
]

SPARSE = ("topk", "top1", "sdd")  # most of a vector is left for later
MAX_SPEC_CHARS = 64  # of a spec's text
# Those of `record`. The others would starve the outer momentum of small elements: few bits, or fp16's range.
RECORDS = ("fp32", "bf16", "int8", "int4", "e3m0")
RESIDUAL_FORMS = ("fp32", "bf16", "int8")  # how a residual can be stored, see `edit.codecs.residuals`
LOCAL = "local"  # instead, of a peer: in its local parameters, see `edit.codecs.error_feedback`


@dataclass(frozen=True, slots=True)
class CodecOption:
    """What one option of a codec may be."""

    # Its type is the option's.
    default: int | float
    low: int | float
    high: int | float
    power_of_two: bool = False

    def fault(self, value: int | float) -> str | None:
        """Say what `value` must be instead, or return None."""
        if isinstance(self.default, int) and not isinstance(value, int):
            return "must be a whole number"
        if not self.low <= value <= self.high:
            return f"must be between {self.low} and {self.high}"
        if self.power_of_two and int(value).bit_count() != 1:
            return "must be a power of two"
        return None


def _block(default: int) -> CodecOption:
    """Elements with a scale of their own; divides `edit.codecs.PIECE`."""
    return CodecOption(default, 64, 1 << 14, power_of_two=True)


# Every codec of `edit.codecs` with its options. They stand here because the import of `edit.codecs` needs torch; a test holds
# the two together.
CODECS: Mapping[str, Mapping[str, CodecOption]] = MappingProxyType(
    {
        "fp32": {},
        "bf16": {},
        "fp16": {},
        "int8": {},
        "int4": {"block": _block(256)},
        "e3m0": {"block": _block(256)},
        "stat2": {"block": _block(1024), "range": CodecOption(4.0, 1, 12)},
        "sign": {"block": _block(256)},
        "topk": {"k": CodecOption(64, 1, 2048)},
        "top1": {"of": CodecOption(32, 4, 128, power_of_two=True)},
        "sdd": {"columns": CodecOption(128, 32, 1024, power_of_two=True), "rank": CodecOption(9, 1, 64)},
    }
)


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """The choice of a codec: its name and its options. Hashable; `str(spec)` is its text, the form in run.toml and on the wire.

    The text is the name alone or followed by options: `int8`, `name:option=8,other=0.5`.
    """

    # One of `edit.codecs.codec_names()`, or `entry:NAME`, a plug-in of `edit.codecs` (docs/plugins.md).
    name: str
    # The options that were given, by name, ascending.
    options: tuple[tuple[str, int | float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read the text of a spec. Raises ConfigError when an option is not NAME=NUMBER or is given twice."""
        name = _name_of(text)
        rest = text[len(name) + 1 :]
        options = [item.partition("=")[::2] for item in rest.split(",")] if rest else []
        if len(dict(options)) != len(options):
            raise ConfigError(f"codec {text!r}: an option is given twice")
        return cls(name, tuple(sorted((key, _number(value, text)) for key, value in options)))

    def __str__(self) -> str:
        options = ",".join(f"{key}={value!r}" for key, value in self.options)
        return f"{self.name}:{options}" if options else self.name

    def values(self) -> dict[str, int | float]:
        """Return every option of the codec with its value: of a plug-in, those that are given.

        Raises ConfigError for an unknown codec, option or value.
        """
        if is_entry(self.name):
            return dict(self.options)
        if (known := CODECS.get(self.name)) is None:
            raise ConfigError(f"unknown codec {self.name!r}; known: {', '.join(CODECS)}")
        for key, value in self.options:
            if key not in known:
                raise ConfigError(f"codec {self}: there is no option {key!r}; {self.name} has {', '.join(known) or 'none'}")
            if fault := known[key].fault(value):
                raise ConfigError(f"codec {self}: {key} {fault}")
        return {key: option.default for key, option in known.items()} | dict(self.options)


def _number(value: str, text: str) -> int | float:
    try:
        number = int(value) if value.removeprefix("-").isdecimal() else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"codec {text!r}: an option must be NAME=NUMBER")
    return number


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codecs of one direction: contributions, or updates."""

    default: CodecSpec
    # By pattern of fragment names.
    fragments: tuple[tuple[str, CodecSpec], ...] = ()
    # Of the residual, before the next vector is added to it.
    decay: float = 1.0
    # How the residual is stored: one of RESIDUAL_FORMS, or LOCAL.
    residual: str = "fp32"

    def of_fragment(self, name: str) -> CodecSpec:
        """Return the codec of the fragment of this name: that of the longest pattern that matches it, else the default."""
        matching = [(len(pattern), pattern, spec) for pattern, spec in self.fragments if fnmatchcase(name, pattern)]
        return max(matching)[2] if matching else self.default

    @property
    def names(self) -> set[str]:
        """The names of all these codecs."""
        return {self.default.name, *(spec.name for _, spec in self.fragments)}


@dataclass(frozen=True, slots=True)
class NamesCodec:
    """The text of a CodecSpec of one of these codecs. optional: or none. plugin: or a plug-in's. Options are checked beside."""

    names: tuple[str, ...]
    optional: bool = False
    plugin: bool = False

    @property
    def rule(self) -> str:
        return f"must be one of {', '.join((*self.names, *(['entry:NAME'] if self.plugin else [])))}"

    def allows(self, value: str) -> bool:
        name = _name_of(value)
        return name in self.names or (self.plugin and is_entry(name)) or (self.optional and not value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentCodec:
    """One entry of [codec.fragments]: other codecs for the fragments whose names match its key; empty: as the others."""

    up: str = ""
    down: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """The section [codec]: how vectors are encoded on the wire, as the text of a CodecSpec (see `edit.codecs`)."""

    # The codec of contributions.
    up: Annotated[str, NamesCodec(tuple(CODECS), plugin=True)] = "int8"
    # The codec of the published update.
    down: Annotated[str, NamesCodec(tuple(CODECS), plugin=True)] = "bf16"
    # The share of what a contribution's codec left out that is added to the next contribution (error feedback). 1: all of it is
    # sent later; below 1: it decays (SparseLoCo, arXiv 2508.15706: 0.95); 0: no feedback.
    up_decay: Annotated[float, Between(0, 1)] = 1.0
    # The share of what an update's codec left out that is added to the next update.
    down_decay: Annotated[float, Between(0, 1)] = 1.0
    # How a peer stores its residual (what its contributions left out). "fp32": exactly, 4 bytes per parameter; "bf16": 2 bytes;
    # "int8": about 1 byte. "local": in its local parameters, without memory of its own: training continues from theta minus the
    # residual, so that the next pseudo-gradient contains it (step-ahead error feedback, arXiv 2008.05823).
    up_residual: Annotated[str, OneOf(*RESIDUAL_FORMS, LOCAL)] = "fp32"
    # The codec of the merged pseudo-gradient in the journal. The outer optimizer gets the decoded value. "": fp32 for fragments
    # whose update is fp32, else bf16. With int8, int4 and e3m0, what the codec left out is added to the next one.
    record: Annotated[str, NamesCodec(RECORDS, optional=True)] = ""
    # How the aggregator keeps what `down` and `record` left out: fp32, bf16 or int8 (`edit.codecs.residuals`).
    down_residual: Annotated[str, OneOf(*RESIDUAL_FORMS)] = "int8"
    # Other codecs for some fragments, by a pattern of their names ("embedding*"; `fnmatch`); the longest that matches counts.
    fragments: Mapping[str, FragmentCodec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds("codec.", self)
        for direction in ("up", "down"):
            _check_spec(f"codec.{direction}", getattr(self, direction))
        within("codec.fragments (their number)", len(self.fragments), 0, 64)
        for pattern, chosen in self.fragments.items():
            name = f'codec.fragments."{pattern}"'
            require(0 < len(pattern) <= 512, name, chosen, "must have a pattern of 1 to 512 characters")
            require(bool(chosen.up or chosen.down), name, chosen, "must choose up, down or both")
            for direction in ("up", "down"):
                if text := getattr(chosen, direction):
                    _check_spec(f"{name}.{direction}", text)
        if self.record:
            _check_spec("codec.record", self.record)
        if not self.downlink.names.isdisjoint(SPARSE):
            rule = (
                f"must be 1 with {' or '.join(SPARSE)} in codec.down or codec.fragments: most of an outer step is in the "
                "residual, and the outer optimizer counts it as taken"
            )
            require(self.down_decay == 1, "codec.down_decay", self.down_decay, rule)

    @property
    def uplink(self) -> CodecChoice:
        """How contributions are encoded."""
        return self._choice("up", self.up_decay, self.up_residual)

    @property
    def downlink(self) -> CodecChoice:
        """How updates are encoded."""
        return self._choice("down", self.down_decay, self.down_residual)

    def record_of(self, fragment_name: str) -> CodecSpec:
        """Return how what is merged of the fragment of this name is recorded."""
        lossless = self.downlink.of_fragment(fragment_name).name == "fp32"
        return CodecSpec.parse(self.record or ("fp32" if lossless else "bf16"))

    def _choice(self, direction: str, decay: float, residual: str) -> CodecChoice:
        others = [(pattern, getattr(chosen, direction)) for pattern, chosen in sorted(self.fragments.items())]
        specs = tuple((pattern, CodecSpec.parse(text)) for pattern, text in others if text)
        return CodecChoice(CodecSpec.parse(getattr(self, direction)), specs, decay, residual)

    def check_fragments(self, names: Collection[str]) -> None:
        """Raise ConfigError for a pattern that matches none of the model's fragments. names: of all of them but the buffers."""
        for pattern in self.fragments:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
                raise ConfigError(f'codec.fragments."{pattern}": matches no fragment; the model has {some}')


def _name_of(text: str) -> str:
    """Return the name in a spec's text: what stands before the options."""
    entry = PREFIX if text.startswith(PREFIX) else ""
    return entry + text.removeprefix(entry).partition(":")[0]


def _check_spec(field_name: str, text: str) -> None:
    """Raise ConfigError unless `text` is that of a spec, as `str` writes it."""
    require(len(text) <= MAX_SPEC_CHARS, field_name, text, f"must have at most {MAX_SPEC_CHARS} characters")
    if not is_entry(name := _name_of(text)):
        one_of(field_name, name, (*CODECS, "entry:NAME"))
    try:
        spec = CodecSpec.parse(text)
        spec.values()
    except ConfigError as error:
        raise ConfigError(f"{field_name}: {error}") from error
    require(str(spec) == text, field_name, text, f"must be written {spec}")
