"""Fragments: what is exchanged. The trainable tensors of a model, grouped layer-wise; who holds and who merges which of them.

Owns the plan of fragments and its hash, the geometry of shards, the assignment of fragments to aggregators and to outer steps,
and the digest of the outer parameters. Must not know peers, rounds, codecs, carriers.

    schema      which tensor belongs to which fragment, in forward order
    shards      what one rank of a sharded replica holds of a fragment
    assignment  which aggregator merges which fragments
    groups      which fragments an outer step exchanges
    digest      one hash over all outer parameters
"""
