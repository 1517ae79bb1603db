"""From when to when a certificate is valid: when it is renewed, when somebody is warned, and what a wrong clock looks like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum

from cryptography import x509

__all__ = ["INVITE_OR_SET", "SOON_S", "VERY_SOON_S", "Notice", "Validity", "duration", "over"]

DAY_S = 86_400.0
RENEW_AT = 2 / 3  # of its life a certificate is due for renewal
SOON_S, VERY_SOON_S = 30 * DAY_S, 7 * DAY_S  # before the end somebody is warned
INVITE_OR_SET = "invite the member again, or set that clock if it is wrong"  # what helps once it has expired


class Notice(IntEnum):
    """What is to be said of a certificate; each is said once."""

    NONE = 0
    SOON = 1  # it expires within 30 days: it should have been renewed long ago
    VERY_SOON = 2  # within 7 days
    EXPIRED = 3
    NOT_YET = 4  # it is not valid yet: a clock is wrong


@dataclass(frozen=True, slots=True)
class Validity:
    """Both ends in seconds since 1970."""

    begins: float
    ends: float

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Validity:
        """Return what the certificate says."""
        return cls(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())

    def renewal_due(self, now: float) -> bool:
        """Return whether two thirds of its life are over: with a life of a year, four months before the end."""
        return now >= self.begins + RENEW_AT * (self.ends - self.begins)

    def notice(self, now: float) -> Notice:
        """Return what is to be said at `now`, by the clock of this machine."""
        if now < self.begins:
            return Notice.NOT_YET
        left = self.ends - now
        if left <= 0:
            return Notice.EXPIRED
        return Notice.VERY_SOON if left <= VERY_SOON_S else Notice.SOON if left <= SOON_S else Notice.NONE

    def text(self, now: float, clock: str = "this machine's clock") -> str:
        """Return the notice as the rest of a sentence: `expires in 6 days, on 2026-11-28 10:00 UTC`.

        clock: whose time `now` is, for a reader on another machine.
        """
        match self.notice(now):
            case Notice.NOT_YET:
                behind = duration(self.begins - now)
                return f"is valid from {_day(self.begins)} on: {clock} is at least {behind} behind"
            case Notice.EXPIRED:
                return f"expired on {_day(self.ends)}, {duration(now - self.ends)} ago by {clock}"
        return f"expires in {duration(self.ends - now)}, on {_day(self.ends)}"

    def too_early(self, present: Validity, now: float, clock: str) -> str | None:
        """Return why a new certificate, of which this is, must not replace the present one yet; None: it may.

        One that is not valid yet would shut its owner out, while the present one is valid. clock: by which it was dated.
        """
        return None if present.notice(now) in (Notice.EXPIRED, Notice.NOT_YET) else self.not_yet(now, clock)

    def not_yet(self, now: float, clock: str) -> str | None:
        """Return that a new certificate, of which this is, is not valid yet; None: it is. clock: by which it was dated."""
        if self.notice(now) is not Notice.NOT_YET:
            return None
        return f"the new certificate is valid from {_day(self.begins)} on: {clock}, or this machine's, is wrong"


def over(peer_id: str, ends: float, now: float, clock: str) -> str:
    """Return that a member's certificate has ended, for whoever is refused or reads of it elsewhere, and what helps.

    ends, now: seconds since 1970. clock: whose time `now` is, such as "the aggregator's clock": it may be wrong.
    """
    return f"the certificate of {peer_id} {Validity(-math.inf, ends).text(now, clock)}; {INVITE_OR_SET}"


def duration(seconds: float) -> str:
    """Return a duration for people, rounded down: `40 min`, `5 h`, `6 days`."""
    if seconds < 2 * 3600:
        return f"{int(seconds // 60)} min"
    return f"{int(seconds // 3600)} h" if seconds < 2 * DAY_S else f"{int(seconds // DAY_S)} days"


def _day(unix: float) -> str:
    return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M} UTC"
