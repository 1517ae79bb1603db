"""A run as one peer of the run above it, both in this process, against a naive computation of two levels."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import (
    CodecConfig,
    OuterConfig,
    PenaltyConfig,
    PrivacyConfig,
    RoundsConfig,
    RunConfig,
    SecaggConfig,
    StorageConfig,
    SyncConfig,
)
from edit.errors import ConfigError, LocalProtocolError, RefusedError, RemoteProtocolError, StaleError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
from edit.local import LocalRun
from edit.merging.injection import Injected, Injection
from edit.records import Contribution
from edit.regional_peer import Below, OuterModule, RegionalPeer, _check_fit
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.regions import ABOVE, EVERY, Inner, Site, upper_config
from tests.support.scripted_peer import flat
from tests.support.trainee import EXACT, config


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in zip(a, b, strict=True))


class Naive:
    """Two levels, by the book. theta: above; below: by region; each peer starts a round from its region's parameters."""

    def __init__(self, seeds: Mapping[str, list[int]]) -> None:
        self.theta = flat(small_mlp(seed=0))
        self.below = {name: flat(small_mlp(seed=0)) for name in seeds}
        self.missing = {name: [torch.zeros_like(part) for part in self.theta] for name in seeds}
        self.batches = {seed: regression_batches(seed) for peers in seeds.values() for seed in peers}
        self.seeds = seeds

    def turn(self) -> None:
        """Each region's peers train; their mean, and what came from above meanwhile, is the region's; then the mean above."""
        for name, seeds in self.seeds.items():
            trained = [train(self.below[name], self.batches[seed]) for seed in seeds]
            mean = [sum(parts) / len(seeds) for parts in zip(*trained, strict=True)]
            self.below[name] = [a + b for a, b in zip(mean, self.missing[name], strict=True)]
        self.theta = [sum(parts) / len(self.seeds) for parts in zip(*self.below.values(), strict=True)]
        self.missing = {name: [a - b for a, b in zip(self.theta, own, strict=True)] for name, own in self.below.items()}


def train(start: list[Tensor], batches: Iterator[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model = small_mlp(seed=0)
    with torch.no_grad():
        vector = torch.cat(start)
        for parameter in model.parameters():
            parameter.copy_(vector[: parameter.numel()].view(parameter.shape))
            vector = vector[parameter.numel() :]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(EVERY):
        train_step(model, optimizer, next(batches))
    return flat(model)


def two_sites(above: RunConfig | None = None) -> tuple[LocalRun, Site, Site]:
    above = above or upper_config()
    upper = LocalRun(above, ["east", "west"])
    return upper, Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])


def turns(update_points: tuple[Site, ...], times: int) -> None:
    for _ in range(times):
        for site in update_points:
            site.turn()
        for site in update_points:
            site.hand_down()


def test_two_regions_of_two_peers_are_the_two_level_mean_of_all_four() -> None:
    upper, east, west = two_sites()
    naive = Naive({"east": [1, 2], "west": [3, 4]})
    for turn in range(1, 7):
        turns((east, west), 1)
        naive.turn()
        assert upper.state.outer_step == turn
        assert close(upper.state.theta, naive.theta)
        assert close(east.run.state.theta, naive.below["east"]) and close(west.run.state.theta, naive.below["west"])
    assert not close(east.run.state.theta, west.run.state.theta, 1e-3)  # each has its own progress since


def test_after_the_first_turn_the_run_above_is_the_mean_of_all_four_peers() -> None:
    upper, east, west = two_sites()
    turns((east, west), 1)
    peers = [flat(peer.model) for site in (east, west) for peer in site.peers]
    mean = [sum(parts) / 4 for parts in zip(*peers, strict=True)]
    assert close(upper.state.theta, mean)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("up", "down"), [("int8", "bf16"), ("int4", "e3m0"), ("topk:k=9", "stat2"), ("sign", "topk")])
def test_what_is_in_below_leaves_nothing_and_p_is_then_the_same_bits(up: str, down: str) -> None:
    _, east, west = two_sites(upper_config(codec=CodecConfig(up=up, down=down)))
    for _ in range(4):
        turns((east, west), 1)
        assert east.region.injection() is not None
        east.turn()
        west.turn()
        ours = east.region._whole()
        assert all(torch.equal(a, b) for a, b in zip(ours, east.run.state.theta, strict=True))
        for site in (east, west):
            site.hand_down()


@pytest.mark.parametrize("below_too", [False, True])
def test_regions_mask_their_contributions_above_and_their_peers_below(below_too: bool) -> None:
    """The sums are those without masks, but for the 32-bit grid."""
    masks: dict[str, object] = {
        "secagg": SecaggConfig(enabled=True, bits=32, max_peers=4),
        "rounds": RoundsConfig(start_peers=3, quorum=3),
        "codec": CodecConfig(down="fp32"),
    }
    above = upper_config(**masks)
    seeds = {"east": [1, 2, 7], "west": [3, 4, 8], "north": [5, 6, 9]}
    upper, naive = LocalRun(above, list(seeds)), Naive(seeds)
    sites = tuple(Site(upper, above, name, of, **masks if below_too else {"codec": EXACT}) for name, of in seeds.items())
    for turn in range(1, 6):
        turns(sites, 1)
        naive.turn()
        assert upper.state.outer_step == turn
        assert close(upper.state.theta, naive.theta)
        assert all(close(site.run.state.theta, naive.below[site.name]) for site in sites)
    site = sites[0]
    turns(sites, 1)
    site.turn()
    assert all(torch.equal(a, b) for a, b in zip(site.region._whole(), site.run.state.theta, strict=True))


def test_a_region_in_a_masked_run_goes_on_where_it_was_and_sends_what_is_new_once() -> None:
    masks = {"secagg": SecaggConfig(enabled=True, bits=32, max_peers=4), "rounds": RoundsConfig(start_peers=3, quorum=3)}
    above = upper_config(codec=CodecConfig(down="fp32"), sync=SyncConfig(every=2 * EVERY, outer_steps=1000), **masks)
    upper = LocalRun(above, ["east", "west", "north"])
    sites = tuple(Site(upper, above, name, [i, i + 5]) for i, name in enumerate(("east", "west", "north")))
    turns(sites, 3)
    east = sites[0]
    progress = [a - b for a, b in zip(east.run.state.theta, upper.state.theta, strict=True)]
    east.crash()
    east.join()
    assert close([a - b for a, b in zip(east.region._whole(), upper.state.theta, strict=True)], progress, 0.0)
    turns(sites, 1)
    assert upper.state.outer_step == 2
    mean = [sum(parts) / 3 for parts in zip(*(site.run.state.theta for site in sites), strict=True)]
    assert close(upper.state.theta, mean)


def test_the_run_above_may_exchange_less_often() -> None:
    above = upper_config(sync=SyncConfig(every=2 * EVERY, outer_steps=1000))
    upper, east, west = two_sites(above)
    turns((east, west), 1)
    assert upper.state.outer_step == 0 and not east.region.worker.pending
    turns((east, west), 1)
    assert upper.state.outer_step == 1
    peers = [site.run.state.theta for site in (east, west)]
    assert close(upper.state.theta, [(a + b) / 2 for a, b in zip(*peers, strict=True)])


def test_a_region_counts_the_inner_steps_and_tokens_of_the_run_below() -> None:
    upper, east, west = two_sites(upper_config(sync=SyncConfig(every=2 * EVERY, outer_steps=1000)))
    turns((east, west), 2)
    assert east.region.worker.inner_steps == 2 * EVERY
    assert upper.tokens == 2 * 200


def test_with_privacy_of_organisations_a_region_counts_the_tokens_of_the_settings_not_those_that_its_data_let_in() -> None:
    """All members see them, and with a penalty or inner.batch_growth below they depend on the site's data."""
    noise = PrivacyConfig(level="organisation", delta=1e-5, epsilon_max=4, noise_multiplier=12.0)
    above = upper_config(penalty=PenaltyConfig(enabled=False))
    upper = LocalRun(above, ["east"])
    site = Site(upper, dataclasses.replace(above, privacy=noise), "east", [1])
    turns((site,), 1)
    inner = site.config.inner
    assert upper.tokens == EVERY * inner.batch_size * inner.accumulation * site.config.model.context != 100


def claimed(monkeypatch: pytest.MonkeyPatch, upper: LocalRun) -> dict[str, list[Contribution]]:
    """What each peer of the run above contributes of the first fragment from now on, by peer."""
    seen: dict[str, list[Contribution]] = {}
    contribute = LocalRun.contribute

    def noting(run: LocalRun, peer_id: str, contribution: Contribution) -> bool:
        if run is upper and contribution.fragment_id == 0:
            seen.setdefault(peer_id, []).append(contribution)
        return contribute(run, peer_id, contribution)

    monkeypatch.setattr(LocalRun, "contribute", noting)
    return seen


def test_a_contribution_says_all_inner_steps_behind_it_however_many_commits_below_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    west.train(5)
    seen = claimed(monkeypatch, upper)
    west.region.moved(west.below())
    east.turn()
    assert [one.inner_steps for one in seen["west"]] == [5 * EVERY] and [one.tokens for one in seen["west"]] == [500]
    assert [one.inner_steps for one in seen["east"]] == [EVERY]


def test_a_region_that_is_ahead_trains_on_and_keeps_what_it_did_since() -> None:
    upper, east, west = two_sites()
    east.turn()
    assert east.region.worker.pending
    sent = east.region._whole()
    east.region.catch_up()
    east.train()
    later = copy.deepcopy(east.run.state.theta)
    west.turn()
    east.region.moved(east.below())
    west.hand_down()
    east.hand_down()
    assert upper.state.outer_step == 1
    since = [a - b for a, b in zip(later, sent, strict=True)]
    assert close(east.region._whole(), [a + b for a, b in zip(upper.state.theta, since, strict=True)])


def test_a_region_that_missed_commits_above_follows_and_loses_nothing() -> None:
    upper, east, west = two_sites()
    turns((east, west), 1)
    east.turn()
    upper.close("nobody waits for the west")
    east.hand_down()
    west.turn()
    before = west.run.state.theta
    west.hand_down()
    assert upper.state.outer_step == 2 and west.region.worker.outer_step == 2
    progress = [a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)]
    assert not close(progress, [torch.zeros_like(part) for part in progress], 1e-4) and before


def test_a_region_does_not_wait_for_the_run_above() -> None:
    upper, east, west = two_sites()
    turns((east, west), 1)
    east.turn()
    east.train(2)
    east.region.moved(east.below())  # two commits further below, and the west has contributed nothing
    assert east.region.worker.pending and upper.state.outer_step == 1
    later = copy.deepcopy(east.run.state.theta)
    west.turn()
    east.hand_down()
    east.turn()  # what was done meanwhile is contributed with the next commit
    assert upper.state.outer_step == 2 and east.region.worker.pending
    west.turn()
    east.region.catch_up()
    assert close(east.region._whole(), upper.state.theta) and not close(later, upper.state.theta, 1e-4)


def held(region: RegionalPeer) -> int:
    """The tensors that are kept of injections."""
    return len({part.data_ptr() for one in region._sent.values() for part in one.fragments.values()})


@pytest.mark.parametrize("takes", [True, False])
def test_a_run_below_that_stands_still_costs_no_more_memory_with_each_outer_step_above(takes: bool) -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    west.turn()
    upper.leave("west")
    for _ in range(10):
        east.turn()
        east.hand_down()
        if takes:
            west.hand_down()
        else:
            west.region.catch_up()
            west.region.injection()
        assert held(west.region) <= 2 * len(upper.state.theta)
    west.hand_down()
    west.turn()
    injected = west.run.state.injected
    assert injected is not None and injected.upper_step == (upper.state.outer_step if takes else 3)
    for _ in range(2):
        west.hand_down()
        west.turn()
    assert close(west.run.state.theta, west.region._whole(), 0.0)
    assert west.region.injection() is None


@pytest.mark.parametrize("lost", [False, True])
def test_whichever_of_two_injections_comes_in_the_region_knows_it(lost: bool) -> None:
    """A newer one is on its way, and the one before that was taken comes in, or it was replaced in time."""
    upper, east, west = two_sites()
    turns((east, west), 2)
    older = west.run._injection
    east.turn()
    upper.close("nobody waits for the west")
    west.region.catch_up()
    assert older is not None
    newer = west.region.injection(older.brings)
    assert newer is not None and newer.brings.upper_step == 3
    if not lost:
        west.run.inject(newer)
    west.turn()
    assert west.run.state.injected == (older if lost else newer).brings
    for _ in range(2):
        west.hand_down()
        west.turn()
    assert west.region.injection() is None and all(map(torch.equal, west.region._whole(), west.run.state.theta))


def test_an_injection_says_which_work_it_has_when_two_commits_above_come_at_once() -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    west.turn()
    east.turn()  # commits both
    east.hand_down()
    east.turn()
    upper.close("nobody waits for the west")
    west.hand_down()
    assert west.region.worker.outer_step == 4
    injection = west.region.injection()
    assert injection is not None and injection.brings == Injected(ABOVE, 4, 3)


def test_an_injection_says_which_work_it_has_when_the_next_is_contributed_at_once() -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    west.turn()
    west.region.catch_up()
    west.train()
    east.turn()
    west.region.catch_up = lambda: False  # type: ignore[method-assign]  # not before the next contribution
    west.region.moved(west.below())
    assert upper.state.outer_step == 3 and west.region.worker.pending
    injection = west.region.injection()
    assert injection is not None and injection.brings == Injected(ABOVE, 3, 3)


# A fresh run below, and coming back.


def trained_above() -> tuple[LocalRun, RunConfig]:
    """A run above that has advanced, with another region."""
    above = upper_config()
    upper = LocalRun(above, ["east", "west"])
    east = Site(upper, above, "east", [1, 2])
    upper.leave("west")
    turns((east,), 3)
    assert upper.state.outer_step == 3
    east.crash()
    upper.leave("east")
    return upper, above


def test_a_fresh_run_below_takes_the_parameters_above_and_never_becomes_the_model() -> None:
    upper, above = trained_above()
    before = [part.clone() for part in upper.state.theta]
    west = Site(upper, above, "west", [3, 4], model_seed=7)
    assert west.region.fresh
    west.train(2)  # from a random start, worth nothing
    west.region.moved(west.below())
    west.hand_down()
    assert west.region.fresh and upper.state.outer_step == 3
    west.turn()
    assert not west.region.fresh
    assert close(west.run.state.theta, before, 1e-6)  # not even the round that it came with is added
    assert close(upper.state.theta, before, 0.0) and not west.region.worker.pending
    west.hand_down()
    west.turn()
    west.hand_down()
    progress = [a - b for a, b in zip(upper.state.theta, before, strict=True)]
    assert upper.state.outer_step == 4 and not close(upper.state.theta, before, 1e-4)
    assert close(progress, [a - b for a, b in zip(west.run.state.theta, before, strict=True)], 1e-5)


def test_the_founder_of_the_run_above_need_not_take_it() -> None:
    above = upper_config()
    upper = LocalRun(above, ["east"])
    site = Site(upper, above, "east", [1, 2], model_seed=5)
    assert not site.region.fresh
    injection = site.region.injection()
    assert injection is not None and not injection.fragments and not injection.replaces
    site.hand_down()
    site.turn()
    assert site.run.state.injected == Injected(ABOVE, 0, 0)


def test_a_restarted_region_goes_on_where_it_was() -> None:
    upper, east, west = two_sites(upper_config(sync=SyncConfig(every=2 * EVERY, outer_steps=1000)))
    turns((east, west), 3)
    assert east.run.state.injected == Injected(ABOVE, 1, 2)
    progress = [a - b for a, b in zip(east.run.state.theta, upper.state.theta, strict=True)]
    east.crash()
    east.join()
    assert east.region.worker.inner_steps == EVERY  # of the commit below that is not above yet
    ours = [a - b for a, b in zip(east.region._whole(), upper.state.theta, strict=True)]
    assert close(ours, progress, 0.0)
    turns((east, west), 1)
    assert upper.state.outer_step == 2
    assert close(upper.state.theta, [(a + b) / 2 for a, b in zip(east.run.state.theta, west.run.state.theta, strict=True)])


def test_a_region_that_was_away_while_others_went_on_keeps_its_own_progress() -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    east.turn()
    west.turn()  # both sent, committed
    east.hand_down()
    west.hand_down()
    west.train()
    west.region.moved(west.below())  # in with it
    progress = [a - b for a, b in zip(west.run.state.theta, upper.state.theta, strict=True)]
    theta = [part.clone() for part in upper.state.theta]
    west.crash()
    upper.leave("west")
    east.turn()
    east.hand_down()
    assert upper.state.outer_step == 4
    west.join()
    moved = [a - b for a, b in zip(upper.state.theta, theta, strict=True)]
    ours = [a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)]
    assert close(ours, progress, 1e-6) and not close(moved, [torch.zeros_like(part) for part in moved], 1e-4)
    injection = west.region.injection()
    assert injection is not None and close([injection.fragments[i] for i in range(2)], moved, 1e-6)


def test_what_was_done_below_after_a_contribution_that_is_above_goes_on_top() -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    east.turn()
    west.turn()
    assert upper.state.outer_step == 3 and west.memory.times == 3
    sent = [part.clone() for part in west.run.state.theta]
    west.crash()  # it has contributed, and could not hand down what came of it
    west.train(2)
    since = [a - b for a, b in zip(west.run.state.theta, sent, strict=True)]
    west.join()
    ours = [a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)]
    assert close(ours, since, 1e-6) and not close(since, [torch.zeros_like(part) for part in since], 1e-3)
    assert west.region.worker.inner_steps == 2 * EVERY and west.region.worker.pending  # at once, all there is
    for site in (east, west):
        site.hand_down()
    east.turn()  # and with it the next commit above
    west.turn()
    assert west.run.state.injected == Injected(ABOVE, 3, 3) and upper.state.outer_step == 4


def test_what_is_no_longer_kept_above_costs_at_most_what_was_sent() -> None:
    upper, east, west = two_sites(upper_config(storage=StorageConfig(keep_updates=1)))
    turns((east, west), 2)
    west.train()
    west.region.moved(west.below())
    sent = [part.clone() for part in west.run.state.theta]
    west.crash()
    upper.leave("west")
    for _ in range(3):
        east.turn()
        east.hand_down()
    west.train()
    since = [a - b for a, b in zip(west.run.state.theta, sent, strict=True)]
    west.join()
    ours = [a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)]
    assert close(ours, since, 1e-6)


def test_without_its_memory_what_may_be_above_already_is_not_counted_again() -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    east.turn()
    west.turn()
    assert upper.state.outer_step == 3
    west.crash()
    west.memory.last = None
    west.join()
    assert close(west.region._whole(), upper.state.theta, 0.0)
    west.hand_down()
    east.hand_down()
    turns((east, west), 1)
    assert upper.state.outer_step == 4


@pytest.mark.parametrize("codec", [EXACT, CodecConfig(up="topk:k=9", down="fp32")])
def test_a_region_that_is_restarted_while_a_round_waits_makes_the_same_contribution_once_more(
    codec: CodecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run above may have it already, and keeps that one."""
    upper, east, west = two_sites(upper_config(codec=codec))
    turns((east, west), 3)
    seen = claimed(monkeypatch, upper)
    west.turn()
    sent = copy.deepcopy(west.run.state.theta)
    west.crash()
    west.train(2)
    since = [a - b for a, b in zip(west.run.state.theta, sent, strict=True)]
    west.join()
    first, again = seen["west"]
    assert bytes(first.payload.data) == bytes(again.payload.data)
    assert (first.inner_steps, first.tokens) == (again.inner_steps, again.tokens) == (EVERY, 100)
    assert west.memory.last is not None and west.memory.last.lower_step == 4 and west.region.worker.pending
    east.turn()
    west.region.catch_up()
    assert upper.state.outer_step == 4
    assert close([a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)], since, 1e-6)
    injection = west.region.injection()
    assert injection is not None and injection.brings == Injected(ABOVE, 4, 4)
    west.turn()
    assert (seen["west"][-1].inner_steps, seen["west"][-1].tokens) == (3 * EVERY, 300)


@pytest.mark.parametrize("merged", [False, True])
def test_a_region_is_restarted_before_it_brought_down_what_its_contribution_was_computed_against(merged: bool) -> None:
    upper, east, west = two_sites()
    turns((east, west), 2)
    east.turn()
    upper.close("nobody waits for the west")
    east.hand_down()
    west.region.catch_up()
    west.turn()
    assert west.run.state.injected == Injected(ABOVE, 2, 2) and west.memory.last is not None
    assert west.memory.last.upper_step == upper.state.outer_step == 3
    sent = copy.deepcopy(west.run.state.theta)
    if merged:
        east.turn()
    west.crash()
    west.train()
    since = [a - b for a, b in zip(west.run.state.theta, sent, strict=True)]
    west.join()
    if not merged:
        east.turn()
    west.region.catch_up()
    assert upper.state.outer_step == 4
    assert close([a - b for a, b in zip(west.region._whole(), upper.state.theta, strict=True)], since, 1e-6)


@pytest.mark.parametrize("known", ["all", "no tokens", "nothing"])
def test_a_restarted_region_says_the_tokens_of_what_it_contributes(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upper, east, west = two_sites()
    turns((east, west), 3)
    west.turn()
    east.turn()
    east.hand_down()
    west.hand_down()
    west.crash()
    last = west.memory.last
    assert last is not None and (last.lower_tokens, last.tokens) == (400, 100)
    west.memory.last = None if known == "nothing" else dataclasses.replace(last, lower_tokens=None) if known != "all" else last
    west.train()
    seen = claimed(monkeypatch, upper)
    west.join()
    assert [(one.inner_steps, one.tokens) for one in seen["west"]] == [(EVERY, 100)]


def test_a_contribution_that_is_repeated_from_an_older_file_has_its_share_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, east, west = two_sites()
    turns((east, west), 3)
    seen = claimed(monkeypatch, west.upper)
    west.turn()
    west.crash()
    assert west.memory.last is not None
    west.memory.last = dataclasses.replace(west.memory.last, lower_tokens=None, tokens=0)
    west.train()
    west.join()
    assert [one.tokens for one in seen["west"]] == [100, 100]


def test_what_was_contributed_too_late_is_counted_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    upper, east, west = two_sites()
    turns((east, west), 3)
    west.turn()
    west.crash()
    upper.leave("west")
    east.turn()
    west.train()
    seen = claimed(monkeypatch, upper)
    west.join()
    assert [(one.inner_steps, one.tokens) for one in seen["west"]] == [(2 * EVERY, 200)]


def test_a_restart_keeps_the_work_in_the_groups_that_the_last_commit_above_did_not_exchange() -> None:
    upper, east, west = two_sites(upper_config(sync=SyncConfig(every=2 * EVERY, outer_steps=1000, groups=2)))
    turns((east, west), 4)
    east.turn()
    west.turn()
    (due,) = set(range(2)) - set(upper.state.due)  # what was merged just now
    assert upper.state.outer_step == 5
    theta = upper.state.theta
    progress = [a - b for a, b in zip(west.run.state.theta, theta, strict=True)]
    west.crash()
    west.join()
    ours = [a - b for a, b in zip(west.region._whole(), theta, strict=True)]
    assert float(ours[due].norm()) < 1e-6 and float(ours[1 - due].norm()) > 1e-2
    assert close([ours[1 - due]], [progress[1 - due]], 1e-6)


def test_a_restarted_region_owes_what_its_codec_left_out() -> None:
    upper, east, west = two_sites(upper_config(codec=CodecConfig(up="topk:k=2", down="fp32")))
    turns((east, west), 3)
    owed = {i: part.clone() for i, part in west.region.worker.residuals.items()}
    assert owed and west.memory.last_owed is not None and west.memory.last_owed.upper_step == upper.state.outer_step
    west.crash()
    west.train()
    west.join()
    again = west.region.worker.residuals
    assert again.keys() == owed.keys() and all(torch.equal(again[i], owed[i]) for i in owed)
    east.turn()
    west.crash()  # it did not see the commit, which has what was owed
    west.join()
    assert upper.state.outer_step == 4 and not west.region.worker.residuals


class Coordinator(LocalRun):
    """It holds the contribution of a peer that joins again, as a coordinator does."""

    def _discard(self, peer_id: str) -> None:
        if peer_id in self._present:
            self._lost.pop(peer_id, None)
        else:
            super()._discard(peer_id)


def own(site: Site) -> list[Tensor]:
    """What a region has beyond the run above."""
    return [a - b for a, b in zip(site.region._whole(), site.upper.state.theta, strict=True)]


def kept_back(monkeypatch: pytest.MonkeyPatch, upper: LocalRun, site: Site) -> Contribution:
    """The site's turn; of its contribution above the last fragment is still on its way."""
    contribute, late = LocalRun.contribute, list[Contribution]()

    def but_the_last(run: LocalRun, peer_id: str, contribution: Contribution) -> bool:
        if run is upper and contribution.fragment_id == len(upper.state.theta) - 1:
            late.append(contribution)
            return True
        return contribute(run, peer_id, contribution)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRun, "contribute", but_the_last)
        site.turn()
    (last,) = late
    return last


@pytest.mark.covering
@pytest.mark.parametrize("missed", [0, 2], ids=["its commit", "a snapshot"])
@pytest.mark.parametrize("codec", [EXACT, CodecConfig(up="topk:k=9", down="fp32")], ids=["exact", "topk"])
def test_a_contribution_that_is_carried_over_while_its_region_is_restarted_counts_once(
    codec: CodecConfig, missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run above refuses another one meanwhile, then merges it, and nobody waits for that."""
    above = upper_config(codec=codec, rounds=RoundsConfig(max_staleness=1), storage=StorageConfig(keep_updates=1))
    upper = Coordinator(above, ["east", "west"])
    east, west = Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])
    turns((east, west), 2)
    last = kept_back(monkeypatch, upper, west)
    east.turn()
    upper.close("nobody waits for the west")
    upper.contribute("west", last)
    east.hand_down()
    sent = copy.deepcopy(west.run.state.theta)
    west.crash()
    west.train(2)
    since = [a - b for a, b in zip(west.run.state.theta, sent, strict=True)]
    west.join()
    west.region.catch_up()
    assert not west.region.worker.pending and bool(west.region.worker.residuals) is (codec is not EXACT)
    assert not close(own(west), since, 1e-3)  # the work that was sent is in it
    east.turn()
    assert upper.state.outer_step == 4 and upper._commits[-1].has("west")
    for _ in range(missed):
        east.hand_down()
        east.turn()
        upper.close("nobody waits for the west")
    west.region.catch_up()
    assert west.region.worker.outer_step == upper.state.outer_step == 4 + missed
    assert close(own(west), since, 1e-6) and not west.region.worker.residuals
    injection = west.region.injection()
    assert injection is not None and injection.brings == Injected(ABOVE, 4 + missed, 3)
    west.hand_down()
    west.turn()
    assert close(west.region._whole(), west.run.state.theta, 0.0) and west.region.worker.pending


def test_of_a_contribution_that_is_carried_over_only_the_work_that_a_restored_run_below_has_is_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run below goes back to before the last of the work that was sent."""
    above = upper_config(
        codec=EXACT,
        sync=SyncConfig(every=2 * EVERY, outer_steps=1000),
        rounds=RoundsConfig(max_staleness=1),
        storage=StorageConfig(keep_updates=8),
    )
    upper = Coordinator(above, ["east", "west"])
    east, west = Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])
    for _ in range(2):
        turns((east, west), 2)
    west.turn()
    older = copy.deepcopy(west.below())
    last = kept_back(monkeypatch, upper, west)
    for _ in range(2):
        east.turn()
    upper.close("nobody waits for the west")
    upper.contribute("west", last)
    east.hand_down()
    west.crash()
    monkeypatch.setattr(west, "below", lambda: older)
    west.join()
    west.region.catch_up()
    assert not west.region.worker.pending and not close(own(west), [torch.zeros_like(part) for part in own(west)], 1e-3)
    for _ in range(2):
        east.turn()
    assert upper._commits[-1].has("west")
    west.region.catch_up()
    assert close(own(west), [torch.zeros_like(part) for part in own(west)], 1e-6), "all that the run below has is merged"


@pytest.mark.parametrize("merged", [True, False])
def test_a_masked_contribution_counts_once_if_its_region_is_restarted_and_has_no_keys_of_the_round(
    merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others open the sum with it, or without: then the work in it is still to be contributed, also after a snapshot."""
    above = upper_config(
        codec=CodecConfig(down="fp32"),
        secagg=SecaggConfig(enabled=True, bits=32, max_peers=4),
        rounds=RoundsConfig(start_peers=3, quorum=3),
        storage=StorageConfig(keep_updates=1),
    )
    names = ("east", "west", "north", "south")
    upper = Coordinator(above, names)
    east, west, north, south = sites = [Site(upper, above, name, [i, i + 4], codec=EXACT) for i, name in enumerate(names)]
    turns(tuple(sites), 2)
    west.turn()
    sent = copy.deepcopy(west.run.state.theta)
    theta = [part.clone() for part in upper.state.theta]
    west.crash()
    west.train()
    with monkeypatch.context() as patch:
        patch.setattr(LocalRun, "plan", lambda run, outer_step: None)
        west.join()
    assert not west.region.worker.pending
    start = sent if merged else theta
    expected = [a - b for a, b in zip(west.run.state.theta, start, strict=True)]
    if not merged:
        upper._drop("west")
    for outer_step in (3,) if merged else (3, 4, 5):
        for site in (east, north, south):
            site.turn()
            site.hand_down()
        if upper.state.outer_step < outer_step:
            upper.close("nobody waits for the west")
        if outer_step == 3:
            west.region.catch_up()
    west.region.catch_up()
    assert west.region.worker.outer_step == upper.state.outer_step and upper._commits[-1].has("west") is merged
    assert close(own(west), expected, 1e-5) and not close(expected, [torch.zeros_like(part) for part in theta], 1e-3)


# What does not fit.


def test_the_run_above_must_exchange_at_a_multiple() -> None:
    above = upper_config(sync=SyncConfig(every=EVERY + 1, outer_steps=10))
    with pytest.raises(ConfigError, match="every 4 inner steps, the run below every 3"):
        Site(LocalRun(above, ["east"]), above, "east", [1])


def test_the_run_above_exchanges_by_steps() -> None:
    above = SyncConfig(every=EVERY, outer_steps=10, schedule="time", time_s=60.0)
    with pytest.raises(ConfigError, match=r"sync\.schedule = .time.: the run above exchanges by time"):
        _check_fit(RunConfig(sync=above), RunConfig(sync=SyncConfig(every=EVERY)))


@pytest.mark.parametrize("which", ["above", "below"])
def test_a_region_needs_one_h(which: str) -> None:
    changing = SyncConfig(every=EVERY, outer_steps=10, milestones=((2, 2 * EVERY),))
    with pytest.raises(ConfigError, match=rf"sync\.milestones: the run {which} changes H"):
        _check_fit(*(RunConfig(sync=changing if place == which else SyncConfig(every=EVERY)) for place in ("above", "below")))


@pytest.mark.parametrize(
    ("sync", "words"), [(SyncConfig(every=4, groups=2), "sync.groups = 2"), (SyncConfig(every=4, mode="eager"), "sync.mode")]
)
def test_a_run_with_groups_or_estimates_has_no_run_above(sync: SyncConfig, words: str) -> None:
    below = Below(0, 0, None, tuple(flat(small_mlp())))
    schema = plan_fragments(small_mlp().named_parameters())
    with pytest.raises(RefusedError, match=words):
        RegionalPeer(
            schema, below, LocalRun(upper_config(), ["east"]).collective("east"), upper_config(), config(sync=sync), ABOVE
        )


def test_another_model_above_is_refused() -> None:
    above = upper_config()
    upper = LocalRun(above, ["other", "east"])
    other = nn.Linear(2, 2)
    EditWorker(other, torch.optim.SGD(other.parameters()), upper.collective("other"), WorkerConfig.of(above)).__enter__()
    with pytest.raises(RefusedError, match=r"another model: tensor weight of the run stands where the peer has 0\.weight"):
        Site(upper, above, "east", [1])


def test_a_run_above_that_asks_for_noise_is_told_that_the_run_below_has_none() -> None:
    noise = PrivacyConfig(level="example", delta=1e-6, epsilon_max=8, noise_multiplier=1.0)
    upper = LocalRun(above := dataclasses.replace(upper_config(), privacy=noise), ["east"])
    with pytest.raises(ConfigError, match="peers of the run below add no noise"):
        Site(upper, above, "east", [1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon_max": 8.5}, r"privacy.epsilon_max: the run above asks for at most 8, the run below has 8.5; lower it there"),
        ({"delta": 1e-5}, r"privacy.delta: the run above asks for at most 1e-06, the run below has 1e-05; lower it there"),
        ({"unit": "document"}, r"privacy.unit: the run above protects each sequence, the run below each document"),
        ({"epsilon_max": 7.5, "delta": 1e-7, "noise_multiplier": 0.3, "clip": 2.0}, ""),
    ],
)
def test_the_peers_below_keep_to_the_bound_of_the_run_above(changes: dict[str, object], words: str) -> None:
    privacy = PrivacyConfig(level="example", delta=1e-6, epsilon_max=8.0, noise_multiplier=1.0)
    upper, lower = RunConfig(privacy=privacy), RunConfig(privacy=dataclasses.replace(privacy, **changes))  # type: ignore[arg-type]
    if not words:
        _check_fit(upper, lower)
        return
    with pytest.raises(ConfigError, match=words):
        _check_fit(upper, lower)


@pytest.mark.parametrize("context", [64, 192, 256])
def test_the_peers_below_protect_examples_of_the_length_above(context: int) -> None:
    """Shorter ones are protected less; of longer ones, what is one example above may lie in two."""
    upper = RunConfig(privacy=PrivacyConfig(level="example", delta=1e-6, epsilon_max=8.0, noise_multiplier=1.0))
    lower = dataclasses.replace(upper, model=dataclasses.replace(upper.model, context=context))
    assert upper.model.context == 128
    words = rf"^model.context: the run above protects examples of 128 tokens, the run below of {context}; set 128 there$"
    with pytest.raises(ConfigError, match=words):
        _check_fit(upper, lower)
    _check_fit(dataclasses.replace(upper, privacy=PrivacyConfig()), lower)  # there is nothing to protect above


def test_a_run_below_follows_one_run_above_for_ever() -> None:
    _, east, west = two_sites()
    turns((east, west), 2)
    east.crash()
    other = LocalRun(east.upper_config, ["east"])  # another run that is still to be founded learns nothing of the site's
    with pytest.raises(RefusedError, match="the run below follows run above, not elsewhere"):
        RegionalPeer(
            east.run.state.schema, east.below(), other.collective("east"), east.upper_config, east.config, "elsewhere"
        ).__enter__()
    with pytest.raises(RefusedError, match="has outer step 1 of the run above, which has no parameters now"):
        RegionalPeer(
            east.run.state.schema, east.below(), other.collective("east"), east.upper_config, east.config, ABOVE
        ).__enter__()
    with pytest.raises(LocalProtocolError):
        _ = other.state


def test_somebody_elses_injection_is_noticed() -> None:
    _, east, west = two_sites()
    turns((east, west), 2)
    east.train()
    below = east.below()
    with pytest.raises(RefusedError, match="somebody else injects"):
        east.region.moved(dataclasses.replace(below, injected=Injected(ABOVE, 77, 0)))
    with pytest.raises(RefusedError, match="back to"):
        east.region.moved(dataclasses.replace(below, outer_step=1))


def injection(run: LocalRun, **changes: object) -> Injection:
    parts = {i: torch.ones_like(part) for i, part in enumerate(run.state.theta)}
    values = {"brings": Injected(ABOVE, 5, 0), "base": None, "replaces": False, "fragments": parts}
    return Injection(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"base": Injected(ABOVE, 4, 0)}, StaleError, "computed for outer step 4 of above, but nothing is in"),
        ({"brings": Injected(ABOVE, 5, 1)}, RemoteProtocolError, "tells of outer step 1"),
        ({"fragments": {0: torch.ones(3)}}, RemoteProtocolError, "fragment 0 of an injection does not fit"),
        ({"fragments": {0: torch.full((30,), torch.nan)}}, RemoteProtocolError, "not finite"),
        ({"fragments": {}, "replaces": True}, RemoteProtocolError, "must be all of them"),
    ],
)
def test_a_run_takes_only_what_fits(changes: dict[str, object], error: type[Exception], words: str) -> None:
    run = LocalRun(config(), ["a"], theta=flat(small_mlp()))
    run.join("a", plan_fragments(small_mlp().named_parameters()), lambda: [])
    with pytest.raises(error, match=words):
        run.inject(injection(run, **changes))


def test_each_outer_step_above_is_taken_once_and_in_order() -> None:
    _, east, west = two_sites()
    turns((east, west), 2)
    base = east.run.state.injected
    assert base == Injected(ABOVE, 1, 1)
    with pytest.raises(RemoteProtocolError, match="cannot follow"):
        east.run.inject(injection(east.run, base=base, brings=Injected(ABOVE, 1, 1)))
    with pytest.raises(RemoteProtocolError, match="cannot follow"):
        east.run.inject(injection(east.run, base=base, replaces=True))
    with pytest.raises(RefusedError, match="this run is below run above"):
        east.run.inject(injection(east.run, base=base, brings=Injected("other", 5, 0)))


def test_momentum_below_does_not_see_what_is_injected() -> None:
    below = config(outer=OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.9), sync=SyncConfig(every=EVERY, outer_steps=99))
    runs = [LocalRun(below, ["a"]) for _ in range(2)]
    peers = [Inner(run, "a", 1, 0) for run in runs]
    for injected in (False, True):
        run, peer = runs[injected], peers[injected]
        if injected:
            run.inject(injection(run))
        for _ in range(EVERY):
            train_step(peer.model, peer.optimizer, next(peer.batches))
    plain, shifted = (run.state.to_tensors() for run in runs)
    assert torch.equal(plain["outer.0.momentum"], shifted["outer.0.momentum"])
    assert close([plain["theta.0"] + 1], [shifted["theta.0"]], 1e-6)


def test_a_rolled_back_round_still_takes_what_is_injected() -> None:
    run = LocalRun(config(rounds=RoundsConfig(), sync=SyncConfig(every=EVERY, outer_steps=1000)), ["a"])
    peer = Inner(run, "a", 1, 0)
    before = [part.clone() for part in run.state.theta]
    run.inject(injection(run))
    with torch.no_grad():
        for _ in range(EVERY):
            train_step_nan(peer)
    assert close(run.state.theta, [part + 1 for part in before], 1e-6)
    assert run.state.injected == Injected(ABOVE, 5, 0)


def train_step_nan(peer: Inner) -> None:
    for parameter in peer.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    peer.optimizer.step()


def test_a_schema_that_is_not_of_parameters_alone_is_refused() -> None:
    schema = Schema((FragmentSpec(fragment_id=0, name="buffers", tensors=(TensorSpec(name="a.b", shape=(2,)),)),))
    with pytest.raises(ConfigError, match="the model below cannot be a peer"):
        OuterModule(schema)
