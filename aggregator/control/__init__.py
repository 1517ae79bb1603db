"""Who takes part in a run: streams, leases, the founding, the operator's orders, and what each of them is shown.

Owns: which connection of a peer counts, when silence becomes loss, who founds the run, the views, the status, and what follows
from the events on the run's feed. Decides nothing about rounds (`edit.rounds`).
Must not know: gRPC, protobuf, certificates, files; tensors, except the founder's on their way in.

Everything here runs on the event loop; `membership`, `pace_advice`, `views` and `snapshot_donors` are sans-IO.

In reading order:
    membership       leases and states of the members: the table
    attendance       one stream per rank; joins streams, heartbeats and transfers to the membership
    schemas          the models that peers announce by hash, and how another one is learned
    founding         which member sends the first parameters, and what is taken from it
    pace_advice      how many inner steps each member is to take; settings that cannot work
    views            what a rank, and the regional aggregator, sees of the run
    run              the run: its life, the operator's orders, what follows from each event
    status           the run as one plain record
    snapshot_donors  which members a reader of a snapshot may ask, too
"""
