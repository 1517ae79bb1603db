"""The wire: generated stubs, the records behind the messages, and the converters that validate everything that arrives.

Owns what coordinator, aggregators and peers say to one another, its bounds, the errors behind gRPC's status codes, and what an
identity and an invitation look like. Must not know who is a member, rounds, disks. Neither daemon handles raw protobuf beyond
its stubs.

    *.proto             the messages and services; *_pb2* are generated
    messages            the messages as frozen records; PROTOCOL, the version
    limits              the bounds of every value from the wire
    tensor_messages, control_messages, data_messages, injection_messages
                        converters between records and messages, one file per kind
    council_messages    converters of what the hosts of a swarm say to each other
    run_status, status_messages
                        how a run stands, as a record, and its converters
    transport           gRPC as both ends use it: options, status codes, chunks
    identity            the URI in a certificate
    invitation          the text that lets one machine become one member
    snapshot_cache      snapshots that are being read
"""
