"""Which model a run means.

Owns: building the model that `[model]` names. Must not know: training, data, the network.

registry     the three kinds: builtin, hf, entry
gpt          the built-in GPT
huggingface  models of transformers
"""
