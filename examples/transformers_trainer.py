"""The transformers Trainer in a run: `python examples/transformers_trainer.py` rehearses it with two peers on this machine.

`--home FOLDER` is one peer of a real run, in a folder that `edit-peer join` created. The lines marked `# edit` are all that a
plain Trainer needs on top.
"""

import argparse
import sys

import torch
from rehearsal import rehearse
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

import edit  # edit
import peers  # edit
from edit.integrations.transformers import EditCallback  # edit

RUN_TOML = """
name = "trainer"
[model]
name = "entry:mine"
[sync]
every = 10
outer_steps = 4
[outer]
lr = 0.7
momentum = 0.5
[rounds]
start_peers = 2
quorum = 2
"""
VOCABULARY, LENGTH = 29, 16


def rows(step: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards by `step`: each peer knows only its own."""
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": row, "labels": row} for row in (starts + step * torch.arange(LENGTH)) % VOCABULARY]


def train(home: str) -> None:
    """One peer: any Trainer, with one more callback."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**size, vocab_size=VOCABULARY, max_position_embeddings=LENGTH))
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(f"{home}/trainer", max_steps=40, learning_rate=5e-3, use_cpu=True, **quiet)
    with peers.connect(home) as (collective, run):  # edit
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(1 if collective.peer_id == "ada" else 2, 320),
            eval_dataset=rows(1, 32) + rows(2, 32),
            callbacks=[EditCallback(collective, edit.WorkerConfig.of(run), evaluate_outer=True)],  # edit
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"{collective.peer_id}: loss on both peers' data {before:.4f} before, {after:.4f} after", flush=True)


def main() -> None:
    """With --home one peer, without it a rehearsal of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home")
    home = parser.parse_args().home
    disable_progress_bar()
    if home is None:
        rehearse(RUN_TOML, dict.fromkeys(("ada", "grace"), (sys.executable, __file__)))
    else:
        train(home)


if __name__ == "__main__":
    main()
