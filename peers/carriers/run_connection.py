"""What the daemon and the training loop use of a carrier, whichever it is: a hub today, a swarm later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from edit.collective import Collective
from edit.fragments.schema import Schema
from edit.replica.replica import Outer
from editpb.messages import View

__all__ = ["AggregatorConnection", "Interrupted", "Origin", "RunConnection", "Traffic", "leaving"]


class Interrupted(Exception):
    """A wait was ended by `RunConnection.interrupt`: a signal asks this process to stop."""


@dataclass(slots=True)
class Traffic:
    """Bytes on the data plane since the process started: the lengths of the serialized messages, counted as they pass."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a snapshot came from."""

    outer_step: int
    digest: str
    sources: tuple[str, ...]  # other members by peer_id, or "the aggregator"; none: the peer had all of it


class AggregatorConnection(Collective, Protocol):
    """One rank's connection to one aggregator of the run.

    All ranks of a replica ask for `cut_off` together, so that they get the same answer; everything else each rank may ask by
    itself.
    """

    @property
    def connected(self) -> bool:
        """Whether the aggregator is heard at present."""
        ...

    @property
    def cut_off(self) -> bool:
        """Whether the aggregator has not been heard for longer than two heartbeats."""
        ...

    @property
    def last_view(self) -> View | None:
        """The newest view of the run, also after the connection was lost; None before the first."""
        ...

    @property
    def origin(self) -> Origin | None:
        """Where the last snapshot came from; None before the first."""
        ...


class RunConnection(Protocol):
    """One rank's connections to its run: one `AggregatorConnection` for each aggregator of the run.

    All ranks of a replica call `ended` and `check` together.
    """

    @property
    def peer_id(self) -> str:
        """This peer's identity in the run."""
        ...

    @property
    def shares(self) -> Sequence[AggregatorConnection]:
        """The connections, in the order of the run's aggregators; each is a `Collective` for its aggregator's fragments."""
        ...

    @property
    def reached(self) -> int:
        """See `edit.collective.CompositeCollective`."""
        ...

    @property
    def connected(self) -> bool:
        """Whether every aggregator is heard at present."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the run has finished at every aggregator, at whatever outer step."""
        ...

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes on the data plane."""
        ...

    def prefetch(self) -> None:
        """Begin to fetch the snapshots that joining will return, from a run that has parameters already."""
        ...

    def show(self, outer_of: Callable[[], tuple[Schema, Outer]]) -> None:
        """Offer the outer parameters to members that join, where this peer serves snapshots; return at once.

        outer_of: returns them, to keep by reference until a later call replaces them; called only where they are served.
        """
        ...

    def check(self) -> None:
        """Raise EvictedError or RefusedError when an aggregator has expelled this peer, Interrupted when asked to stop.

        What is raised at one rank is raised at all.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait. Raises Interrupted as soon as this process is asked to stop."""
        ...

    def interrupt(self) -> None:
        """End this rank's present and later waits with Interrupted; safe in a signal handler."""
        ...

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye to every aggregator, within two seconds each, and close the connections.

        reason: for the run's operator.
        """
        ...


class Closable(Protocol):
    """What `leaving` says goodbye on."""

    def close(self, reason: str = ...) -> None:
        """Say goodbye for this reason, and close."""
        ...


_Closable = TypeVar("_Closable", bound=Closable)


@contextmanager
def leaving(connection: _Closable, ended: str = "the run has finished", failed: str = "the peer failed") -> Iterator[_Closable]:
    """Close the connection at the end of the context, and tell the operator why: `ended`, `failed`, or asked to stop."""
    goodbye = failed
    try:
        yield connection
        goodbye = ended
    except Interrupted:
        goodbye = "the peer was asked to stop"
        raise
    finally:
        connection.close(goodbye)
