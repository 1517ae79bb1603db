"""The rounds of a run: when a round opens, whom it waits for, what it merges, when it commits or is given up.

Everything here is sans-IO: the state changes only through `RoundMachine.handle(event, now)`, which returns the effects to carry
out. The same machine runs in the aggregator (`aggregator.data.round_runner`), in one process (`edit.local`) and in virtual time
(`edit.lab.simulation.coordinator`).

Owns: round ids, the outer step, quorum, deadlines, grace, which contribution is taken and how long it is kept, and the end
of the run.
Must not know: clocks (every call takes `now`, seconds of one monotonic clock), tensors, bytes, files, sockets, logging.

In reading order:
    events         the machine's input (events) and output (effects)
    machine        the rules, the transition table, and the machine
    contributions  which contribution of each peer is held, across rounds
    open_round     the sets of the one open round, and which peers are ready to contribute
    absences       which live peers are waited for no longer, because nothing came of them
    faults         which peers are kept out of the rounds for bad bytes, and for how long
    deadlines      how long a round waits for a peer, from the peer's own measured times
    work_claims    how much work a contribution counts for: what peers say of it, bounded
    swap           in place of rounds: one swap of two peers (gossip), as one of them sees it
    peer_timing    when each peer goes from one phase to the next: the measurements
"""
