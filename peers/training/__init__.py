"""The daemon's own training: model, data, inner optimizer and checkpoints of one rank.

Owns: the training loop and everything that it needs on this machine. Must not know: how a carrier sends, what a round computes.
In reading order:

loop                 the training loop of one rank
trainer              inner steps: learning rate, clipping, accumulation
batch_growth         a batch that grows by a local norm test
inner_optimizers     AdamW, Muon and others by name
muon                 Muon, also of matrices that are sharded over ranks
data                 text or tokens to batches
sharding             FSDP2 and tensor parallelism over the ranks of a replica
private              gradients with noise, of examples that are drawn
torchrun             what torchrun says of this process
checkpoint           what a checkpoint holds, and when one is written
checkpoint_files     checkpoints on disk
checkpoint_manifest  their metadata, checked
metrics              the peer's metrics file
options              what the peer's operator sets
fault_injection      damage on purpose, for tests
alone                training without exchange, the baseline
sample               text from a byte-level model
"""
