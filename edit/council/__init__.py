"""The council of a swarm: who is a member, who votes, who owns which part, and which update is an outer step.

A swarm has no coordinator. Its members agree on one small record instead, by Raft reduced to its smallest form: each version
carries the whole record, so there is no log. Everything here is sans-IO: the state changes only through
`Council.handle(event, now)`, which returns the effects to carry out, in order.

Owns: elections, the record and its versions, leases, the voters, the owners of the parts, and what a member does with the
update of a part. Must not know: clocks (every call takes `now`, seconds of one monotonic clock), tensors, bytes of updates,
files, sockets, logging.

In reading order:
    record    what all members agree on; what a member has on disk; how parts are given to owners
    events    messages between members, the machine's input (events) and output (effects)
    machine   the rules, the transition table, and the machine
    parts     what one member has of each part: it holds, adopts and fetches updates, and offers its own
"""
