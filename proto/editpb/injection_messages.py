"""Converts the messages of a regional aggregator (data.proto) to and from records; bounds and validates what arrives."""

from __future__ import annotations

from itertools import pairwise

from edit.fragments.schema import Schema
from edit.merging.injection import Injected
from editpb import data_pb2 as dpb
from editpb import limits as lim
from editpb import messages as msg
from editpb.control_messages import phase_from_pb
from editpb.limits import at_most, check_digest, check_id, fail, within

__all__ = ["inject_header_from_pb", "inject_header_to_pb", "injection_state_from_pb", "injection_state_to_pb"]


def inject_header_to_pb(header: msg.InjectHeader) -> dpb.InjectHeader:
    """Encode the header of an injection."""
    return dpb.InjectHeader(
        run_id=header.run_id,
        schema_hash=header.schema_hash,
        brings=_injected_to_pb(header.brings),
        base=_injected_to_pb(header.base),
        replaces=header.replaces,
        fragments=header.fragments,
        digest=header.digest,
    )


def inject_header_from_pb(message: dpb.InjectHeader, schema: Schema) -> msg.InjectHeader:
    """Decode the header of an injection."""
    at_most("fragments of an injection", message.fragments, len(schema.fragments))
    fragments = tuple(message.fragments)
    if any(a >= b for a, b in pairwise(fragments)):
        fail("the fragments of an injection must ascend")
    if not message.HasField("brings"):
        fail("an injection must say what it brings")
    return msg.InjectHeader(
        run_id=check_id("run_id", message.run_id),
        schema_hash=check_digest("schema_hash", message.schema_hash),
        brings=_injected_from_pb(message.brings),
        base=_injected_from_pb(message.base) if message.HasField("base") else None,
        replaces=message.replaces,
        fragments=tuple(within("fragment_id", i, 0, len(schema.fragments) - 1) for i in fragments),
        digest=check_digest("digest", message.digest),
    )


def injection_state_to_pb(state: msg.InjectionState) -> dpb.InjectionState:
    """Encode the run below as its regional aggregator sees it."""
    return dpb.InjectionState(
        outer_step=state.outer_step,
        phase=f"RUN_PHASE_{state.phase.name}",
        tokens=state.tokens,
        injected=_injected_to_pb(state.injected),
        accepted=_injected_to_pb(state.accepted),
    )


def injection_state_from_pb(message: dpb.InjectionState) -> msg.InjectionState:
    """Decode the run below as its regional aggregator sees it."""
    return msg.InjectionState(
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        phase=phase_from_pb(message.phase),
        tokens=within("tokens", message.tokens, 0, lim.MAX_COUNT),
        injected=_injected_from_pb(message.injected) if message.HasField("injected") else None,
        accepted=_injected_from_pb(message.accepted) if message.HasField("accepted") else None,
    )


def _injected_to_pb(injected: Injected | None) -> dpb.Injected | None:
    if injected is None:
        return None
    return dpb.Injected(run_id=injected.run_id, upper_step=injected.upper_step, lower_step=injected.lower_step)


def _injected_from_pb(message: dpb.Injected) -> Injected:
    return Injected(
        check_id("run_id", message.run_id),
        within("upper_step", message.upper_step, 0, lim.MAX_STEP),
        within("lower_step", message.lower_step, 0, lim.MAX_STEP),
    )
