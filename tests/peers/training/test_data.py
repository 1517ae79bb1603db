"""Own data: every kind of input, every wrong input, and a window order that covers everything and survives a restart."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from edit.errors import ConfigError
from peers.training import data
from peers.training.data import SEPARATOR, Batches, Tokens, evaluate, open_tokens, permute, stream_seed
from tests.support.exhaustive import examples


def row(length: int, vocabulary: int = 1 << 20) -> Tokens:
    """0, 1, 2, ...: a window shows where it was cut."""
    return Tokens(np.arange(length, dtype=np.uint32), "row", vocabulary)


def text_of(tokens: Tokens) -> bytes:
    return bytes(tokens.array)


class TestOpening:
    def test_a_text_file_is_its_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes("häuser".encode())
        tokens = open_tokens(path, context=4, vocabulary=256)
        assert text_of(tokens) == "häuser".encode()
        assert isinstance(tokens.array, np.memmap)  # a large file takes no memory

    def test_a_folder_is_joined_in_order_and_says_what_it_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "peers")
        (tmp_path / "b" / "deep").mkdir(parents=True)
        (tmp_path / ".git").mkdir()
        for name, content in {
            "b/deep/x.txt": b"second",
            "a.txt": b"first",
            "c.txt": b"third",
            "b/picture.png": b"\x89PNG\x00\x00",
            "empty.txt": b"",
            "blank.jsonl": b"\n",
            "nothing.jsonl": b'{"text": ""}\n',
            "d.jsonl": b'{"text": "fourth"}\n',
            ".hidden": b"secret",
            ".git/config": b"secret",
        }.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        tokens = open_tokens(tmp_path, context=4, vocabulary=256, field="text")
        assert text_of(tokens) == b"first\0third\0fourth\0second"
        assert caplog.messages == [f"{tmp_path}: left out: 1 binary, 3 empty, 1 hidden, 1 not a file"]

    def test_an_unreadable_file_is_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "peers")
        (tmp_path / "a.txt").write_bytes(b"readable")
        (tmp_path / "b.txt").write_bytes(b"locked")
        read = Path.read_bytes

        def refuse(path: Path) -> bytes:  # file modes do not stop root, who may well run the tests
            if path.name == "b.txt":
                raise PermissionError(13, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", refuse)
        tokens = open_tokens(tmp_path, context=4, vocabulary=256)
        assert text_of(tokens) == b"readable"
        assert caplog.messages == [f"{tmp_path}: left out: 1 unreadable"]

    @pytest.mark.parametrize(("name", "dtype"), [("a.bin", "<u2"), ("a.u32.bin", "<u4")])
    def test_token_files(self, tmp_path: Path, name: str, dtype: str) -> None:
        np.array([1, 500, 2, 3], dtype=dtype).tofile(tmp_path / name)
        tokens = open_tokens(tmp_path / name, context=3, vocabulary=501)
        assert tokens.windows(np.array([0]), 4).tolist() == [[1, 500, 2, 3]]
        assert isinstance(tokens.array, np.memmap)


class TestWrongInput:
    def check(self, path: Path, message: str, context: int = 4, vocabulary: int = 256) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            open_tokens(path, context=context, vocabulary=vocabulary)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        self.check(tmp_path / "nowhere", "cannot be read")

    def test_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").touch()
        self.check(tmp_path / "a.txt", "is empty")

    def test_empty_token_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.bin").touch()
        self.check(tmp_path / "a.bin", "is empty")

    def test_empty_folder(self, tmp_path: Path) -> None:
        self.check(tmp_path, "contains no text")

    def test_folder_without_text(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\0\1")
        (tmp_path / "b").touch()
        self.check(tmp_path, "1 binary, 1 empty")

    def test_binary_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.dat").write_bytes(b"abc\0def")
        self.check(tmp_path / "a.dat", "not text")

    def test_one_token_short_of_a_context(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"abcd")
        self.check(path, "4 tokens are less")
        assert len(open_tokens(path, context=3, vocabulary=256)) == 4

    def test_torn_token_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(b"abc")
        self.check(tmp_path / "a.bin", "no whole number of uint16")

    def test_text_with_a_small_vocabulary(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"abcdef")
        self.check(tmp_path / "a.txt", "vocabulary >= 256", vocabulary=128)

    def test_an_id_beyond_the_vocabulary_is_found_where_it_is(self, tmp_path: Path) -> None:
        np.array([1, 2, 3, 4, 300, 6], dtype="<u2").tofile(tmp_path / "a.bin")
        self.check(tmp_path / "a.bin", r"a\.bin: token 4 has id 300, model\.vocabulary is 256", context=2)
        tokens = Tokens(np.array([1, 2, 3, 4, 300, 6], dtype="<u2"), "a.bin", 256)
        assert tokens.windows(np.array([0]), 3).tolist() == [[1, 2, 3]]
        with pytest.raises(ConfigError, match=r"a\.bin: token 4 has id 300, model\.vocabulary is 256"):
            tokens.windows(np.array([0, 3]), 3)

    def test_of_a_long_token_file_pieces_all_over_it_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data, "_PIECE_BYTES", 8)
        monkeypatch.setattr(data, "CHECKED_BYTES", 24)  # three pieces of four tokens
        ids = np.zeros(400, dtype="<u2")
        Tokens(ids, "a.bin", 256).check()
        for place, seen in ((0, True), (50, False), (399, True)):
            ids[:] = 0
            ids[place] = 256
            with pytest.raises(ConfigError, match=f"token {place} has id 256") if seen else nullcontext():
                Tokens(ids, "a.bin", 256).check()

    def test_jsonl_needs_the_name_of_its_field(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "one", "id": 1, "\\u001b[31mtitle": "t"}\n\n{"text": "two", "id": 2}\n')
        self.check(path, r"line 1 has fields, and one of them must be named: --field \(fields with text: text,  \[31mtitle\)")
        self.check(tmp_path, r"a\.jsonl: line 1 has fields")
        for field, message in (("body", r"line 1 has no text in the field body \(fields with text: text"), ("id", "no text")):
            with pytest.raises(ConfigError, match=message):
                open_tokens(path, context=3, vocabulary=256, field=field)
        assert text_of(open_tokens(path, context=3, vocabulary=256, field="text")) == b"one\0two"
        (tmp_path / "b.txt").write_bytes(b"three")
        assert text_of(open_tokens(tmp_path, context=3, vocabulary=256, field="text")) == b"one\0two\0three"

    @pytest.mark.parametrize(("line", "message"), [("[1]", "is no object with fields, but list"), ("{", "is not JSON")])
    def test_jsonl_that_is_none(self, tmp_path: Path, line: str, message: str) -> None:
        (tmp_path / "a.jsonl").write_text(f"{line}\n")
        self.check(tmp_path / "a.jsonl", f"line 1 {message}")

    def test_a_field_without_jsonl_has_no_effect(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"abcdef")
        for path in (tmp_path, tmp_path / "a.txt"):
            with pytest.raises(ConfigError, match=r"--field text is for \.jsonl files"):
                open_tokens(path, context=3, vocabulary=256, field="text")


class TestBatches:
    def test_shapes_and_targets_one_ahead(self) -> None:
        inputs, targets = next(Batches(row(1000), context=16, batch_size=3, seed=0))
        assert inputs.shape == targets.shape == (3, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)

    @settings(deadline=None, max_examples=examples(60))
    @given(st.integers(2, 400), st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**63 - 1))
    def test_each_pass_visits_adjacent_windows_once(self, length: int, context: int, batch: int, seed: int) -> None:
        context = min(context, length - 1)
        starts = (int(start) for inputs, _ in Batches(row(length), context, batch, seed) for start in inputs[:, 0])
        for _ in range(2):
            first = next(starts)
            offset = first % context
            size = (length - 1 - offset) // context
            assert sorted([first, *islice(starts, size - 1)]) == [offset + context * i for i in range(size)]

    def test_the_same_seed_gives_the_same_order_another_seed_another(self) -> None:
        first, second, other = (Batches(row(5000), 16, 4, seed) for seed in (1, 1, 2))
        a, b, c = (torch.cat([inputs for inputs, _ in islice(batches, 20)]) for batches in (first, second, other))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)

    def test_passes_differ(self) -> None:
        batches = Batches(row(129), context=8, batch_size=8, seed=0)
        first, second = (torch.cat([inputs for inputs, _ in islice(batches, 2)]) for _ in range(2))
        assert not torch.equal(first, second)

    @settings(deadline=None, max_examples=examples(30))
    @given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
    def test_a_saved_position_continues_the_sequence(self, before: int, batch: int, later_batch: int) -> None:
        straight = Batches(row(300), 8, 1, seed=7)
        expected = torch.cat([inputs for inputs, _ in islice(straight, before * batch + 3 * later_batch)])
        stopped = Batches(row(300), 8, batch, seed=7)
        for _ in range(before):
            next(stopped)
        resumed = Batches(row(300), 8, later_batch, seed=7)  # even with another batch size
        resumed.load(stopped.state())
        assert torch.equal(torch.cat([inputs for inputs, _ in islice(resumed, 3)]), expected[before * batch :])

    @pytest.mark.parametrize("change", [{"tokens": 299}, {"seed": 8}, {"context": 9}, {"index": 10_000}, {"pass": -1}])
    def test_a_position_in_other_data_is_refused_and_changes_nothing(self, change: dict[str, int]) -> None:
        batches = Batches(row(300), 8, 2, seed=7)
        next(batches)
        state = batches.state()
        said = "the data has changed since the checkpoint .299 tokens then, 300 now.: .* --new-data"
        with pytest.raises(ConfigError, match=said if "tokens" in change else "saved data position"):
            batches.load({**state, **change})
        with pytest.raises(ConfigError, match="saved data position"):
            batches.load({})
        assert batches.state() == state

    def test_other_data_is_begun_at_its_start_if_that_is_said(self) -> None:
        before, now, fresh = Batches(row(300), 8, 2, seed=7), Batches(row(311), 8, 2, seed=7), Batches(row(311), 8, 2, seed=7)
        next(before)
        now.load(before.state(), new_data=True)
        assert now.state() == fresh.state() and torch.equal(next(now)[0], next(fresh)[0])
        same = Batches(row(300), 8, 2, seed=7)
        same.load(before.state(), new_data=True)
        assert same.state() == before.state(), "the same data goes on where it was"
        with pytest.raises(ConfigError, match="the data has changed"):
            Batches(row(311), 8, 2, seed=8).load(before.state(), new_data=True)  # and the run's seed, too

    def test_other_data_of_the_same_length_is_other_data(self) -> None:
        before, other = Batches(row(300), 8, 2, seed=7), Tokens(row(300).array[::-1], "row", 1 << 20)
        next(before)
        now, fresh = Batches(other, 8, 2, seed=7), Batches(other, 8, 2, seed=7)
        with pytest.raises(
            ConfigError, match=r"the data has changed since the checkpoint \(other 300 tokens then\): .* --new-data"
        ):
            now.load(before.state())
        now.load(before.state(), new_data=True)
        assert now.state() == fresh.state() and torch.equal(next(now)[0], next(fresh)[0])
        older = {key: value for key, value in before.state().items() if key != "sample"}
        now.load(older)  # which does not say what the data are
        assert now.state() == {**before.state(), "sample": now.state()["sample"]}

    def test_too_little_for_one_window(self) -> None:
        with pytest.raises(ConfigError, match="less than one context"):
            Batches(row(8), 8, 1, seed=0)

    def test_the_smallest_data_gives_the_same_window_for_ever(self) -> None:
        assert [inputs.tolist() for inputs, _ in islice(Batches(row(4), 3, 1, seed=0), 3)] == [[[0, 1, 2]]] * 3


@settings(deadline=None, max_examples=examples(80))
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    out = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(out.tolist()) == list(range(size))


def test_permute_mixes() -> None:
    out = permute(np.arange(10_000, dtype=np.uint64), 10_000, key=1).astype(np.int64)
    assert abs(np.corrcoef(out, np.arange(10_000))[0, 1]) < 0.05
    assert (np.diff(out) == 1).mean() < 0.01


def test_stream_seeds_differ_by_peer_and_run() -> None:
    seeds = [stream_seed(run, peer) for run in (0, 1, 11) for peer in ("a", "b", "1a")]
    assert len(set(seeds)) == 9
    assert stream_seed(0, "a") == seeds[0]


class _Flagged(nn.Module):
    """Loss = mean of the first input token; notes whether it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls: list[tuple[bool, list[int]]] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls.append((self.training, tokens[:, 0].tolist()))
        return tokens[:, 0].double().mean() + self.weight


class TestEvaluate:
    def test_windows_are_spread_evenly_and_weighted_by_their_number(self) -> None:
        model = _Flagged().train()
        loss = evaluate(model, row(81), context=8, max_batches=3, batch_size=2)  # 10 windows available, 6 taken
        starts = [start for _, part in model.calls for start in part]
        assert starts == [0, 8, 24, 40, 48, 64]
        assert loss == pytest.approx(sum(starts) / 6)
        assert not any(training for training, _ in model.calls) and model.training

    def test_a_short_row_is_used_whole_even_with_an_uneven_last_batch(self) -> None:
        model = _Flagged().eval()
        loss = evaluate(model, row(26), context=5, max_batches=100, batch_size=2)
        assert loss == pytest.approx((0 + 5 + 10 + 15 + 20) / 5)
        assert not model.training

    def test_it_gives_nats_per_token(self) -> None:
        class Uniform(_Flagged):
            def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
                return nn.functional.cross_entropy(torch.zeros(targets.numel(), 256) + self.weight, targets.flatten())

        tokens = Tokens(np.full(100, SEPARATOR, dtype=np.uint8), "zeros", 256)
        assert evaluate(Uniform(), tokens, context=9, max_batches=2) == pytest.approx(math.log(256))

    def test_the_training_flag_survives_an_error(self) -> None:
        class Broken(_Flagged):
            def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
                raise RuntimeError("broken")

        model = Broken().train()
        with pytest.raises(RuntimeError, match="broken"):
            evaluate(model, row(50), context=5, max_batches=1)
        assert model.training
