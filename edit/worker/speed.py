"""Loss and speed of a peer's last inner steps, and how long they took it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, median

from torch import Tensor

from edit.errors import ConfigError
from edit.plain_text import printable
from edit.records import MAX_METRIC_CHARS, MAX_METRICS

__all__ = ["Speed", "Stopwatch"]

WINDOW = 20  # inner steps


class Speed:
    """The mean of the finite losses and the median seconds of the last WINDOW inner steps; the metrics reported last."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens: deque[int] = deque(maxlen=WINDOW)
        self._unread: Tensor | None = None
        self._uncounted = 0
        self._metrics: dict[str, float] = {}
        self._tensors: dict[str, Tensor] = {}  # metrics of the inner step now taken
        self._tensors_before: dict[str, Tensor] = {}  # of the one before, to be read

    def add_metrics(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Take these in place of earlier ones of the same name. A tensor is read one inner step later.

        Raises ConfigError, and takes none, where one cannot be sent: a name that is empty, too long or not printable, more
        names than MAX_METRICS, a tensor of several elements.
        """
        for name, value in metrics.items():
            if not (name and name.isprintable() and len(name) <= MAX_METRIC_CHARS):
                raise ConfigError(f"metric {printable(name[:80])!r}: must have 1 to {MAX_METRIC_CHARS} printable characters")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(f"metric {name!r}: must be one number, not {value.numel()}")
        known = self._metrics.keys() | self._tensors_before.keys() | self._tensors.keys() | metrics.keys()
        if len(known) > MAX_METRICS:
            raise ConfigError(f"{len(known)} metrics: must be at most {MAX_METRICS}; report fewer names")
        for name, value in metrics.items():
            self._tensors.pop(name, None)
            self._tensors_before.pop(name, None)
            if isinstance(value, Tensor):
                self._tensors[name] = _kept(value)
            else:
                self._metrics[name] = float(value)

    def add_loss(self, loss: float | Tensor) -> None:
        """Add the loss of one inner step. A tensor is read with the next one, so that nothing waits for the device now.

        Raises ConfigError for a tensor of several elements.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ConfigError(f"loss: must be one number, not {loss.numel()}; report its mean")
        if self._unread is not None:
            self._losses.append(float(self._unread))
        self._unread = _kept(loss) if isinstance(loss, Tensor) else None
        if not isinstance(loss, Tensor):
            self._losses.append(float(loss))

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens of the inner step now taken."""
        self._uncounted += tokens

    @property
    def tokens(self) -> int:
        """Those of the inner step now taken, so far."""
        return self._uncounted

    def add_step(self, seconds: float | None) -> None:
        """An inner step was taken. seconds: that it took; None: not known."""
        self._tokens.append(self._uncounted)
        self._uncounted = 0
        self._metrics.update((name, float(value)) for name, value in self._tensors_before.items())
        self._tensors_before, self._tensors = self._tensors, {}
        if seconds is not None:
            self._seconds.append(seconds)

    @property
    def metrics(self) -> dict[str, float]:
        """Those that are finite, by name."""
        return {name: value for name, value in self._metrics.items() if math.isfinite(value)}

    @property
    def loss(self) -> float:
        """NaN when none is finite."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def step_s(self) -> float:
        """Seconds per inner step; 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the whole replica; 0 before the first step."""
        return fmean(self._tokens) / self.step_s if self._tokens and self.step_s > 0 else 0.0


def _kept(value: Tensor) -> Tensor:
    """Return a copy: a CUDA graph (torch.compile's reduce-overhead) or a loop that adds up in place writes there again."""
    return value.detach().clone()


class Stopwatch:
    """Seconds from lap to lap, without those in `paused`. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._paused_s = 0.0
        self.all_paused_s = 0.0  # since the beginning

    def lap(self) -> float | None:
        """Return the seconds since the last lap; None for the first."""
        now, begun, paused_s = self._clock(), self._begun, self._paused_s
        self._begun, self._paused_s = now, 0.0
        return None if begun is None else now - begun - paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done inside."""
        begun = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - begun
            self._paused_s += took_s
            self.all_paused_s += took_s
