"""A TCP relay in the test's own process that does something once so many bytes have come back through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

HERE = "127.0.0.2"  # the relay's side; the server listens at the same port of 127.0.0.1


class Tripwire:
    """Context manager. `after`: bytes from the server until `trip` is called and every connection is cut; None: never."""

    def __init__(self, trip: Callable[[], None]) -> None:
        self.after: int | None = None
        self._trip = trip
        self._back = 0
        self._listener = socket.create_server((HERE, 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Tripwire:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self._ends += [near, far]
                for one, other, back in ((near, far, False), (far, near, True)):
                    self._threads.append(threading.Thread(target=self._relay, args=(one, other, back)))
                    self._threads[-1].start()

    def _relay(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                sink.sendall(data)
                self._back += len(data) if back else 0
                if self.after is not None and back and self._back >= self.after:
                    self.after = None
                    self._trip()
                    self._cut()

    def _cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def watch(self, more: int) -> None:
        """Trip after so many more bytes."""
        self._back, self.after = 0, more
