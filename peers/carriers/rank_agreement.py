"""What the ranks of one replica decide together, so that they never disagree.

Every method is called by all ranks, in the same order; with one rank none of them communicates. Waits are cut into slices of
`SLICE_S`. So a rank that is asked to stop, or that the coordinator has expelled, ends the wait of all ranks at the same point,
and no wait outlasts the timeout of torch.distributed.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from edit.errors import OutdatedError, RemoteProtocolError, TransportError
from edit.replica.ranks import Ranks
from peers.carriers.io_thread import SLICE_S, IoThread

__all__ = ["RankAgreement", "worst_error"]

_T = TypeVar("_T")


class RankAgreement:
    """Rank 0's decisions and every rank's transfers, with the same result or the same exception at all ranks.

    Args:
        io: this rank's I/O thread.
        ranks: the ranks of the replica.
        trouble: returns why this rank cannot go on, or None. Every rank raises it.
    """

    def __init__(self, io: IoThread, ranks: Ranks, trouble: Callable[[], BaseException | None]) -> None:
        self._io = io
        self._ranks = ranks
        self._trouble = trouble

    def decide(self, look: Callable[[], _T | None]) -> _T:
        """Wait until `look` gives rank 0 a value (see `IoThread.wait`) and return it at every rank."""
        while (answer := self.poll(look)) is None:
            pass
        return answer

    def poll(self, look: Callable[[], _T | None]) -> _T | None:
        """As `decide`, but return None after a slice without a value."""
        answer = self._ranks.lead(lambda: self._io.wait(look, timeout=SLICE_S))
        self.check()
        return answer

    def pause(self, look: Callable[[], object | None]) -> None:
        """Wait one slice, or until `look` gives rank 0 a value, if that is sooner."""
        self.poll(lambda: look() is not None or None)

    def ask(self, look: Callable[[], _T]) -> _T:
        """Return what `look` gives rank 0 now, at every rank."""
        answer = self._ranks.lead(lambda: self._io.read(look))
        self.check()
        return answer

    def flag(self, look: Callable[[], bool]) -> bool:
        """As `ask`, for a yes or no: cheap enough for every inner step."""
        answer = self._io.read(look) if self._ranks.leads else True
        return self._ranks.all([answer])[0]

    def together(self, own: Coroutine[Any, Any, _T]) -> _T:
        """Run `own` on the loop of every rank; return its result once all ranks have theirs.

        When one rank fails, the others are cancelled, and all ranks raise the `worst_error`.
        """
        future = self._io.begin(own)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=SLICE_S)
                error = future.exception() if done else None
                all_done, no_error, no_trouble = self._ranks.all([bool(done), error is None, self._trouble() is None])
                if not no_trouble:
                    self.check()
                if not no_error:
                    raise worst_error(self._ranks.collect(error))
                if all_done:
                    return future.result()
        finally:
            future.cancel()

    def on_leader(self, own: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run `own` on rank 0's loop; return its result, or raise its exception, at every rank."""
        result = self.together(own() if self._ranks.leads else _nothing())
        return self._ranks.lead(lambda: result)  # type: ignore[return-value]

    def check(self) -> None:
        """Raise the trouble of the lowest rank that has any, at every rank."""
        trouble = self._trouble()
        if not self._ranks.all([trouble is None])[0]:
            raise next(each for each in self._ranks.collect(trouble) if each is not None)


async def _nothing() -> None:
    return None


def worst_error(errors: Sequence[BaseException | None]) -> BaseException:
    """Return the most final of the ranks' errors.

    A broken link may mend (TransportError); outdated or damaged bytes need another source (OutdatedError,
    RemoteProtocolError); any other error is final.
    """
    known = [error for error in errors if error is not None]
    return max(
        known,
        key=lambda e: 0 if isinstance(e, TransportError) else 1 if isinstance(e, OutdatedError | RemoteProtocolError) else 2,
    )
