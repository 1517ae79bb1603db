"""Carriers: how one rank of a peer reaches its run. A hub (a coordinator over gRPC) today, a swarm later.

Owns: connections, the I/O thread, what the ranks of a replica agree on.
Must not know: the model, optimizers, the training loop, the peer's folder, what a merge computes.

In reading order:
    run_connection   what the daemon and the training loop use of a carrier; all they may know of it
    io_thread        the asyncio loop, and how it exchanges state with the main thread
    rank_agreement   rank 0's decisions and all ranks' transfers, the same at every rank
    hub/             the carrier over gRPC

Threads
    One process is one rank. It has two threads of its own:

    main      torch: model, optimizer, EditWorker, checkpoints. It calls the carrier, and blocks only in `IoThread.wait`,
              `IoThread.call`, `IoThread.change`, `RankAgreement` and torch.distributed. The signal handler runs here.
    peer-io   the asyncio loop (`IoThread`): every gRPC call and server, every asyncio task. gRPC's own threads
              never call into this code.

    Beside them, while a checkpoint is being written, there is one thread for it (`peers.training.checkpoint_files`).

    What may be changed where:

    peer-io, under the lock       `Session`, `Uplink`, the links of `HubCollective`: `IoThread.change` runs the mutation on the
                                  loop's thread for any thread, then wakes the main thread's wait. The main thread reads
                                  them with `IoThread.read` or inside `wait`; a read changes nothing.
    peer-io, no lock              `Report`, `Attendance`, `Channels`, `OwnerWatch`, `DataCalls`, `Downlink`, `SnapshotServer`:
                                  the main thread posts to them and never looks, but for two counters (`Traffic`),
                                  `Channels.endpoint` and `DataCalls.origin`, each replaced in one step.
    main, no lock                 the prefetched snapshot's future of `HubCollective`.
    signal handler                one flag, `IoThread.interrupt`, which ends the main thread's waits with Interrupted.

    Locks, events and queues:

    IoThread._changed             threading.Condition, the only lock; notified after each change; awaited by `wait`
    IoThread._tasks               the background tasks; one that fails ends every later wait with its exception
    Attendance._nudge             asyncio.Event: a heartbeat is due now; awaited by the stream's sender
    Channels._news                asyncio.Event: in a swarm, an owner was found; awaited by what waits to be tried again
    Attendance._leaving, _left    asyncio.Event: goodbye was called; the control connection has ended
    _Download._news               asyncio.Event, pulsed at each fragment that arrived; awaited by who waits for an update
    _Attempt.queue                deque of contributions to send, at most two in flight at a time
"""
