"""Callbacks that train with other peers from inside a framework's own trainer.

Owns what each framework calls when, and what differs from a plain loop (wrapped optimizers, evaluation, the last model). Must
not know carriers or rounds: it enters an `edit.EditWorker` on whatever collective it is given. Only these files import their
frameworks.

Reading order:

- attachment: one training attached to a run, the same for every framework.
- transformers: `EditCallback` for `transformers.Trainer`.
- lightning: `EditCallback` for Lightning's Trainer.
- opacus: `PrivateGradients`, DP-SGD for a loop of your own and for the daemon's.
- huggingface: models of the transformers package by their type, for peers and coordinator alike.
"""
