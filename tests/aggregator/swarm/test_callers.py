"""Whom the record of a swarm shuts out, by name, key and authority: it has a row for nobody but members."""

from __future__ import annotations

from dataclasses import replace

from cryptography import x509

from aggregator.security.certificates import Issuer, make_ca, new_key, public_hash
from aggregator.swarm.admission import root_of
from aggregator.swarm.callers import why_outside
from edit.council.record import Enrolled, Member, Part, Record, Root
from editpb.identity import Identity, from_certificate

NOW, RUN, NUMBER = 1_800_000_000.0, "run-0123abcd", "0" * 32
FIRST, SECOND = (Issuer(*make_ca(RUN, NOW)) for _ in range(2))
REPLACED = "the authority that signed it was replaced"


def issued(name: str, role: str, issuer: Issuer = FIRST) -> x509.Certificate:
    return issuer.issue(Identity(RUN, role, name), new_key().public_key(), lifetime_s=3600, now=NOW)


ANN, EYE = issued("ann", "peer"), issued("eye", "observer")
RECORD = Record(
    run_id=RUN,
    lineage=1,
    term=1,
    version=1,
    members={"ann": Member(incarnation=1)},
    voters=("ann#1",),
    parts=(Part(owner="ann", grant=1, outer_step=0, digest="0" * 64),),
    enrolled={
        "ann": Enrolled(NUMBER, public_hash(ANN)),
        "eye": Enrolled(NUMBER, public_hash(EYE), observer=True),
    },
    roots=(root_of(FIRST.certificate),),
)


def why(record: Record, certificate: x509.Certificate) -> str | None:
    return why_outside(record, from_certificate(certificate), certificate)


def test_who_was_evicted_has_another_key_or_was_never_enrolled_is_outside() -> None:
    operator = issued("operator", "operator")
    assert [why(RECORD, each) for each in (ANN, EYE, operator)] == [None] * 3
    for name, role in (("ann", "peer"), ("eye", "observer"), ("ann", "region")):
        assert "was enrolled again, with another key" in (why(RECORD, issued(name, role)) or "")
    assert why(RECORD, issued("zoe", "peer")) == "zoe is not enrolled, whoever signed its certificate"
    out = replace(RECORD, evicted={"eye": "looked too long", "ann": "lied"}, members={}, enrolled={})
    assert (why(out, EYE), why(out, ANN), why(out, operator)) == ("looked too long", "lied", None)


def test_operators_and_observers_of_an_authority_that_was_replaced_are_outside_and_peers_are_not() -> None:
    after = replace(RECORD, roots=(root_of(FIRST.certificate), root_of(SECOND.certificate)))
    assert [why(after, each) for each in (ANN, EYE, issued("operator", "operator"))] == [None, REPLACED, REPLACED]
    assert why(after, issued("operator", "operator", SECOND)) is None
    damaged = replace(RECORD, roots=(Root("AAAA"),))
    assert why(damaged, EYE) == "the certificate of the run's authority cannot be read"


def test_without_an_authority_in_the_record_its_names_decide() -> None:
    before = replace(RECORD, roots=(), enrolled={}, evicted={"eye": "looked too long"})
    assert [why(before, each) for each in (ANN, EYE, issued("zoe", "peer"))] == [None, "looked too long", None]
