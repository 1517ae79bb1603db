"""Curves of other runs beside those of one: of each kind one line for a run, the mean of its peers where each has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edit.errors import ConfigError, TransportError
from editpb.run_status import SHARES, Curve, RunStatus

__all__ = ["HANDED_ON", "MOST_BESIDE", "mean", "overlaid", "read_beside"]

MOST_BESIDE = 8  # runs
HANDED_ON = Path("/dev/fd")  # below it: how a run stands, as JSON, in a file that another process has opened
_SEVERAL = {"bytes_in": " received", "bytes_out": " sent", **{kind: f" {kind}" for kind in SHARES}}  # drawn together


def read_beside(paths: Sequence[Path], read: Callable[[Path], RunStatus]) -> dict[str, RunStatus]:
    """Return how other runs stand, by the name that their lines have.

    Raises ConfigError for more than can be told apart, and what `read` raises; a TransportError names the folder.
    """
    if len(paths) > MOST_BESIDE:
        raise ConfigError(f"--beside: at most {MOST_BESIDE} runs can be told apart")
    found: dict[str, RunStatus] = {}
    for path in paths:
        try:
            run = read(path)
        except TransportError as error:
            raise TransportError(f"--beside {path}: {error}") from error
        same = sum(each.run_id == run.run_id for each in found.values())
        found[f"run {run.run_id}{f' ({same + 1})' if same else ''}"] = run
    return found


def overlaid(status: RunStatus, others: Mapping[str, RunStatus]) -> RunStatus:
    """Return a status with the curves of other runs, by the name that their lines have; its own curves stay."""
    found = list(status.curves)
    for name, other in others.items():
        for kind in dict.fromkeys(curve.kind for curve in other.curves):
            curves = [curve for curve in other.curves if curve.kind == kind and curve.x]
            whole = [curve for curve in curves if not curve.peer_id]
            if curve := whole[0] if whole else mean(curves):
                found.append(replace(curve, peer_id=f"{name}{_SEVERAL.get(kind, '')}"))
    return replace(status, curves=tuple(found))


def mean(curves: Sequence[Curve]) -> Curve | None:
    """Return the mean of curves of one kind where all of them are, straight between their points; None: that is nowhere."""
    if not curves:
        return None
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    places = sorted({x for curve in curves for x in curve.x if first <= x <= last})
    if not places:
        return None
    points = [[curve.at(x) for curve in curves] for x in places]
    y = [math.fsum(y for _, y in each) / len(curves) for each in points]
    t = [max(t for t, _ in each) for each in points]
    return Curve(kind=curves[0].kind, x=tuple(places), t=tuple(t), y=tuple(y))
