"""What a member of a swarm does with the parts of the model: it holds, adopts, fetches and offers updates.

`edit.council` decides; this carries it out with the coordinator's own journal, checkpoints and outer state. What an owner
offers is the journal's record of a round, so that what one member has on disk is what all others replay.

Owns: an update as bytes, the part's state on disk, and the process of a member. The first four must not know how bytes reach
other members (a `Source` is given), clocks, the event loop, peers that train.

    member_folder.py  the names of the files, and what the council must have on disk
    offers.py         an update with its bytes, as members send it to each other
    engine_store.py   a part's store as its owner's engine has it: a commit waits for the members
    replication.py    one part at one member; and the council's effects carried out
    engine.py         an owner's engine: the coordinator's run for one part, under one grant
    transfers.py      updates and states as bytes between hosts, bounded by what the part can have
    links.py          the streams of council messages between hosts
    host.py           the member: its council with a clock, a disk and links; starts and ends engines
    signed_records.py what a member says in the DHT of where it is
    discovery.py      hivemind's DHT
    host_folder.py    what its process is started with
    founding.py       the first member's folder, from files
    admission.py      invitations, enrolment, and asking for the run's settings
    process.py        that process: `python -m aggregator.swarm FOLDER`
    held.py           what a member holds of the model, read from its folder, for `export`
    standing.py       what hosts say of themselves, and what several say together, in words
    operate.py        what an operator does from a member's folder: status, orders, leaving, recovery
    metrics.py        /metrics of a host: the council, and the rounds of the parts that it owns
    watching.py       the whole swarm as one status, again and again, for `watch`, `report`, `web`
    commands.py       `python -m aggregator.swarm VERB FOLDER`
    cli.py            which of the two
"""
