"""Merging: how the contributions to one fragment become one outer step.

Owns the norms, the penalty, the weighted mean, the outer optimizers and the outer state (theta and all that moves it). Pure
functions and values: sans-IO, no clock, no randomness. Must not know rounds, carriers, disks.

    norms             lengths of vectors, the same with any number of threads
    penalty           on scalars: which contribution is anomalous, and each one's weight
    heloco            corrects a contribution towards the outer momentum
    merge             the values of a merge, the weighted mean, the clip
    mergers           the seams: Admission before a merge, Merger
    outer_optimizers  the step from the merged pseudo-gradient: SGD, Nesterov, delayed Nesterov, Adam, Yogi
    injection         what a regional aggregator brings down from the run above
    outer_state       reduce -> record -> commit
    gossip            in place of all that: each peer's own outer parameters, and an outer step of two peers (NoLoCo)
"""
