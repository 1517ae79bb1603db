"""What survives a kill of the process.

Owns the files in the coordinator's folder (but for keys, certificates and members: `aggregator.security`), the order in which
they are written, and recovery. Must not know rounds, peers, gRPC, the event loop; `upload_buffer.py` alone is used on the loop,
and what it keeps does not survive. Files are replaced and their formats are checked by `edit.durable_files`.

    store.py              the order of all writes of the outer state, and recovery
    journal.py            merged fragments and commits, appended record by record
    journal_records.py    one record as bytes
    checkpoint.py         the outer state, whole; which one a restart begins with
    published_updates.py  the kept updates, beside a checkpoint
    pending_injection.py  what a run above has brought and no commit has yet
    state_folder.py       the names of the files, the exclusive lock
    operator_flags.py     whether the operator paused or drained the run
    upload_buffer.py      bytes on their way in: in memory up to a bound, then in files

    file                            format            one that differs is
    ------------------------------  ----------------  ------------------------------------------------------------
    outer/step-N.journal            journal.FORMAT    refused in `journal`; another record layout in `journal_records`
    outer/step-N.safetensors        checkpoint.FORMAT refused in `checkpoint.load`
    outer/step-N.updates            its FORMAT        refused in `published_updates.load`
    outer/injection/step-N          checkpoint.FORMAT refused in `checkpoint.load`
    run.json, orders.json           their FORMAT      refused where they are read
    members.json, invitations       theirs            refused in `aggregator.security`; members of format 1 are read
    deadlines.json, addresses.json  none              passed over when they cannot be read: nothing depends on them
"""
