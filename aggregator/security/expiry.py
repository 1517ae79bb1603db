"""Which certificates end soon, and what the operator is told of them: once when each limit is passed, and in the status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from aggregator.security.authority import Authority
from aggregator.security.members import Members
from editpb.validity import INVITE_OR_SET, Notice, Validity

__all__ = ["ExpiryWatch", "Watched", "watched_files", "watched_members"]

_RUNNING = "a peer that runs renews it by itself: look at its log, or invite the member again"
_RENEWS = "`serve` renews it by itself unless the disk refuses, or the authority ends then"
_EQUIP = "make another with `edit-coordinator new-aggregator` and copy the folder; no restart is needed"
_NEW_RUN = "no certificate outlives it: make a new run"
_WHOSE = {"server.pem": "the certificate of this server", "ca.pem": "the authority of this run"}
_BACKDATED_S = 3600.0


@dataclass(frozen=True, slots=True)
class Watched:
    """One certificate. Its end is told as `<subject> expires in 6 days, on ...; <mend>`."""

    subject: str
    validity: Validity
    mend: str
    peer_id: str = ""  # of the member that has it; empty: it is this aggregator's own


def watched_members(members: Members) -> Iterator[Watched]:
    """Yield the certificates of the members that were not evicted, as far as their ends are known here."""
    for one in members.all():
        if one.evicted is None and one.expires:
            validity = Validity(one.issued - _BACKDATED_S, one.expires)
            yield Watched("its certificate", validity, _RUNNING, one.peer_id)


def watched_files(path: Path, authority: Authority | None) -> Iterator[Watched]:
    """Yield the certificates of an aggregator's folder. authority: None at a further aggregator. Raises OSError, ValueError."""
    mends = {"server.pem": _RENEWS if authority else _EQUIP, "ca.pem": _NEW_RUN}
    for name, mend in mends.items():
        certificate = x509.load_pem_x509_certificate((path / name).read_bytes())
        yield Watched(_WHOSE[name], Validity.of(certificate), mend)


class ExpiryWatch:
    """Remembers what was said of each certificate, so that each notice is given once; a renewed certificate begins anew."""

    def __init__(self) -> None:
        self._said: Mapping[tuple[str, str], tuple[Validity, Notice]] = {}

    def news(self, watched: Iterable[Watched], now: float) -> list[tuple[str, str]]:
        """Return (peer_id, text) of each notice that was not given before. now: unix seconds."""
        said, news = {}, []
        for one in watched:
            notice = one.validity.notice(now)
            said[one.peer_id, one.subject] = one.validity, notice
            if notice is not Notice.NONE and self._said.get((one.peer_id, one.subject)) != (one.validity, notice):
                news.append((one.peer_id, text_of(one, now)))
        self._said = said
        return news


def text_of(one: Watched, now: float) -> str:
    """Return what is said of this certificate."""
    notice = one.validity.notice(now)
    mend = (
        "set the clock" if notice is Notice.NOT_YET else INVITE_OR_SET if one.peer_id and notice is Notice.EXPIRED else one.mend
    )
    return f"{one.subject} {one.validity.text(now)}; {mend}"
