"""One peer's exchange with its run: what `EditWorker` does behind a plain training loop.

Owns when a peer contributes, asks and waits, what follows from each answer, and how theta, the local parameters, the residuals
and the inner optimizer's state follow a commit: together, and only then. Must not know how a carrier works, what a merge
computes, files or processes; it reads only the clock it is given.

Reading order:

- worker: `EditWorker`, the hooks on the user's optimizer and model.
- hooks: a hook that a copy of the model does not take along.
- unwrap: what other libraries have wrapped around a model and its optimizers, taken off.
- batches: the batches of a user's loop, for as long as a run goes on.
- speed: loss and speed of the last inner steps, for what a peer reports.
- config: `WorkerConfig`, the sections of the run's configuration that a worker needs.
- exchange: what a peer decides, as a table and a class without tensors. Sans-IO; the simulator runs it, too.
- apply: carries the decisions out on a model and a collective.
- contribution: makes and sends a contribution; what is kept of it until its outcome is known.
- updates: what comes back: updates, verdicts, snapshots.
- local_progress: what a peer keeps of its own when theta moves.
- schedule: counts inner steps and tokens, says when a contribution is due.
- estimator: `eager`: the estimate from which training goes on.
- catch_up: how a peer comes up to date, as two tables.
- checkpoint: the worker's own state, and going on from it.
- aggregator_shares: what the exchanges with all aggregators of a run do as one.
"""
