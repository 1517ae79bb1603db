"""A peer's two sets of parameters: the outer ones (fp32, CPU, at a committed outer step) and the local ones in the model.

Owns: theta, its digest, and every move of the local parameters onto other outer parameters, with or without their progress.
Must not know: the carrier, the optimizer, residuals, when to exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from edit.codecs import decode
from edit.errors import RemoteProtocolError
from edit.outer import digest
from edit.pseudo_gradient import flatten, load_fragment, pseudo_gradient
from edit.records import Commit, FragmentCommit, Snapshot
from edit.schema import Schema, plan_fragments

__all__ = ["Replica", "verified"]


def verified(snapshot: Snapshot, schema: Schema) -> Snapshot:
    """The snapshot, as it is, if it fits the schema and its digest; else RemoteProtocolError."""
    if [part.numel() for part in snapshot.fragments] != [fragment.numel for fragment in schema.fragments]:
        raise RemoteProtocolError(f"the snapshot of outer step {snapshot.outer_step} does not fit the model's fragments")
    if digest(snapshot.fragments) != snapshot.digest:
        raise RemoteProtocolError(f"the snapshot of outer step {snapshot.outer_step} does not match its digest")
    return snapshot


class Replica:
    """One model under training. Parameters are found by name, so one without a gradient keeps its place (T21)."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.schema = plan_fragments(named.items())
        self._parameters = [[named[tensor.name] for tensor in fragment.tensors] for fragment in self.schema.fragments]
        self._outer = Snapshot(0, "", ())

    @property
    def outer(self) -> Snapshot:
        """theta as of now. Moves replace it and never write into its tensors, so it stays valid for whoever holds it."""
        return self._outer

    def parameters(self, fragment_id: int) -> Sequence[nn.Parameter]:
        """The fragment's parameters in schema order."""
        return self._parameters[fragment_id]

    def local(self) -> list[Tensor]:
        """All local fragments, flat fp32 copies."""
        return [flatten(parameters) for parameters in self._parameters]

    def start(self, snapshot: Snapshot) -> None:
        """Take the run's outer parameters as theta and as the local parameters (T19). Raises RemoteProtocolError."""
        self.move(verified(snapshot, self.schema), lambda _: None)

    def pseudo_gradient(self, fragment_id: int) -> Tensor:
        """theta - local of one fragment."""
        return pseudo_gradient(self._outer.fragments[fragment_id], self._parameters[fragment_id])

    def progress(self, fragment_id: int) -> Tensor:
        """local - theta of one fragment: what a replay puts onto other outer parameters."""
        return self.pseudo_gradient(fragment_id).neg_()

    def progress_since(self, fragment_id: int, origin: Tensor) -> Tensor:
        """local - origin of one fragment, for earlier local parameters."""
        return flatten(self._parameters[fragment_id]).sub_(origin)

    def after(self, commit: Commit) -> Snapshot:
        """theta <- theta - decode(payload) per fragment, with the digest it really has. Changes nothing.

        Raises RemoteProtocolError when the commit does not follow on theta or does not cover the fragments.
        """
        if commit.outer_step != self._outer.outer_step + 1:
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} cannot follow {self._outer.outer_step}")
        if [part.fragment_id for part in commit.fragments] != list(range(len(self._parameters))):
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} does not cover every fragment once, in order")
        fragments = tuple(self._stepped(part) for part in commit.fragments)
        return Snapshot(commit.outer_step, digest(fragments), fragments)

    def _stepped(self, part: FragmentCommit) -> Tensor:
        theta = self._outer.fragments[part.fragment_id]
        if part.payload is None:
            return theta
        if part.payload.numel != theta.numel():
            raise RemoteProtocolError(
                f"update of fragment {part.fragment_id} has {part.payload.numel} elements, not {theta.numel()}"
            )
        step = decode(part.payload)
        return torch.sub(theta, step, out=step)

    def move(self, target: Snapshot, progress: Callable[[int], Tensor | None]) -> None:
        """Make `target` theta; each local fragment becomes theta + progress(i), or theta where that is None or not finite."""
        for i, (theta, parameters) in enumerate(zip(target.fragments, self._parameters, strict=True)):
            moved = progress(i)
            if moved is not None and bool(torch.isfinite(moved).all()):
                load_fragment(moved.add_(theta), parameters)
            else:
                load_fragment(theta, parameters)
        self._outer = target

    def load_outer(self) -> list[Tensor]:
        """Put theta into the model; returns exact copies of the local parameters, in their own dtype, for `restore`."""
        kept = [parameter.detach().clone() for parameters in self._parameters for parameter in parameters]
        for theta, parameters in zip(self._outer.fragments, self._parameters, strict=True):
            load_fragment(theta, parameters)
        return kept

    @torch.no_grad()
    def restore(self, kept: Sequence[Tensor]) -> None:
        """Undo `load_outer`, to the bit."""
        flat = (parameter for parameters in self._parameters for parameter in parameters)
        for parameter, tensor in zip(flat, kept, strict=True):
            parameter.copy_(tensor)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """theta by tensor name, fp32 copies in full shape."""
        state: dict[str, Tensor] = {}
        for theta, fragment in zip(self._outer.fragments, self.schema.fragments, strict=True):
            parts = torch.split(theta, [tensor.numel for tensor in fragment.tensors])
            state.update(
                (tensor.name, part.view(tensor.shape).clone()) for tensor, part in zip(fragment.tensors, parts, strict=True)
            )
        return state
