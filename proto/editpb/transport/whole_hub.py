"""How a whole run of a coordinator and further aggregators stands: each has its share of the model, and is asked for it.

The coordinator goes before: members that it does not name are left out, and without it there is no status. A further aggregator
that does not answer is named, and what it said last stays. The operator knows the further ones from run.toml. Another member is
told by the coordinator, and talks only to whom the run's authority has given a certificate for that address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from edit.errors import EditError, RemoteProtocolError, TransportError
from edit.plain_text import parse_json
from editpb.invitation import is_endpoint
from editpb.run_status import RunStatus
from editpb.whole_run import continued, whole_run

__all__ = ["HubWatch", "further_aggregators", "whole_hub"]

FIRST_S = 10.0  # for how long the first answers of the further aggregators, connections included, are waited for
AGAIN_S = 1.0  # after one did not answer
MOST_FURTHER = 255  # as aggregators.addresses may have
Statuses = Callable[[], AsyncGenerator[RunStatus, None]]


def further_aggregators(coordinator: RunStatus) -> tuple[str, ...]:
    """Return HOST:PORT of the further aggregators, as the coordinator's settings say. Raises RemoteProtocolError."""
    value = next((each.value for each in coordinator.settings if each.name == "aggregators.addresses"), "[]")
    try:
        addresses = parse_json(value)
    except ValueError:
        addresses = None
    if (
        not isinstance(addresses, list)
        or len(addresses) > MOST_FURTHER
        or not all(isinstance(each, str) and is_endpoint(each) for each in addresses)
    ):
        raise RemoteProtocolError(f"the coordinator's aggregators.addresses are not at most {MOST_FURTHER} of HOST:PORT")
    return tuple(addresses)


def whole_hub(coordinator: RunStatus, further: Sequence[RunStatus | None], troubles: Sequence[str] = ()) -> RunStatus:
    """Return the status of the whole run.

    Args:
        coordinator: what it says of its own share.
        further: what each further aggregator says; None: nothing yet.
        troubles: why some do not answer.
    """
    names = {member.peer_id for member in coordinator.members}
    told = [each if each is not None and each.run_id == coordinator.run_id else None for each in further]
    merged = whole_run([coordinator, *told], members=names)
    assert merged is not None, "the coordinator has answered"
    return replace(
        merged,
        outer_steps=coordinator.outer_steps,
        t=coordinator.t,
        settings=coordinator.settings,
        reason="; ".join(filter(None, (*troubles, merged.reason))),
    )


class HubWatch:
    """Watches all aggregators of a run.

    Args:
        coordinator: gives its statuses as they come; its errors end the watch.
        further: given the coordinator's first status, returns what likewise gives those of each further aggregator, from 1 on;
            their errors are told in the status, and they are asked again.
    """

    def __init__(self, coordinator: Statuses, further: Callable[[RunStatus], Sequence[Statuses]]) -> None:
        self._coordinator, self._sources = coordinator, further
        self._further: list[RunStatus | None] = []
        self._troubles: dict[int, str] = {}  # why nothing newer comes, by index
        self._told = asyncio.Event()

    async def statuses(self) -> AsyncGenerator[RunStatus, None]:
        """Yield how the whole run stands, whenever the coordinator says how its share does, until it ends the call."""
        tasks: list[asyncio.Task[None]] | None = None
        try:
            async with aclosing(self._coordinator()) as told:
                async for status in told:
                    if tasks is None:
                        sources = self._sources(status)
                        self._further, self._troubles = [None] * len(sources), {}
                        tasks = [asyncio.create_task(self._follow(i, source)) for i, source in enumerate(sources)]
                        await self._first_answers()
                    yield whole_hub(status, self._further, self._said(self._troubles)) if tasks else status
        finally:
            for task in tasks or ():
                task.cancel()
            await asyncio.gather(*(tasks or ()), return_exceptions=True)

    def _said(self, troubles: Mapping[int, str]) -> list[str]:
        """Return the troubles of those that had not finished: an aggregator ends with its run."""
        ended = {i for i, each in enumerate(self._further) if each is not None and each.phase == "finished"}
        return [why for i, why in sorted(troubles.items()) if i not in ended]

    async def _first_answers(self) -> None:
        try:
            async with asyncio.timeout(FIRST_S):
                while any(each is None and i not in self._troubles for i, each in enumerate(self._further)):
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            for i, each in enumerate(self._further):
                if each is None:
                    self._troubles.setdefault(i, f"aggregator {i + 1} has not answered yet")

    async def _follow(self, index: int, source: Statuses) -> None:
        while True:
            try:
                before = self._further[index]
                async with aclosing(source()) as told:
                    async for status in told:
                        self._further[index] = continued(before, status)
                        self._troubles.pop(index, None)
                        self._told.set()
                raise TransportError(f"aggregator {index + 1} has ended the connection")
            except EditError as error:
                self._troubles[index] = str(error)
                self._told.set()
            await asyncio.sleep(AGAIN_S)
