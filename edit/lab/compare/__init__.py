"""`edit-lab compare`: methods side by side, on the same model, text, order, tokens and seeds, in this process.

What exchanges runs the project's own worker, merge and outer optimizer over a `LocalRun` or a `LocalGossip`. What only is
compared with (data-parallel training, GPA, DeMo) is in `baselines`. Must not know a network.

- intervals: means over seeds with their confidence intervals.
- corpus: the text, each peer's batches, and what damages them.
- method: which methods there are to compare, from the names and files given.
- loop: all peers' inner steps, in the order of a virtual clock; counted bytes.
- baselines: the methods that never exchange pseudo-gradients.
- trial: one method with one seed, as a row of results.
- table: the rows as a table, a picture and curves.
- command: makes the missing trials, in processes of their own (one_trial).
"""
