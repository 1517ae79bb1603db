"""Gossip in a swarm: each host takes its own peer's outer steps, with one other host at a time, and all settle on one model.

Owns: this member's outer parameters, swaps, and what brings all of them together. Must not know: votes, leases, enrolment.

    phi.py       this member's outer parameters as the coordinator's code publishes and journals them
    swaps.py     one swap with another host, over the network
    member.py    a member: its parameters on disk, its peer's engine, swaps, and settling with the others

A settling is an outer step of part 0, which is the whole model: its owner fetches what each member has, and merges it as an
ordinary round; that all hold and adopt it is the council's work. Between two settlings the part stands still.
"""
