"""The log as a subscriber of the run's feed: one line for each event that an operator wants to read."""

from __future__ import annotations

import logging

from aggregator.run_feed import (
    Advised,
    ContributionRefused,
    MemberChanged,
    MemberEnrolled,
    OrderGiven,
    PeerFaulted,
    RankLost,
    ResyncChanged,
    RoundReport,
    RunEnded,
    RunEvent,
    RunFounded,
)

__all__ = ["log_event"]

_log = logging.getLogger(__name__)


def log_event(event: RunEvent, unix: float) -> None:
    """Log the event, if it is one to be read; logging has a clock of its own."""
    match event:
        case MemberEnrolled(peer_id, role):
            _log.info("%s enrolled as %s", peer_id, role)
        case MemberChanged(peer_id, state, reason, live=False):
            _log.info("%s: %s (%s)", peer_id, state, reason)
        case RankLost(peer_id, reason):
            _log.info("%s: lost to the round (%s)", peer_id, reason)
        case ResyncChanged(peer_id, reason):
            _log.warning("%s: %s", peer_id, reason or "resynced")
        case RunFounded(peer_id, parameters, fragments):
            _log.info("%s founded the run: %d parameters in %d fragments", peer_id, parameters, fragments)
        case ContributionRefused(peer_id, reason):
            _log.info("%s: its contribution is refused: %s", peer_id, reason)
        case PeerFaulted(peer_id, _, reason):
            _log.warning("%s: %s", peer_id, reason)
        case RoundReport():
            result = "committed" if event.committed else "aborted"
            _log.info("round %d %s: %s (%.2f s)", event.round_id, result, event.reason, event.seconds)
        case RunEnded(outer_step, tokens):
            _log.info("finished at outer step %d, %d tokens", outer_step, tokens)
        case OrderGiven(order, "", _):
            _log.info("the operator %s the run", order)
        case Advised(peer_id, advice):
            _log.warning("%s", f"{peer_id}: {advice}" if peer_id else advice)
