"""Records <-> messages, in one place. Everything that arrives is bounded and validated here, before memory is taken for it.

Owns: one pair of functions for every message of tensors.proto, control.proto and data.proto that carries a value:
`x_to_pb(record)`, and `x_from_pb(message)`, which raises RemoteProtocolError of one line and nothing else. Own texts (reasons)
are cut to one printable line on the way out, and must be one on the way in. The functions live in `_tensors`, `_control`,
`_data`, `_injection` and `chunks`. Must not know: connections, files, who is speaking (the certificate says that, see
`editpb.identity`).
"""

from __future__ import annotations

from editpb.chunks import (
    CHUNK_BYTES,
    Reassembly,
    checked,
    make_chunks,
)
from editpb.control_messages import (
    coordinator_message_from_pb,
    coordinator_message_to_pb,
    evict_request_from_pb,
    fragment_verdicts_from_pb,
    fragment_verdicts_to_pb,
    heartbeat_from_pb,
    heartbeat_to_pb,
    hello_from_pb,
    hello_to_pb,
    peer_message_from_pb,
    peer_message_to_pb,
    view_from_pb,
    view_to_pb,
    welcome_from_pb,
    welcome_to_pb,
)
from editpb.data_messages import (
    commit_from_parts,
    contribution_header_from_pb,
    contribution_header_to_pb,
    found_header_from_pb,
    found_header_to_pb,
    received_from_pb,
    snapshot_manifest_from_pb,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    snapshot_request_to_pb,
    update_manifest_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
    update_request_to_pb,
)
from editpb.injection_messages import (
    inject_header_from_pb,
    inject_header_to_pb,
    injection_state_from_pb,
    injection_state_to_pb,
)
from editpb.tensor_messages import (
    CODEC_IDS,
    codec_from_pb,
    codec_to_pb,
    schema_from_pb,
    schema_to_pb,
)

__all__ = [
    "CHUNK_BYTES",
    "CODEC_IDS",
    "Reassembly",
    "checked",
    "codec_from_pb",
    "codec_to_pb",
    "commit_from_parts",
    "contribution_header_from_pb",
    "contribution_header_to_pb",
    "coordinator_message_from_pb",
    "coordinator_message_to_pb",
    "evict_request_from_pb",
    "found_header_from_pb",
    "found_header_to_pb",
    "fragment_verdicts_from_pb",
    "fragment_verdicts_to_pb",
    "heartbeat_from_pb",
    "heartbeat_to_pb",
    "hello_from_pb",
    "hello_to_pb",
    "inject_header_from_pb",
    "inject_header_to_pb",
    "injection_state_from_pb",
    "injection_state_to_pb",
    "make_chunks",
    "peer_message_from_pb",
    "peer_message_to_pb",
    "received_from_pb",
    "schema_from_pb",
    "schema_to_pb",
    "snapshot_manifest_from_pb",
    "snapshot_manifest_to_pb",
    "snapshot_request_from_pb",
    "snapshot_request_to_pb",
    "update_manifest_from_pb",
    "update_manifest_to_pb",
    "update_request_from_pb",
    "update_request_to_pb",
    "view_from_pb",
    "view_to_pb",
    "welcome_from_pb",
    "welcome_to_pb",
]
