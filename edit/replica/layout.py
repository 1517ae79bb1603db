"""Which part of every fragment this rank holds, and which part of that it contributes.

The way from a model's parameters, sharded (DTensor) or not, to boxes of fragments; the check that the ranks of a replica own
every element exactly once; putting a fragment together at one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from edit.errors import ConfigError
from edit.fragments.assignment import assign
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
from edit.fragments.shards import Box, Shard, partition_fault
from edit.replica.ranks import Ranks

__all__ = ["Layout", "clean_name", "exchanged", "held_box", "is_sharded", "local_of"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation checkpointing
_Boxes = list[tuple[Box, ...]]  # by fragment


def clean_name(name: str) -> str:
    """Return a qualified name without torch.compile and checkpoint wrappers, so that peers with and without them agree."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory. Call it under no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether a parameter is spread over more than one rank."""
    return any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters())


def exchanged(model: nn.Module, buffers: str) -> tuple[Schema, dict[str, Tensor]]:
    """Return the fragments of the model, and its tensors by clean name.

    buffers: "average" adds the persistent floating-point buffers as a last fragment, `buffers`; "local" leaves them out.
    Raises ConfigError when nothing is trainable, or no buffer is there to average.
    """
    tensors: dict[str, Tensor] = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    schema = plan_fragments(tensors.items())
    if buffers == "local":
        return schema, tensors
    floats = dict(_float_buffers(model))
    if not floats:
        raise ConfigError(f'buffers = "{buffers}", but the model has no floating-point buffer; remove the setting')
    specs = tuple(TensorSpec(name=name, shape=tuple(buffer.shape)) for name, buffer in floats.items())
    fragment = FragmentSpec(fragment_id=len(schema.fragments), name="buffers", tensors=specs, buffers=True)
    return Schema((*schema.fragments, fragment)), tensors | floats


def _float_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent ones, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            transient = name in module._non_persistent_buffers_set
            if buffer.is_floating_point() and buffer.numel() and not transient and id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


class Layout:
    """The fragments of one model as they lie on the ranks of its replica.

    held: by fragment, what this rank holds; owned: what of that it contributes. Every element has one owner: of copies (on a
    replicated mesh dimension, on meshes side by side, of a plain tensor) the lowest rank. All ranks construct it together.
    part: (number, of how many): only the fragments of that aggregator, see `edit.fragments.assignment`. named: what all of them
    exchange, by clean name.
    Raises ConfigError, at every rank, when shards do not partition a tensor, one cannot be written, or ranks have different
    models.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, buffers: str = "local", part: tuple[int, int] = (0, 1)) -> None:
        self.ranks = ranks
        whole, named = exchanged(model, buffers)
        self.named = {spec.name: named[spec.name] for fragment in whole.fragments for spec in fragment.tensors}
        self.schema = whole.subset(assign(whole, part[1])[part[0]])
        ranks.same("the model", self.schema.schema_hash)
        self.tensors = tuple(tuple(named[spec.name] for spec in fragment.tensors) for fragment in self.schema.fragments)
        self._held: list[_Boxes] = ranks.collect(_held(self.schema, self.tensors, ranks))
        self._owned = _owned(self._held)
        for i, fragment in enumerate(self.schema.fragments):
            if fault := partition_fault(fragment, [boxes[i] for boxes in self._owned]):
                raise ConfigError(f"the ranks of this replica do not share out the model exactly: {fault}")
        self.held = tuple(map(Shard, self.schema.fragments, self._held[ranks.rank]))
        self.owned = tuple(map(Shard, self.schema.fragments, self._owned[ranks.rank]))

    @property
    def owned_by_rank(self) -> Sequence[Sequence[tuple[Box, ...]]]:
        """By rank and fragment, the boxes that it owns."""
        return self._owned

    def locals(self, fragment_id: int) -> list[Tensor]:
        """Return what this rank holds of the fragment's tensors, in the order of its held boxes; shares the model's memory."""
        with torch.no_grad():
            tensors = self.tensors[fragment_id]
            return [local_of(tensors[box.tensor]) for box in self.held[fragment_id].boxes]

    def own(self, fragment_id: int, vector: Tensor) -> Tensor:
        """Return the owned part of a held vector: `vector` itself when all of it is owned."""
        held, owned = self.held[fragment_id].boxes, set(self.owned[fragment_id].boxes)
        if len(held) == len(owned):
            return vector
        parts = torch.split(vector, [box.numel for box in held])
        return torch.cat([part for box, part in zip(held, parts, strict=True) if box in owned] or [vector[:0]])

    def disown(self, fragment_id: int, part: Tensor) -> Tensor:
        """Return the held vector of which `part` is what this rank owns, the rest from its owners. Called by all ranks."""
        if self.ranks.size == 1:
            return part
        held, owned = self.held[fragment_id].boxes, self.owned[fragment_id].boxes
        pieces = dict(zip(owned, torch.split(part, [box.numel for box in owned]), strict=True))
        for source, target, box in self._copies(fragment_id):
            if (copy := self.ranks.transfer(pieces.get(box), box.numel, source, target)) is not None:
                pieces[box] = copy
        return torch.cat([pieces[box] for box in held] or [part[:0]])

    def _copies(self, fragment_id: int) -> Iterator[tuple[int, int, Box]]:
        """Yield (owner, holder, box) for each box that a rank holds and does not own."""
        owners = {box: rank for rank, boxes in enumerate(self._owned) for box in boxes[fragment_id]}
        for rank, boxes in enumerate(self._held):
            for box in boxes[fragment_id]:
                if owners[box] != rank:
                    yield owners[box], rank, box

    def gather(self, fragment_id: int, vector: Tensor, to: int = 0) -> Tensor | None:
        """Return the whole fragment at rank `to`, put together from every rank's held vector; None elsewhere."""
        if self.ranks.size == 1:
            return vector
        fragment = self.schema.fragments[fragment_id]
        shards = [Shard(fragment, boxes[fragment_id]) for boxes in self._owned]
        parts = self.ranks.gather(self.own(fragment_id, vector), [shard.numel for shard in shards], to)
        if parts is None:
            return None
        whole = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
        for shard, part in zip(shards, parts, strict=True):
            shard.put(part, whole)
        return whole

    def at_first_rank(self, vectors: Callable[[int], Tensor]) -> list[Tensor]:
        """Return all fragments, whole, at rank 0; at the others an empty list."""
        whole = [self.gather(i, vectors(i)) for i in range(len(self.schema.fragments))]
        return [part for part in whole if part is not None]


def _held(schema: Schema, tensors: Sequence[Sequence[Tensor]], ranks: Ranks) -> _Boxes:
    """Return what this rank holds of each fragment.

    Raises ConfigError, at every rank, for a placement that is no shard, and for a tensor that cannot be written.
    """

    def find() -> _Boxes:
        held: _Boxes = []
        for fragment, parts in zip(schema.fragments, tensors, strict=True):
            for spec, tensor in zip(fragment.tensors, parts, strict=True):
                _check_writable(spec.name, tensor)
            boxes = [held_box(i, tensor, fragment.tensors[i].name, ranks.rank) for i, tensor in enumerate(parts)]
            held.append(tuple(box for box in boxes if box is not None))
        return held

    return ranks.together(find)


def _check_writable(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        why = "is on the meta device, without values; put the model on a device and load its weights first"
    elif tensor.is_inference():
        why = "was made under torch.inference_mode() and cannot be trained; make the model outside of it"
    elif any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        why = "is expanded, several elements in one place of memory, and cannot be written; clone() it"
    elif not _has_flat_view(tensor):
        why = f"is a {type(tensor).__name__}, which cannot be read and written as a vector; train plain weights, or freeze it"
    else:
        return
    raise ConfigError(f"tensor {name}: {why}")


def _has_flat_view(tensor: Tensor) -> bool:
    """Whether a tensor is plain, or of a class that can be seen as a vector; one of codes and scales often cannot."""
    with torch.no_grad():
        local = local_of(tensor)
        if not is_traceable_wrapper_subclass(local):
            return True
        try:
            return local.detach().reshape(-1).shape == (local.numel(),)
        except RuntimeError:  # the class does not have it
            return False


def held_box(position: int, tensor: Tensor, name: str, rank: int) -> Box | None:
    """Return the box of a tensor, the `position`-th of its fragment, that this rank holds; None for nothing."""
    if not isinstance(tensor, DTensor):
        return Box(position, (0,) * tensor.ndim, tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ConfigError(f"tensor {name}: a parameter that is a partial sum ({placements}) cannot be exchanged")
    if mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    with torch.no_grad():
        found = tuple(local_of(tensor).shape)
    numel = math.prod(sizes)
    if numel != math.prod(list(found)) or (numel and tuple(sizes) != found):
        raise ConfigError(f"tensor {name}: rank {rank} holds {list(found)}, but its placement {placements} says {list(sizes)}")
    return Box(position, tuple(offsets), tuple(sizes)) if numel else None


def _owned(held: Sequence[_Boxes]) -> list[_Boxes]:
    """Return by rank what it owns: of equal boxes the lowest rank that holds one. held: by rank."""
    owned: list[_Boxes] = []
    taken: list[set[Box]] = [set() for _ in held[0]]
    for boxes in held:
        owned.append([tuple(box for box in mine if box not in there) for mine, there in zip(boxes, taken, strict=True)])
        for mine, there in zip(boxes, taken, strict=True):
            there.update(mine)
    return owned
