"""The coordinator (who takes part) and the aggregator (what is merged) of one run: the `edit-coordinator` command.

Owns the outer state, its journal and checkpoints, the members, and the rounds as they are carried out. Must not know how a peer
trains; it never imports `peers`. What decides about rounds and numbers is in `edit`.

    cli.py, operator_client.py  the commands, and what they ask of a running coordinator
    server.py                   one process: ports, threads, signals
    services/                   gRPC: messages to calls and back
    control/                    who is here
    data/                       what flows
    storage/                    what survives a kill
    security/                   certificates and members
    run_feed.py                 what happens, as values for every subscriber; the log
    metrics.py                  metrics.jsonl, as such a subscriber
    resources.py                what the run works with, as one value
    worker_thread.py            the worker thread, and tasks that nobody waits for
    export.py                   the outer parameters as a file
    run_template.py             the run.toml that `init` writes

Threads of the process (`server.py` makes all but the journal's)

    thread   runs                                                      owns
    -------  --------------------------------------------------------  ----------------------------------------------------
    main     the asyncio loop: services, timers, signals, copies of    the round machine, members, views, the held
             chunks                                                    contributions, the accounting of upload memory
    torch    measure, admit, merge, outer step, checkpoint, cutting    the outer state; reads uploads
             payloads; one call after the other
    journal  journal writes and fsync, in order (`storage.store`)      the journal's file
    files    uploads above the memory bound, metrics lines; in order   the spill files, metrics.jsonl

    The loop gives work to `torch` and `files` through executors and awaits the result, but for metrics lines and the removal of
    spill files, which nobody waits for. `torch` waits for `journal` before a commit counts. What loop and `torch` both read is
    replaced in one go, never changed: `CommittedState` (`data.published`), the kept updates (`storage.store`). theta is written
    in place by a commit; the loop takes it for a snapshot only between commits, and a fragment that a reader holds is copied
    first.

    lock, event, queue                              of                      set or released by           awaited by
    ----------------------------------------------  ----------------------  ---------------------------  --------------------
    the executors' queues: `torch` gets at most     the process             the thread, call by call     the loop's coroutine
      one call per stream and round effect, `files`
      one chunk per stream and 1000 lines
    `Upload._writing` (asyncio.Lock)                one upload              the stream that writes       another stream of it
    `MetricsLog._room` (threading.Semaphore)        metrics.jsonl           `files`, line by line        nobody: a line is lost
    `Attendance.changed` (asyncio.Event)            a rank's open stream    a change of the view         that stream
    `Background._failed` (asyncio.Event)            the process             a bug in a background task   `serve`, which ends
    `stop` (asyncio.Event, `server.py`)             the process             SIGINT, SIGTERM              `serve`

    Background tasks (`Background.spawn`): the clock that watches leases and deadlines, each Reduce and Commit, the last
    checkpoint. A Reduce or Commit that raises before its commit is on disk fails its round; any other exception ends the
    process with exit code 70 and a traceback in the log, and a restart recovers what is committed.
"""
