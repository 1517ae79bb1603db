"""The signature of what a scorer says of the contributions to a commit, in a run whose contributions are signed.

The statement ("edit-scores-v1") has the run, the scorer, the outer step that the commit led to, and each peer with its score,
sorted by peer; a score as the hexadecimal text of a float. The key of the scorer's certificate signs it.
"""

from __future__ import annotations

from dataclasses import replace

from edit.errors import RemoteProtocolError
from edit.trust.signatures import Signer, is_signed, statement
from editpb.messages import ScoreReport

__all__ = ["ScoreSigner", "check_scores"]

_PURPOSE = "edit-scores-v1"


class ScoreSigner:
    """Signs the reports of one scorer. pem: the private key of its certificate. Raises ConfigError where it cannot be used."""

    def __init__(self, pem: bytes, scorer: str) -> None:
        self._signer, self._scorer = Signer(pem), scorer

    def __call__(self, report: ScoreReport) -> ScoreReport:
        """Return the report with key and signature."""
        signature = self._signer.sign(_statement(report, self._scorer))
        return replace(report, public_key=self._signer.public_key, signature=signature)


def check_scores(report: ScoreReport, scorer: str) -> None:
    """Raise RemoteProtocolError unless the report is signed as this scorer's, with the key that it names."""
    if not report.signature:
        raise RemoteProtocolError(f"the scores of {scorer} are not signed, which the run asks for")
    if not is_signed(report.public_key, report.signature, _statement(report, scorer)):
        raise RemoteProtocolError(f"the scores of {scorer} are not signed with the key that they name")


def _statement(report: ScoreReport, scorer: str) -> bytes:
    each = (part for peer, score in sorted(report.scores.items()) for part in (peer, float(score).hex()))
    return statement(_PURPOSE, (report.run_id, scorer, report.outer_step, *each))
