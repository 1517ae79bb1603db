"""The trainable tensors of a model, grouped layer-wise into fragments, in forward order.

A fragment travels as one flat fp32 vector: its tensors, row-major, one after the other in the schema's order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edit.errors import ConfigError, RemoteProtocolError
from edit.plain_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["FragmentSpec", "Schema", "TensorSpec", "plan_fragments"]

_BLOCK = re.compile(r"^(?P<block>(?:.*?\.)?\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One full (unsharded) tensor."""

    # As in `named_parameters()`.
    name: str
    # () for a scalar.
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSpec:
    """The unit of exchange: one transformer block, or one of the modules around the blocks."""

    # The position in the schema.
    fragment_id: int
    # The qualified name of the block or module.
    name: str
    # In the order in which they follow one another in the flat vector.
    tensors: tuple[TensorSpec, ...]
    # It holds buffers (BatchNorm statistics), which are averaged plainly: no penalty, no outer optimizer, always fp32.
    buffers: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Schema:
    """All fragments of a model. Raises RemoteProtocolError for a schema that contradicts itself."""

    # In forward order; the position is the fragment_id.
    fragments: tuple[FragmentSpec, ...]
    # SHA-256 (hex) over names, shapes and grouping, computed once. Two peers train together only if theirs are equal.
    schema_hash: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [tensor.name for fragment in self.fragments for tensor in fragment.tensors]
        if not names or any(not fragment.tensors for fragment in self.fragments):
            raise RemoteProtocolError("schema: no tensors, or a fragment without any")
        if len(set(names)) != len(names):
            raise RemoteProtocolError("schema: a tensor is named twice")
        if [fragment.fragment_id for fragment in self.fragments] != list(range(len(self.fragments))):
            raise RemoteProtocolError("schema: fragment ids are not 0, 1, 2, ...")
        if any(size < 1 for f in self.fragments for t in f.tensors for size in t.shape):
            raise RemoteProtocolError("schema: a tensor has a dimension below 1")
        object.__setattr__(self, "schema_hash", hashlib.sha256(self.to_json().encode()).hexdigest())

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(fragment.numel for fragment in self.fragments)

    def subset(self, fragment_ids: Iterable[int]) -> Schema:
        """Return a schema of these fragments alone, in the order given, numbered from 0."""
        return Schema(tuple(replace(self.fragments[i], fragment_id=new) for new, i in enumerate(fragment_ids)))

    def to_json(self) -> str:
        """Return names, shapes and grouping as canonical JSON: [[fragment, [[tensor, [size, ...]], ...]], ...].

        A fragment of buffers has a third entry, "buffers"; so the schema_hash of a model without any is as it always was.
        """
        plan: list[list[object]] = [[f.name, [[t.name, list(t.shape)] for t in f.tensors]] for f in self.fragments]
        for fragment, entry in zip(self.fragments, plan, strict=True):
            entry += ["buffers"] * fragment.buffers
        return json.dumps(plan, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Read what `to_json` returned. Raises RemoteProtocolError for anything else."""
        try:
            return cls(
                tuple(
                    FragmentSpec(
                        fragment_id=i,
                        name=str(name),
                        tensors=tuple(TensorSpec(name=str(t), shape=_shape(shape)) for t, shape in tensors),
                        buffers=_says_buffers(more),
                    )
                    for i, (name, tensors, *more) in enumerate(parse_json(text, finite=True))
                )
            )
        except (ValueError, TypeError) as error:
            raise RemoteProtocolError(f"schema: not what to_json writes ({error})") from error

    def first_difference(self, other: Schema, peer: str = "the peer") -> str | None:
        """Name the first tensor in which a peer's schema differs from this one, in one line; None when they are equal.

        peer: whose `other` is, in words.
        """
        mine = [(f"{f.name} (buffers)" if f.buffers else f.name, t) for f in self.fragments for t in f.tensors]
        theirs = [(f"{f.name} (buffers)" if f.buffers else f.name, t) for f in other.fragments for t in f.tensors]
        for (my_fragment, a), (their_fragment, b) in zip(mine, theirs, strict=False):
            if a.name != b.name:
                return f"tensor {a.name} of the run stands where {peer} has {b.name}"
            if a.shape != b.shape:
                return f"tensor {a.name} has shape {list(a.shape)} in the run and {list(b.shape)} at {peer}"
            if my_fragment != their_fragment:
                return f"tensor {a.name} is in fragment {my_fragment} of the run and in {their_fragment} at {peer}"
        if len(mine) > len(theirs):
            return f"tensor {mine[len(theirs)][1].name} of the run is missing at {peer}"
        if len(theirs) > len(mine):
            return f"tensor {theirs[len(mine)][1].name} of {peer} is not in the run"
        return None


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int for size in sizes):
        raise ValueError(f"the shape {sizes!r:.80}")
    return tuple(sizes)


def _says_buffers(more: list[object]) -> bool:
    if more not in ([], ["buffers"]):
        raise ValueError(f"unknown entry {more}")
    return bool(more)


def plan_fragments(named_parameters: Iterable[tuple[str, nn.Parameter | Tensor]]) -> Schema:
    """Group trainable parameters layer-wise, in the order given (a module lists its parameters in forward order).

    Tensors under a numbered block (`blocks.3.attn.weight`) form the fragment of that block (`blocks.3`); the others form one
    fragment per top-level module. Tied weights appear once, as in `named_parameters()`. Frozen parameters are left out.

    Raises ConfigError when nothing is trainable, or a trainable parameter is complex, empty or without a shape.
    """
    from torch.nn.parameter import is_lazy  # who has parameters has torch

    groups: dict[str, list[TensorSpec]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if is_lazy(parameter):
            raise ConfigError(f"parameter {name}: has no shape yet; run one batch through the model first")
        if parameter.is_complex():
            raise ConfigError(
                f"parameter {name}: {parameter.dtype} is complex and cannot be exchanged; freeze it, or train real parts"
            )
        if parameter.numel() == 0:
            raise ConfigError(
                f"parameter {name}: shape {list(parameter.shape)} is empty, nothing to exchange; freeze or remove it"
            )
        block = _BLOCK.match(name)
        group = block["block"] if block else name.partition(".")[0]
        groups.setdefault(group, []).append(TensorSpec(name=name, shape=tuple(parameter.shape)))
    if not groups:
        raise ConfigError("the model has no trainable parameter; nothing to exchange")
    return Schema(
        tuple(FragmentSpec(fragment_id=i, name=name, tensors=tuple(specs)) for i, (name, specs) in enumerate(groups.items()))
    )
