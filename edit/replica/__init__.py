"""One model under training, as a peer holds it: outer parameters beside local ones, over one rank or several.

Owns the two sets of parameters and every move of the local ones onto other outer parameters; which pieces of which tensors a
rank holds; the ranks' agreement; the copies between the model's device and the CPU. Must not know carriers, optimizers,
residuals, or when something is exchanged.

Reading order:

- ranks: `Ranks`, the processes of one replica, and how they agree.
- layout: which pieces of the model's tensors this rank holds of each fragment, and which it sends.
- flat: between the parameters of a fragment and one flat fp32 vector.
- module_hooks: which module's forward first uses a fragment.
- device_copies: copies between CPU and device beside the computation.
- replica: `Replica`, theta and the local parameters.
"""
