"""How a run gets its first parameters: each peer waits for them, and sends its own where it is asked to found the run.

Owns: abort_on_error every question to found the run once. Must not know: rounds, what the parameters are of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from edit.errors import RefusedError, StaleError, TransportError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from peers.carriers.hub.data_calls import DataPlane, Wanted
from peers.carriers.hub.session import HAS_PARAMETERS, NEVER, Asked, Session
from peers.carriers.rank_agreement import RankAgreement

__all__ = ["found_or_wait"]

_log = logging.getLogger(__name__)


def found_or_wait(
    agreement: RankAgreement,
    session: Session,
    data: DataPlane,
    schema: Schema,
    found: Callable[[], Sequence[Tensor]],
    wanted: Wanted,
) -> None:
    """Until the run has parameters, at every rank. Sends what `found` gives each time this peer is newly asked to."""
    answered = NEVER
    while (asked := agreement.decide(partial(session.founding, answered))) != HAS_PARAMETERS:
        answered = _answer(agreement, partial(_found, data, schema, list(found()), wanted), asked)


def _answer(agreement: RankAgreement, send: Callable[[], Coroutine[Any, Any, None]], asked: Asked) -> Asked:
    try:
        agreement.led(send)
        return asked.settled()
    except (StaleError, TransportError, RefusedError) as error:
        _log.info("founding: %s", error)  # a view will tell who founds the run now
        return asked


def _found(data: DataPlane, schema: Schema, theta: Sequence[Tensor], wanted: Wanted) -> Coroutine[Any, Any, None]:
    return data.found(schema, theta, digest(theta), wanted)
