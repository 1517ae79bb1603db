"""What flows through the aggregator: contributions up, updates and snapshots down.

Owns the rounds of a founded run, as far as they are carried out and not decided: the contributions that are held, the order of
journal, memory and publishing, and what of the committed state everybody sees. Must not know gRPC, who is here and why
(`aggregator.control`), how files are laid out (`aggregator.storage`). When a round opens and closes, and which contribution is
taken, `edit.rounds` decides; numbers are `edit.merging`'s.

    round_runner.py   a contribution's way: offer, receive, arrived, reduce, commit, publish
    contributions.py  the contribution that is held of each peer, its fragments, and their shards on the way in
    published.py      what peers fetch: updates and snapshots, whole or cut to a shard
"""
