"""What a regional aggregator says and hears survives the wire; whatever does not fit is refused in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from edit.errors import RemoteProtocolError
from edit.merging.injection import Injected
from editpb import data_pb2 as dpb
from editpb.injection_messages import inject_header_from_pb, inject_header_to_pb, injection_state_from_pb, injection_state_to_pb
from editpb.messages import InjectHeader, InjectionState, RunPhase
from tests.support.wire import DIGEST, RUN, SCHEMA

HEADER = InjectHeader(
    run_id=RUN,
    schema_hash=DIGEST,
    brings=Injected("above", 5, 17),
    base=Injected("above", 4, 13),
    replaces=False,
    fragments=(0, 1),
    digest=DIGEST,
)
STATE = InjectionState(
    outer_step=18, phase=RunPhase.COLLECTING, tokens=4096, injected=Injected("above", 4, 13), accepted=Injected("above", 5, 17)
)


@pytest.mark.parametrize("header", [HEADER, dataclasses.replace(HEADER, base=None, replaces=True, fragments=())])
def test_a_header_comes_through(header: InjectHeader) -> None:
    sent = dpb.InjectHeader.FromString(inject_header_to_pb(header).SerializeToString())
    assert inject_header_from_pb(sent, SCHEMA) == header


@pytest.mark.parametrize("state", [STATE, dataclasses.replace(STATE, injected=None, accepted=None, phase=RunPhase.FINISHED)])
def test_the_state_comes_through(state: InjectionState) -> None:
    sent = dpb.InjectionState.FromString(injection_state_to_pb(state).SerializeToString())
    assert injection_state_from_pb(sent) == state


def change(alter: Callable[[dpb.InjectHeader], object]) -> dpb.InjectHeader:
    message = inject_header_to_pb(HEADER)
    alter(message)
    return message


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda m: m.ClearField("brings"), "must say what it brings"),
        (lambda m: m.fragments.extend([0]), "more than"),
        (lambda m: m.fragments.reverse(), "must ascend"),
        (lambda m: m.fragments.__setitem__(1, 99), "fragment_id is 99"),
        (lambda m: setattr(m, "digest", "ab"), "digest"),
        (lambda m: setattr(m.brings, "upper_step", 1 << 60), "upper_step"),
        (lambda m: setattr(m.base, "run_id", "../.."), "run_id"),
    ],
)
def test_what_does_not_fit_is_refused(alter: Callable[[dpb.InjectHeader], object], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        inject_header_from_pb(change(alter), SCHEMA)
