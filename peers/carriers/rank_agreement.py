"""What the ranks of one replica decide together, so that they never disagree: rank 0's word, and what all must have.

Owns: the waits of the main thread in which the ranks talk to each other. They are cut in slices, so that a rank that is asked
to stop, or that the coordinator has expelled, ends all of them at the same point, and so that no wait outlasts the patience of
torch.distributed. Every method is called by all ranks, in the same order. Must not know: rounds, streams, tensors.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from edit.errors import RemoteProtocolError, StaleError, TransportError
from edit.replica.ranks import Ranks
from peers.carriers.io_thread import SLICE_S, IoThread

__all__ = ["RankAgreement", "worst_error"]

_T = TypeVar("_T")


class RankAgreement:
    """`trouble`: why this rank can take no further part, or None; whatever it is, every rank raises it.

    With one rank the same calls need no communication.
    """

    def __init__(self, bridge: IoThread, ranks: Ranks, trouble: Callable[[], BaseException | None]) -> None:
        self._bridge = bridge
        self._ranks = ranks
        self._trouble = trouble

    def decide(self, look: Callable[[], _T | None]) -> _T:
        """Wait until `look` gives rank 0 a value (see `IoThread.wait`), and hand it to every rank. So with its exceptions."""
        while (answer := self.soon(look)) is None:
            pass
        return answer

    def soon(self, look: Callable[[], _T | None]) -> _T | None:
        """As `decide`, but after a slice without a value None."""
        answer = self._ranks.lead(lambda: self._bridge.wait(look, timeout=SLICE_S))
        self.check()
        return answer

    def rest(self, look: Callable[[], object | None]) -> None:
        """Let a slice pass, or as much of it as it takes until `look` gives rank 0 a value."""
        self.soon(lambda: look() is not None or None)

    def ask(self, look: Callable[[], _T]) -> _T:
        """What `look` gives rank 0 at present, at every rank. So with its exceptions."""
        answer = self._ranks.lead(lambda: self._bridge.read(look))
        self.check()
        return answer

    def flag(self, look: Callable[[], bool]) -> bool:
        """As `ask`, for yes or no: cheap enough for every inner step."""
        answer = self._bridge.read(look) if self._ranks.leads else True
        return self._ranks.all([answer])[0]

    def together(self, own: Coroutine[Any, Any, _T]) -> _T:
        """Run `own` on the loop at every rank, and return its result once all ranks have theirs.

        When one fails, the others are cancelled and all raise the same: the error that most ends what they were at.
        """
        future = self._bridge.begin(own)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=SLICE_S)
                error = future.exception() if done else None
                everyone, fine, calm = self._ranks.all([bool(done), error is None, self._trouble() is None])
                if not calm:
                    self.check()
                if not fine:
                    raise worst_error(self._ranks.collect(error))
                if everyone:
                    return future.result()
        finally:
            future.cancel()

    def led(self, own: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run `own` on rank 0's loop; its result, or its exception, at every rank."""
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
    """Of the ranks' errors the one that ends most: a broken link may mend, stale or damaged bytes need another
    way, anything else is final."""
    known = [error for error in errors if error is not None]
    return max(
        known, key=lambda e: 0 if isinstance(e, TransportError) else 1 if isinstance(e, StaleError | RemoteProtocolError) else 2
    )
