"""Converts the messages of control.proto to and from records. Bounds and validates everything that arrives.

`x_to_pb(record)` never fails; `x_from_pb(message)` raises RemoteProtocolError with one line, and nothing else.
"""

from __future__ import annotations

from edit.fragments.schema import Schema
from edit.trust.checkpoints import ED25519_BYTES, MOST_DER_BYTES
from edit.trust.merkle import HASH_BYTES
from edit.trust.signatures import MOST_KEY_BYTES, SIGNATURE_BYTES
from editpb import control_pb2 as cpb
from editpb import limits as lim
from editpb import messages as msg
from editpb.governance_messages import change_to_pb, changes_from_pb
from editpb.invitation import is_endpoint
from editpb.limits import check_digest, check_id, check_text, fail, one_line, within
from editpb.tensor_messages import schema_to_pb

__all__ = [
    "coordinator_message_from_pb",
    "coordinator_message_to_pb",
    "evict_request_from_pb",
    "heartbeat_from_pb",
    "heartbeat_to_pb",
    "hello_from_pb",
    "hello_to_pb",
    "peer_message_from_pb",
    "peer_message_to_pb",
    "phase_from_pb",
    "schema_answer_to_pb",
    "serving_from_pb",
    "serving_to_pb",
    "view_from_pb",
    "view_to_pb",
    "welcome_from_pb",
    "welcome_to_pb",
]


def hello_to_pb(hello: msg.Hello) -> cpb.Hello:
    """Encode a peer's first message."""
    return cpb.Hello(
        protocol=hello.protocol,
        run_id=hello.run_id,
        schema_hash=hello.schema_hash,
        software=one_line(hello.software),
        rank=hello.rank,
        ranks=hello.ranks,
        configuration=hello.configuration,
    )


def hello_from_pb(message: cpb.Hello) -> msg.Hello:
    """Decode a peer's first message. Another protocol than this side's is an error that names both versions."""
    if message.protocol != msg.PROTOCOL:
        fail(f"the peer speaks protocol {message.protocol}, this side {msg.PROTOCOL}; update the older one")
    ranks = within("ranks", message.ranks or 1, 1, lim.MAX_RANKS)
    return msg.Hello(
        run_id=check_id("run_id", message.run_id),
        schema_hash=check_digest("schema_hash", message.schema_hash, empty=True),
        software=check_text("software", message.software),
        rank=within("rank", message.rank, 0, ranks - 1),
        ranks=ranks,
        configuration=within("configuration", message.configuration, 0, lim.MAX_COUNT),
    )


def heartbeat_to_pb(beat: msg.Heartbeat) -> cpb.Heartbeat:
    """Encode a peer's report."""
    return cpb.Heartbeat(
        state=f"PEER_STATE_{beat.state.name}",
        outer_step=beat.outer_step,
        digest=beat.digest,
        inner_steps=beat.inner_steps,
        round_inner_steps=beat.round_inner_steps,
        loss=beat.loss,
        tokens_per_s=beat.tokens_per_s,
        step_s=beat.step_s,
        bytes_sent=beat.bytes_sent,
        bytes_received=beat.bytes_received,
        serving=serving_to_pb(beat.serving) if beat.serving is not None else None,
        device=one_line(beat.device, lim.MAX_NAME_CHARS),
        metrics=beat.metrics,
        cosigned=_cosigned_to_pb(beat.cosigned) if beat.cosigned is not None else None,
    )


def heartbeat_from_pb(message: cpb.Heartbeat) -> msg.Heartbeat:
    """Decode a peer's report. The loss may be NaN or infinite (a diverged peer still reports), the rates may not:
    each is 0 before it is measured, else within what a machine can have.
    """
    return msg.Heartbeat(
        state=msg.PeerState(_enum_word(cpb.PeerState, "PEER_STATE_", message.state)),
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        digest=check_digest("digest", message.digest, empty=True),
        inner_steps=within("inner_steps", message.inner_steps, 0, lim.MAX_STEP),
        round_inner_steps=within("round_inner_steps", message.round_inner_steps, 0, lim.MAX_STEP),
        loss=message.loss,
        tokens_per_s=lim.check_measured("tokens_per_s", message.tokens_per_s, lim.MIN_RATE, lim.MAX_TOKENS_PER_S),
        step_s=lim.check_measured("step_s", message.step_s, lim.MIN_STEP_S, lim.MAX_STEP_S),
        bytes_sent=within("bytes_sent", message.bytes_sent, 0, lim.MAX_COUNT),
        bytes_received=within("bytes_received", message.bytes_received, 0, lim.MAX_COUNT),
        serving=serving_from_pb(message.serving) if message.HasField("serving") else None,
        device=check_text("device", message.device, lim.MAX_NAME_CHARS),
        metrics=lim.check_metrics(message.metrics),
        cosigned=_cosigned_from_pb(message.cosigned) if message.HasField("cosigned") else None,
    )


def _cosigned_to_pb(cosigned: msg.Cosignature) -> cpb.Cosignature:
    head = cosigned.head
    return cpb.Cosignature(size=head.size, root=head.root, log_signature=head.signature, signature=cosigned.signature)


def _cosigned_from_pb(message: cpb.Cosignature) -> msg.Cosignature:
    """Decode a cosignature; whether it is signed is not looked at."""
    lengths = len(message.root), len(message.log_signature), len(message.signature)
    if lengths[:2] != (HASH_BYTES, ED25519_BYTES) or not 0 < lengths[2] <= MOST_DER_BYTES:
        fail(f"a cosignature has a root of {lengths[0]}, and signatures of {lengths[1]} and {lengths[2]} bytes")
    size = within("cosigned.size", message.size, 1, lim.MAX_COUNT)
    return msg.Cosignature(msg.SeenHead(size, message.root, message.log_signature), message.signature)


def serving_to_pb(serving: msg.Serving) -> cpb.Serving:
    """Encode where a peer serves its snapshot."""
    return cpb.Serving(address=serving.address, ticket=serving.ticket)


def serving_from_pb(message: cpb.Serving) -> msg.Serving:
    """Decode where a peer serves its snapshot."""
    if not is_endpoint(message.address):
        fail(f"serving.address {one_line(message.address, 64)!r} is not HOST:PORT")
    return msg.Serving(message.address, check_id("ticket", message.ticket))


def schema_answer_to_pb(schema: Schema) -> cpb.PeerMessage:
    """Encode a peer's answer to SchemaRequest."""
    return cpb.PeerMessage(schema=schema_to_pb(schema).SerializeToString())


def consent_to_pb(consent: msg.Consent) -> cpb.Consent:
    """Encode a consent."""
    return cpb.Consent(
        config_digest=consent.config_digest,
        policy_digest=consent.policy_digest,
        public_key=consent.public_key,
        signature=consent.signature,
        data_statement=consent.data.statement,
        data_manifest=consent.data.manifest,
        data_licence=consent.data.licence,
    )


def consent_from_pb(message: cpb.Consent) -> msg.Consent:
    """Decode a consent; whether it is signed is not looked at."""
    if len(message.public_key) > MOST_KEY_BYTES or len(message.signature) != SIGNATURE_BYTES:
        fail(f"a consent has a key of {len(message.public_key)} and a signature of {len(message.signature)} bytes")
    return msg.Consent(
        config_digest=check_digest("config_digest", message.config_digest),
        policy_digest=check_digest("policy_digest", message.policy_digest, empty=True),
        public_key=message.public_key,
        signature=message.signature,
        data=msg.DataStatement(
            statement=check_text("data_statement", message.data_statement, lim.MAX_DATA_CHARS),
            manifest=check_digest("data_manifest", message.data_manifest, empty=True),
            licence=check_text("data_licence", message.data_licence, lim.MAX_DATA_CHARS),
        ),
    )


def peer_message_to_pb(value: msg.Hello | msg.Heartbeat | msg.Goodbye | msg.Consent) -> cpb.PeerMessage:
    """Encode what a peer says on Attend."""
    match value:
        case msg.Hello():
            return cpb.PeerMessage(hello=hello_to_pb(value))
        case msg.Heartbeat():
            return cpb.PeerMessage(heartbeat=heartbeat_to_pb(value))
        case msg.Goodbye():
            return cpb.PeerMessage(goodbye=cpb.Goodbye(reason=one_line(value.reason)))
        case msg.Consent():
            return cpb.PeerMessage(consent=consent_to_pb(value))


def peer_message_from_pb(message: cpb.PeerMessage) -> msg.Hello | msg.Heartbeat | msg.Goodbye | msg.Consent:
    """Decode what a peer says on Attend, except a schema, which is long (see `schema_from_bytes`)."""
    if (size := message.ByteSize()) > lim.MAX_CONTROL_BYTES:
        fail(f"a peer's message has {size} bytes, more than {lim.MAX_CONTROL_BYTES}")
    match message.WhichOneof("kind"):
        case "hello":
            return hello_from_pb(message.hello)
        case "heartbeat":
            return heartbeat_from_pb(message.heartbeat)
        case "goodbye":
            return msg.Goodbye(check_text("reason", message.goodbye.reason))
        case "consent":
            return consent_from_pb(message.consent)
        case "schema":
            fail("a schema that was not asked for")
        case _:
            fail("a peer's message without content")


def welcome_to_pb(welcome: msg.Welcome) -> cpb.Welcome:
    """Encode the coordinator's first message."""
    return cpb.Welcome(
        run_id=welcome.run_id,
        peer_id=welcome.peer_id,
        config_json=welcome.config_json,
        outer_step=welcome.outer_step,
        first_round_id=welcome.first_round_id,
        log_key=welcome.log_key,
        configuration=welcome.configuration,
        changes=map(change_to_pb, welcome.changes),
    )


def welcome_from_pb(message: cpb.Welcome) -> msg.Welcome:
    """Decode the coordinator's first message. `RunConfig.from_json` validates the configuration."""
    return msg.Welcome(
        run_id=check_id("run_id", message.run_id),
        peer_id=check_id("peer_id", message.peer_id),
        config_json=check_text("config_json", message.config_json, lim.MAX_CONFIG_CHARS),
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        first_round_id=within("first_round_id", message.first_round_id, 0, lim.MAX_COUNT),
        log_key=check_text("log_key", message.log_key, lim.MAX_LOG_KEY_CHARS),
        configuration=within("configuration", message.configuration, 0, lim.MAX_COUNT),
        changes=changes_from_pb(message.changes),
    )


def view_to_pb(view: msg.View) -> cpb.View:
    """Encode the run as it stands."""
    return cpb.View(
        sequence=view.sequence,
        phase=f"RUN_PHASE_{view.phase.name}",
        outer_step=view.outer_step,
        round_id=view.round_id,
        digest=view.digest,
        oldest_update=view.oldest_update,
        last_round_id=view.last_round_id,
        last_committed=view.last_committed,
        last_reason=one_line(view.last_reason),
        resync=one_line(view.resync),
        found=view.found,
        reason=one_line(view.reason),
        inner_steps=view.inner_steps,
        draining=view.draining,
        ahead_bytes=view.ahead_bytes,
        waiting_for=one_line(view.waiting_for),
    )


def view_from_pb(message: cpb.View) -> msg.View:
    """Decode the run as it stands."""
    return msg.View(
        sequence=within("sequence", message.sequence, 0, lim.MAX_COUNT),
        phase=phase_from_pb(message.phase),
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        round_id=within("round_id", message.round_id, 0, lim.MAX_COUNT),
        digest=check_digest("digest", message.digest, empty=True),
        oldest_update=within("oldest_update", message.oldest_update, 0, lim.MAX_STEP),
        last_round_id=within("last_round_id", message.last_round_id, 0, lim.MAX_COUNT),
        last_committed=message.last_committed,
        last_reason=check_text("last_reason", message.last_reason),
        resync=check_text("resync", message.resync),
        found=message.found,
        reason=check_text("reason", message.reason),
        inner_steps=within("inner_steps", message.inner_steps, 0, lim.MAX_STEP),
        draining=message.draining,
        ahead_bytes=within("ahead_bytes", message.ahead_bytes, 0, lim.MAX_COUNT),
        waiting_for=check_text("waiting_for", message.waiting_for),
    )


def phase_from_pb(value: int) -> msg.RunPhase:
    """Decode what the coordinator is doing."""
    return msg.RunPhase(_enum_word(cpb.RunPhase, "RUN_PHASE_", value))


def coordinator_message_to_pb(value: msg.Welcome | msg.View | msg.Expel | msg.SchemaRequest) -> cpb.CoordinatorMessage:
    """Encode what the coordinator says on Attend."""
    match value:
        case msg.Welcome():
            return cpb.CoordinatorMessage(welcome=welcome_to_pb(value))
        case msg.View():
            return cpb.CoordinatorMessage(view=view_to_pb(value))
        case msg.Expel():
            return cpb.CoordinatorMessage(expel=cpb.Expel(evicted=value.evicted, reason=one_line(value.reason)))
        case msg.SchemaRequest():
            return cpb.CoordinatorMessage(schema_request=cpb.SchemaRequest())


def coordinator_message_from_pb(message: cpb.CoordinatorMessage) -> msg.Welcome | msg.View | msg.Expel | msg.SchemaRequest:
    """Decode what the coordinator says on Attend."""
    match message.WhichOneof("kind"):
        case "welcome":
            return welcome_from_pb(message.welcome)
        case "view":
            return view_from_pb(message.view)
        case "expel":
            return msg.Expel(message.expel.evicted, check_text("reason", message.expel.reason))
        case "schema_request":
            return msg.SchemaRequest()
        case _:
            fail("a coordinator's message without content")


def evict_request_from_pb(message: cpb.EvictRequest) -> tuple[str, str]:
    """Decode (peer_id, reason)."""
    return check_id("peer_id", message.peer_id), check_text("reason", message.reason)


def _enum_word(enum: object, prefix: str, value: int) -> str:
    """Return the lower-case name of an enum value. Unspecified and unknown values are errors."""
    names = {number: name for name, number in enum.items()}  # type: ignore[attr-defined]
    if value == 0 or value not in names:
        fail(f"{prefix.rstrip('_').lower()} {value} is not known")
    return str(names[value]).removeprefix(prefix).lower()
