"""Where a peer's batches come from: files, by the form that their path has, or a plug-in of `edit.data` (docs/plugins.md).

What trains knows `DataSource`. Each form is a function of one `DataRequest`; so is what a plug-in's entry point names, but its
object gives rows of token ids, which are checked here: a type, a shape or an id that cannot be is one line that names it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from blake3 import blake3
from torch import Tensor

from edit import plugins
from edit.config.plugins import PREFIX
from edit.errors import ConfigError, PluginError
from edit.plain_text import parse_json, shallow
from peers.training.data import Batches, open_tokens

__all__ = ["DataRequest", "DataSource", "Rows", "open_data"]

STATE_BYTES = 1 << 16  # of a plug-in's position, as JSON
_MOST_NESTED = 50  # lists and tables in one another, in it
_log = logging.getLogger("peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What a source of data is made from."""

    path: Path | None = None  # of files; None: a plug-in
    jsonl_field: str | None = None  # of files: of each line of a .jsonl file, has the text
    context: int  # tokens that the model sees
    vocabulary: int  # a token id is 0 to vocabulary - 1
    batch_size: int  # rows of a micro-batch
    seed: int  # follows from the run's seed and the peer's name
    peer_id: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # --data-option, of a plug-in


class DataSource(Protocol):
    """Batches without end, and where they are."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both (batch_size, context) int64 on the CPU, targets one token ahead."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the position, and what it is a position in, as values that JSON can hold."""
        ...

    def load(self, state: Mapping[str, Any], *, new_data: bool = False) -> None:
        """Load a position. Raises ConfigError, and changes nothing, when it belongs to other data.

        new_data: if it does, begin at the start of this one instead.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Tells other data from this, for the ranks of a replica."""
        ...


class Rows(Protocol):
    """What a plug-in's entry point gives."""

    def batch(self) -> Tensor:
        """Return the next token ids, int64 [batch_size, context + 1], without end: the last column is only a target."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the position after the last batch, as values that JSON can hold, STATE_BYTES of them at most."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next `batch` is the one that came after this `state`."""
        ...


def open_data(request: DataRequest, plugin: str = "", allowed: frozenset[str] = frozenset()) -> DataSource:
    """Return the data that a request names. plugin: `entry:NAME`, which is called with it; empty: files.

    Raises ConfigError as `peers.training.data.open_tokens`, and where the plug-in is not allowed or not found, PluginError
    where it does not keep its contract, which is tried here.
    """
    found, make = plugins.resolve("data", plugin or "files", allowed)
    if found.built_in:
        own: DataSource = make(request)
        return own
    with plugins.blame(found):
        made = make(request)
    return _Checked(found, made, request).tried()


@plugins.built_in("data", "files")
def _files(request: DataRequest) -> DataSource:
    """The source of every built-in form, see `open_tokens`."""
    assert request.path is not None
    tokens = open_tokens(request.path, context=request.context, vocabulary=request.vocabulary, field=request.jsonl_field)
    return Batches(tokens, request.context, request.batch_size, request.seed)


class _Checked:
    """A plug-in's rows as a `DataSource`."""

    def __init__(self, plugin: plugins.Plugin, made: Any, request: DataRequest) -> None:
        for method in ("batch", "state", "load"):
            if not callable(getattr(made, method, None)):
                raise PluginError(f"{plugin}: gave a {type(made).__name__} without a method {method}")
        self._plugin = plugin
        self._rows: Rows = made
        self._request = request
        self._first = ""

    @property
    def fingerprint(self) -> str:
        return f"{self._plugin} {self._plugin.pin}, first rows {self._first}"

    def tried(self) -> Self:
        """Go on from a position that was left, as a resumed training does; raise PluginError where other rows come."""
        start = self._position()
        first = self._batch()
        between = self._position()
        expected = self._batch()
        self._go(between)
        if not torch.equal(expected, self._batch()):
            raise PluginError(f"{self._plugin}: load: from the same position other rows come; a training could not be resumed")
        self._go(start)
        if not torch.equal(first, self._batch()):
            raise PluginError(f"{self._plugin}: load: the first position does not give the first rows again")
        self._go(start)
        self._first = blake3(first.numpy().tobytes()).hexdigest()[:12]
        return self

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows = self._batch()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state(self) -> dict[str, Any]:
        return {**self._identity(), "position": self._position()}

    def load(self, state: Mapping[str, Any], *, new_data: bool = False) -> None:
        then = {key: state.get(key) for key in self._identity()}
        if then != self._identity():
            if not new_data:
                was = f"{then['plugin']} with {then['options']}" if "plugin" in state else "files"
                raise ConfigError(
                    f"{self._plugin}: the data has changed since the checkpoint ({was} then, now with "
                    f"{dict(self._request.options)}): restore the earlier data; or add --new-data to begin at the start of the "
                    "new data, with the model and the optimizer's state of the checkpoint"
                )
            _log.info("%s: other data than the checkpoint's: from its start", self._plugin)
            return
        position = state.get("position")
        if not isinstance(position, dict):
            raise ConfigError(f"{self._plugin}: saved data position is damaged: {position!r:.200}")
        self._go(position)

    def _identity(self) -> dict[str, Any]:
        return {
            "plugin": f"{PREFIX}{self._plugin.name}",
            "options": dict(self._request.options),
            "seed": self._request.seed,
            "context": self._request.context,
        }

    def _batch(self) -> Tensor:
        shape = (self._request.batch_size, self._request.context + 1)
        with plugins.blame(self._plugin):
            try:
                rows = self._rows.batch()
            except StopIteration:
                raise PluginError("batch: ended; it must begin its data again") from None
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or tuple(rows.shape) != shape or rows.device.type != "cpu":
            is_ = f"{rows.dtype} {list(rows.shape)} on {rows.device}" if isinstance(rows, Tensor) else type(rows).__name__
            raise PluginError(f"{self._plugin}: batch: must be torch.int64 {list(shape)} on the CPU, not {is_}")
        low, high = (int(each) for each in rows.aminmax())
        if low < 0 or high >= self._request.vocabulary:
            raise PluginError(
                f"{self._plugin}: batch: token id {low if low < 0 else high}, model.vocabulary is {self._request.vocabulary}"
            )
        return rows.clone()  # the plug-in may write into its own

    def _position(self) -> dict[str, Any]:
        """Return the plug-in's position as it will come back from a checkpoint."""
        with plugins.blame(self._plugin):
            state = self._rows.state()
        try:
            text = json.dumps(state, allow_nan=False)
            position = shallow(parse_json(text), _MOST_NESTED)  # as it is read from a checkpoint, in which it is nested deeper
        except (TypeError, ValueError, RecursionError) as error:
            raise PluginError(f"{self._plugin}: state: must be values that JSON can hold ({error})") from error
        if not isinstance(state, Mapping) or len(text) > STATE_BYTES:
            what = f"{len(text)} bytes of JSON" if isinstance(state, Mapping) else type(state).__name__
            raise PluginError(f"{self._plugin}: state: must be a mapping of at most {STATE_BYTES} bytes of JSON, not {what}")
        assert isinstance(position, dict)
        return position

    def _go(self, position: dict[str, Any]) -> None:
        with plugins.blame(self._plugin):
            self._rows.load(parse_json(json.dumps(position)))
