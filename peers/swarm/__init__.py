"""A peer in a swarm: founding one, joining one, and training beside a host of one's own.

Owns: the order of these steps, and the host's process (`python -m aggregator.swarm`), which it starts and
asks by command lines.
Must not know: the council, the files of a host.

    aggregator_process.py  the commands of `python -m aggregator.swarm`: one that answers, and the host that runs beside
    membership.py          how a folder becomes a member's: founding, or an invitation
    daemon.py              trains in the swarm, with the host beside
    beside.py              other runs, whose curves are drawn beside those of one
    cli.py                 the commands `edit-peer swarm ...`
"""
