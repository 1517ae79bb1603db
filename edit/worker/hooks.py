"""A hook that a copy of the model does not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook"]


class Hook:
    """Calls a worker's method. A copy of it (`copy.deepcopy`, pickle, `torch.save`) calls nothing.

    A model holds its hooks, so a bound method would drag the worker, its connection and its threads into every copy of the
    model: an averaged model, a saved one. Where they can be copied at all, the copy would take part in the run.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
