"""`edit-lab simulate`: a whole run in virtual time, with thousands of peers.

What decides is real: the round machine (`edit.rounds`), the membership (`aggregator.control.membership`) and each peer's
session (`peers.carriers.hub.session`). What takes time is simulated: training, links, merging, failures.

Owns: virtual time, the fleet and its random draws, what a simulated run is measured by. Must not know: tensors (but for
`merging`), sockets, real clocks.

In reading order:
    scenario     what is simulated: the fleet, its links, its faults, the run's own settings
    simulate     the fleet, the loop, the end
    event_queue  virtual time: what happens when
    coordinator  the coordinator: the real machine and membership, and what they decide carried out
    peer         one peer's life: train, contribute, wait, fail, come back
    sending      a contribution on its way to the coordinator
    presence     how the coordinator hears of a peer: attendances and heartbeats
    training     the inner steps that a peer made, and which of them the run has
    pace         how fast a peer computes
    link         when bytes arrive
    merging      contributions as small vectors that are really merged
    accounting   the sums: steps, seconds, bytes, staleness
    outcome      what the run came to
    policies     data-parallel training under failures, to compare with
    command      the command line's side
"""
