"""Which models the coordinator knows by their hash, and how it learns another: off the event loop, one per peer at a time.

Peers announce the hash alone. The schema behind it is asked for when nobody here has it. Of a schema that the run cannot take,
only as much is decoded as names the first difference.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from aggregator.control.attendance import Attendances
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError, RemoteProtocolError
from edit.fragments.assignment import assign
from edit.fragments.gpt import gpt_schema
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.merging.private import noise_line
from editpb.tensor_messages import schema_from_bytes

__all__ = ["Schemas", "builtin_schema", "check_founded", "physical_memory_bytes"]


def physical_memory_bytes() -> int:
    """Return how much memory this machine, or the container that this process runs in, has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def builtin_schema(config: RunConfig, aggregator: int = 0) -> Schema | None:
    """Return the schema that a run of a built-in model must have at this aggregator; None: the founder says what it is.

    Raises ConfigError when there are more aggregators than fragments.
    """
    model, aggregators = config.model, 1 + len(config.aggregators.addresses)
    if model.name != "builtin:gpt":
        return None
    schema = gpt_schema(layers=model.layers, width=model.width, vocabulary=model.vocabulary)
    return schema.subset(assign(schema, aggregators)[aggregator]) if aggregators > 1 else schema


def check_founded(config: RunConfig, aggregator: int, founded: Schema) -> None:
    """Raise ConfigError where a run was founded with another model than its settings now say.

    founded: the schema of its parameters at this aggregator.
    """
    now, model = builtin_schema(config, aggregator), config.model
    if now is not None and (difference := founded.first_difference(now, "a new peer")) is not None:
        raise ConfigError(
            f"model.layers = {model.layers}, model.width = {model.width}, model.vocabulary = {model.vocabulary}: the run's "
            f"parameters were made with another [model] or other aggregators.addresses ({difference}); set these back, or "
            "begin a new run"
        )


class Schemas:
    """The models that peers may announce.

    Args:
        background: its worker thread decodes.
        attendances: whose models are known.
        required: the model that every peer must have; None: any.
        memory_bytes: a model whose parameters and momentum do not fit in is refused; None: what this machine has.
    """

    def __init__(
        self,
        config: RunConfig,
        background: Background,
        attendances: Attendances,
        required: Callable[[], Schema | None],
        memory_bytes: int | None = None,
    ) -> None:
        self._config, self._background, self._attendances, self._required = config, background, attendances, required
        self._model = config.model.name
        self._memory_bytes = physical_memory_bytes() if memory_bytes is None else memory_bytes
        self._learning: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by peer_id, all of them members

    def known(self, schema_hash: str) -> Schema | None:
        """Return the schema with this hash, or None: it must be learned."""
        if (required := self._required()) is not None:
            return required if required.schema_hash == schema_hash else None
        held = (attendance.schema for attendance in self._attendances)
        return next((schema for schema in held if schema.schema_hash == schema_hash), None)

    async def learn(self, peer_id: str, schema_hash: str, data: bytes) -> Schema:
        """Return the schema that a peer sent for the hash it announced.

        Raises RefusedError when the run cannot take it, RemoteProtocolError when it is not what was announced.
        """
        async with self._learning[peer_id]:
            if (schema := self.known(schema_hash)) is not None:  # meanwhile, from another rank
                return schema
            return await self._background.in_worker(self._decode, schema_hash, data, self._required())

    async def differences(self, schema: Schema, others: Iterable[Schema]) -> dict[str, str]:
        """Return the first difference of each other model in words, by schema_hash."""

        def work() -> dict[str, str]:
            return {other.schema_hash: schema.first_difference(other) or "" for other in others}

        return await self._background.in_worker(work)

    def _decode(self, schema_hash: str, data: bytes, required: Schema | None) -> Schema:
        """In the worker thread."""
        if required is not None:
            enough = 1 + sum(len(fragment.tensors) for fragment in required.fragments)
            difference = required.first_difference(schema_from_bytes(data, enough))
            if not difference:
                raise _not_announced()
            hint = (
                f' (run.toml says {self._model}; a model of your own is "entry:NAME")'
                if self._model.startswith("builtin:")
                else ""
            )
            raise RefusedError(f"another model: {difference}{hint}")
        schema = schema_from_bytes(data)
        if schema.schema_hash != schema_hash:
            raise _not_announced()
        if (needed := 2 * 4 * schema.numel) > self._memory_bytes:
            have = f"this machine has {self._memory_bytes / 1e9:.3g} GB"
            raise RefusedError(f"a model of {schema.numel} parameters needs {needed / 1e9:.3g} GB with its momentum; {have}")
        try:
            sync = self._config.sync
            fragments_due(0, len(schema.fragments), sync.groups, sync.pattern)
            if self._config.privacy.of_organisations:
                noise_line(self._config, schema)
        except ConfigError as error:
            raise RefusedError(str(error)) from error
        return schema


def _not_announced() -> RemoteProtocolError:
    return RemoteProtocolError("the schema does not have the schema_hash that Hello announced")
