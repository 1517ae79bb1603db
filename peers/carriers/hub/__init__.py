"""The carrier over gRPC: one rank's connections to a coordinator and to further aggregators.

Owns: the two connections to each aggregator (control and data), what this peer knows of the run, contributions, updates
and snapshots on their way, and reading and serving snapshots among members.
Must not know: models, optimizers, files, the daemon, what a merge computes.

In reading order:
    session            what this peer knows, and what follows from it; sans-IO, with the table of decisions
    collective         `edit.Collective`: joins, contributes, learns outcomes
    control_stream     the Attend stream: heartbeats up, views down
    channels           opens, keeps and closes every gRPC channel
    uplink             a contribution on its way to a round
    downlink           updates and snapshots on their way to all ranks
    data_calls         the calls of the data plane, with retries
    range_calls        reading in calls of a bounded size, one behind the other
    pace               how many bytes a call carries, from measured times; sans-IO
    assemblies         an update or a snapshot, put together from its streams; no I/O
    snapshot_donors    reads a snapshot from other members
    snapshot_server    serves this peer's snapshot to other members
    all_aggregators    a peer at all aggregators of its run, and `connect_hub`, which makes it
"""
