"""The carrier in a swarm: that of a hub of as many aggregators as there are parts, each of which moves from host to host.

Owns: which host is asked for a part. Must not know: rounds, the council, what a host does.

    channels.py  the channels of one part: to the host that owns it, as far as is known
    owners.py    is told by a host who owns each part, and tells the channels
    waiting.py   tells this peer's own host for which owners the peer waits
    receipts.py  checks what the audit log of this peer's own host says of the peer
    connect.py   a peer's connection to all parts
    hosts.py     where the hosts are, as this peer's own says
"""
