"""A hook that a copy of the model does not take along; and what is put off until a backward is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from edit.errors import ConfigError

__all__ = ["Hook", "after_backward", "in_backward"]


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


def in_backward() -> bool:
    """Whether this thread is in a backward, also in what `after_backward` calls at its end."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None], before: int) -> int:
    """Call `call` at the end of the backward that this thread is in; what it raises comes out of `backward()`.

    If that backward is part of another one, as of a reentrant checkpoint, a ConfigError comes out instead. Returns the number
    of this backward; in the one with the number `before` nothing is done.
    """
    if (number := torch._C._current_graph_task_id()) == before:
        return number

    def at_end() -> None:
        if torch._C._current_autograd_node() is not None:
            raise ConfigError(
                "optimizer.step() in the backward of a reentrant checkpoint, which is within another backward: checkpoint with "
                "use_reentrant=False, or step after the backward"
            )
        call()

    Variable._execution_engine.queue_callback(at_end)
    return number
