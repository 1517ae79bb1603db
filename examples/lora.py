"""Fine-tune with LoRA together: only the adapters are exchanged. `python examples/lora.py` (needs peft and transformers).

Two peers adapt the same frozen language model, each on its own text. Its weights must be equal at all peers: nothing compares
them. The peers live in one process and take turns step by step; over a network, `run.collective(...)` becomes what
`peers.connect(home)` gives. The lines marked `# edit` are all that the plain loop needs on top.
"""

import warnings
from collections.abc import Iterator

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from edit import EditWorker, LocalRun, OuterConfig, RunConfig, SyncConfig, WorkerConfig  # edit

STEPS, VOCABULARY, LENGTH = 60, 29, 16


def sequences(step: int, count: int, seed: int) -> Tensor:
    """Sequences that count upwards by `step`: each peer knows only its own."""
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + step * torch.arange(LENGTH)) % VOCABULARY


def adapted() -> PeftModel:
    """A base model, equal at all peers (here from a seed, else from a folder), with adapters."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = AutoModelForCausalLM.from_config(LlamaConfig(**size, vocab_size=VOCABULARY, max_position_embeddings=LENGTH))
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(name: str, step: int, run: LocalRun) -> Iterator[PeftModel]:
    """One peer's whole training, a step per `next()`; at the end yields the model with the outer adapters in it."""
    model = adapted()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with EditWorker(model, optimizer, run.collective(name), WorkerConfig(sync=SyncConfig(every=10))):  # edit
        for seed in range(STEPS):
            tokens = sequences(step, 16, seed)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield model
    yield model  # it holds the outer parameters now


def main() -> None:
    """Train both peers in turn and evaluate their common adapters on the text of both."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    run = LocalRun(RunConfig(outer=OuterConfig(lr=0.7, momentum=0.5)), peers=["ada", "grace"])  # edit
    held_out = torch.cat([sequences(1, 64, -1), sequences(2, 64, -1)])
    for turn, models in enumerate(zip(train("ada", 1, run), train("grace", 2, run), strict=True), start=1):
        if turn in (1, STEPS + 1):
            with torch.no_grad():
                losses = [model(input_ids=held_out, labels=held_out).loss.item() for model in models]
            print(f"after {min(turn, STEPS)} steps: ada {losses[0]:.4f}, grace {losses[1]:.4f}")
    adapters, everything = run.state.schema.numel, sum(parameter.numel() for parameter in models[0].parameters())
    print(f"exchanged {adapters:,} of {everything:,} parameters")


if __name__ == "__main__":
    main()
