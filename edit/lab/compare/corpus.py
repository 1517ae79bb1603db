"""The text of a comparison: the source of Python's standard library; each peer's batches, and what damages some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from edit.config.validation import Between, bounds_of, require
from edit.lab.demo.corpus import SourceFile, plan_corpus, standard_library
from peers.training.data import SEPARATOR, Batches, Tokens

__all__ = ["Batch", "Text", "TextOptions", "joined", "read_text", "streams", "text_hash", "whole_text"]

Batch = tuple[Tensor, Tensor]
"""(tokens, targets), both (B, T) int64."""


_OPTIONS = {"random_from": "--random-bytes", "random_to": "--random-bytes", "label_noise": "--label-noise"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What differs between the peers' data. Damage is the last peer's. Raises ConfigError, naming the option."""

    # Each peer has packages of its own, instead of all text in an order of its own.
    domains: bool = False
    # The stretch of the run, as shares of its steps, in which the last peer trains on random bytes; equal: none.
    random_from: Annotated[float, Between(0, 1)] = 0.0
    random_to: Annotated[float, Between(0, 1)] = 0.0
    # The share of the last peer's targets that are random.
    label_noise: Annotated[float, Between(0, 1)] = 0.0
    # The last peer has this share of its text.
    small: Annotated[float, Between(1e-3, 1)] = 1.0

    def __post_init__(self) -> None:
        for name, bound in bounds_of(TextOptions).items():
            value = getattr(self, name)
            require(bound.allows(value), _OPTIONS.get(name, f"--{name}"), value, bound.rule)
        require(self.random_from <= self.random_to, "--random-bytes", self.random_from, f"must not exceed {self.random_to}")


@dataclass(frozen=True, slots=True)
class Text:
    """What the peers train on, by peer, and what all are evaluated on."""

    peers: tuple[Tokens, ...]
    held_out: Tokens

    @property
    def hash(self) -> str:
        """Names the text: another one where the standard library is that of another Python."""
        digest = blake3()
        # Peers may share a row.
        for row in (self.held_out, *{id(row): row for row in self.peers}.values()):
            digest.update(len(row).to_bytes(8, "big")).update(row.array.tobytes())
        return digest.hexdigest()[:16]


def whole_text(seed: int) -> tuple[Tokens, Tokens]:
    """Return all training text as one row of bytes, and what is held out, which the seed decides."""
    groups = plan_corpus(standard_library(), 1, seed)
    train, held_out = (file for group in groups for file in group.train), (f for group in groups for f in group.held_out)
    return _row(train, "train"), _row(held_out, "held out")


def read_text(options: TextOptions, peers: int, seed: int) -> Text:
    """Return the text of each peer. Raises ConfigError when there is too little for so many peers."""
    if options.domains:
        groups = plan_corpus(standard_library(), peers, seed)
        rows = [_row(group.train, f"peer {i}") for i, group in enumerate(groups)]
        held_out = _row((file for group in groups for file in group.held_out), "held out")
    else:
        train, held_out = whole_text(seed)
        rows = [train] * peers
    if options.small < 1:
        last = rows[-1]
        share = options.small if options.domains else options.small / peers
        rows[-1] = Tokens(last.array[: int(share * len(last))], last.origin, last.vocabulary)
    return Text(tuple(rows), held_out)


@cache
def text_hash(options: TextOptions, peers: int, seed: int) -> str:
    """Return the hash of the text that a trial trains on here. Raises ConfigError as `read_text`."""
    return read_text(options, peers, seed).hash


def streams(text: Text, options: TextOptions, context: int, batch_size: int, number: int, seed: int) -> list[Iterator[Batch]]:
    """Return each peer's endless batches of (batch_size, context) tokens, the same for every method of this seed.

    number: of batches that a peer takes in the whole run, by which the stretch with random bytes is found.
    """
    found: list[Iterator[Batch]] = [Batches(row, context, batch_size, seed + 1 + peer) for peer, row in enumerate(text.peers)]
    found[-1] = _damaged(found[-1], options, number, text.held_out.vocabulary, seed)
    return found


def joined(batches: Iterable[Iterator[Batch]]) -> Iterator[Batch]:
    """Yield the peers' batches of each step as one, (peers * B, T): what data-parallel training sees at once."""
    for parts in zip(*batches, strict=True):
        yield torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])


def _damaged(batches: Iterator[Batch], options: TextOptions, number: int, vocabulary: int, seed: int) -> Iterator[Batch]:
    drawn = torch.Generator().manual_seed(seed)
    begin, end = round(options.random_from * number), round(options.random_to * number)
    for i, (tokens, targets) in enumerate(batches):
        if begin <= i < end:
            row = torch.randint(vocabulary, (tokens.shape[0], tokens.shape[1] + 1), generator=drawn)
            tokens, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
        if options.label_noise:
            wrong = torch.rand(targets.shape, generator=drawn) < options.label_noise
            targets = torch.where(wrong, torch.randint(vocabulary, targets.shape, generator=drawn), targets)
        yield tokens, targets


def _row(files: Iterable[SourceFile], origin: str) -> Tokens:
    paths: Iterable[Path] = (file.path for file in files)
    text = bytes([SEPARATOR]).join(path.read_bytes() for path in paths)
    return Tokens(np.frombuffer(text, np.uint8), origin, 256)
