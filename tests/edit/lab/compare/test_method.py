from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edit.config.presets import PRESETS
from edit.errors import ConfigError
from edit.lab.compare.corpus import Text as Texts
from edit.lab.compare.corpus import TextOptions, streams
from edit.lab.compare.intervals import half_width, mean_text
from edit.lab.compare.method import Length, read_method
from peers.training.data import Tokens

LENGTH = Length(peers=4, steps=120, every=30)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_compared(name: str) -> None:
    method = read_method(name, LENGTH)
    config = method.config(7)
    assert (config.seed, config.sync.stretches[-1][1]) == (7, 30)
    assert config.sync.inner_steps_before(config.sync.outer_steps) == 120


def test_settings_behind_a_name_win_over_those_for_all() -> None:
    method = read_method("diloco outer.lr=0.9 sync.every=60 compare.warmup=0.5", LENGTH, ["outer.lr=0.5", "model.width=64"])
    config = method.config(0)
    assert (config.outer.lr, config.outer.momentum, config.model.width) == (0.9, 0.9, 64)
    assert (config.sync.every, config.sync.outer_steps) == (60, 2)
    assert method.harness == {"warmup": 0.5}


def test_h_may_change_within_the_steps_of_the_comparison() -> None:
    sync = read_method("diloco 'sync.milestones=[[1, 15], [3, 60]]'", LENGTH).config(0).sync
    assert (sync.every, sync.outer_steps) == (30, 4) and sync.inner_steps_before(4) == 120
    sync = read_method("diloco sync.groups=2 'sync.milestones=[[2, 60]]'", LENGTH).config(0).sync
    assert (sync.outer_steps, sync.inner_steps_before(5)) == (5, 120)


def test_each_arrival_is_an_outer_step() -> None:
    for name, outer_steps in (("diloco", 4 * 4), ("snoo", 4)):
        text = f"{name} rounds.merging=arrivals rounds.max_staleness=8"
        assert read_method(text, LENGTH).config(0).sync.outer_steps == outer_steps


def test_a_presets_warm_up_is_whole_h_and_gives_way_to_settings() -> None:
    def stretches(text: str, steps: int = 1200) -> object:
        config = read_method(text, Length(peers=4, steps=steps, every=30)).config(0)
        return config.sync.stretches, config.outer.mean_steps

    assert stretches("muloco-warmup") == ([(120, 1), (36, 30)], 120)
    assert stretches("muloco-warmup", 90) == ([(3, 30)], 0), "a tenth is less than half an H"
    assert stretches("muloco-warmup sync.milestones=[[10,60]]") == ([(10, 30), (15, 60)], 0)
    assert stretches("muloco-warmup sync.every=60") == ([(120, 1), (18, 60)], 120)
    assert stretches("muloco-warmup compare.warmup=0.1") == ([(40, 30)], 0), "data-parallel instead"
    assert stretches("post-local-sgd") == ([(40, 30)], 0)


def test_a_run_toml_keeps_its_own_h(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[sync]\nevery = 40\nouter_steps = 1000\n[outer]\noptimizer = "sgd"\nlr = 1.0\n[server]\nlisten = "h:1"\n')
    config = read_method(str(file), LENGTH).config(0)
    assert (config.sync.every, config.sync.outer_steps, config.outer.optimizer) == (40, 3, "sgd")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dilocco", "did you mean diloco"),
        ("diloco seed=3", "follows from --peers, --steps and --seeds"),
        ("diloco sync.every=50", "must be a multiple of sync.every"),
        ("diloco sync.milestones=[[2,7]]", "must end with an outer step"),
        ("post-local-sgd sync.milestones=[[2,60]]", "compare.warmup has no effect with sync.milestones"),
        ("diloco outer.moment=1", "did you mean outer.momentum"),
        ("diloco compare.warm=1", "known keys: warmup"),
        ("diloco compare.warmup=1", "must be below 1"),
        ("demo-optimizer compare.chunk=256", "compare.chunk = 256: must be a whole number from 1 to 181"),
        ("demo-optimizer compare.chunk=0", "compare.chunk = 0: must be a whole number from 1 to 181"),
        ("demo-optimizer compare.chunk=64.5", "compare.chunk = 64.5: must be a whole number from 1 to 181"),
        ("demo-optimizer compare.topk=0", "compare.topk = 0: must be a whole number from 1 to 32761"),
        ("data-parallel compare.warmup=0.1", "has no effect without an exchange"),
        ("muloco-warmup sync=3", r"sync: must be a table"),
        ("muloco-warmup outer=3", r"outer: must be a table"),
        ("diloco rounds=3", r"rounds: must be a table"),
        ("post-local-sgd outer.momentum=0.9", "outer.momentum has no effect"),
        ("missing/run.toml", "cannot be read"),
        ("diloco robust.trust=loss", "robust.trust = 'loss': no peer scores in the harness"),
        ("diloco 'open", "must be NAME, or NAME KEY=VALUE"),
        ("diloco model.name=hf:llama", "the harness trains builtin:gpt"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_method(text, LENGTH)


def test_the_data_parallel_phase_is_whole_rounds() -> None:
    assert read_method("post-local-sgd", LENGTH).share_of(1200, 30) == 120
    assert read_method("post-local-sgd compare.warmup=0.3", LENGTH).share_of(100, 30) == 30
    assert read_method("diloco", LENGTH).share_of(1200, 30) == 0


def row(length: int = 4000) -> Tokens:
    return Tokens((np.arange(length) % 97).astype(np.uint8), "text", 256)


def test_damage_is_the_last_peers_alone_and_the_same_for_every_method() -> None:
    text = Texts((row(), row()), row())
    options = TextOptions(random_from=0.5, random_to=0.75, label_noise=0.25)
    clean, hurt, again = (streams(text, each, 8, 4, 8, 0) for each in (TextOptions(), options, options))
    for step in range(8):
        (first, first_targets), (good, good_targets) = next(clean[0]), next(clean[1])
        (same, same_targets), (bad, bad_targets) = next(hurt[0]), next(hurt[1])
        assert torch.equal(first, same) and torch.equal(first_targets, same_targets)
        repeated = next(again[1])
        assert torch.equal(repeated[0], bad) and torch.equal(repeated[1], bad_targets)
        assert torch.equal(good, bad) is (step not in (4, 5))
        if step in (4, 5):
            assert int(bad.max()) > 96
        else:
            assert 0.05 < float((good_targets != bad_targets).float().mean()) < 0.6


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"label_noise": 1.5}, "--label-noise"),
        ({"small": 0.0}, "--small"),
        ({"random_to": 2.0}, "--random-bytes"),
        ({"random_from": 0.6, "random_to": 0.5}, "--random-bytes"),
    ],
)
def test_impossible_damage_is_refused(values: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} = "):
        TextOptions(**values)  # type: ignore[arg-type]


def test_intervals_are_students() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert mean_text([0.5]) == "+0.500" and mean_text([]) == "" and mean_text([1.0, 1.0]) == "+1.000 +- 0.000"


@pytest.mark.parametrize("name", ["eager", "a-edit", "co2", "diloco"])
def test_what_follows_from_h_follows_from_a_methods_own(name: str) -> None:
    of_30, of_60 = (read_method(f"{name} sync.every=6_0", Length(peers=4, steps=120, every=every)) for every in (30, 60))
    assert of_30 == of_60
