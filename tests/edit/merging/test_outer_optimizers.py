"""Outer optimizers: against torch.optim and the paper's equations in fp64, bit-stable, sign as a gradient."""

import pytest
import torch
from torch import Tensor

from edit.config.run import OuterConfig
from edit.merging.outer_optimizers import outer_optimizer
from edit.reference import co2, delayed_nesterov

OPTIMIZERS = ("sgd", "nesterov", "co2", "adam", "yogi", "delayed_nesterov")


def gradients(count: int, numel: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def run(config: OuterConfig, merged: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """theta after all steps from ones, and every step."""
    theta, slots, steps = torch.ones(merged[0].numel()), outer_optimizer(config).slots(merged[0].numel()), []
    for one in merged:
        step, slots = outer_optimizer(config).step(slots, one)
        theta = theta - step
        steps.append(step)
    return theta, steps


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("nesterov", 0.85), ("nesterov", 0.0)])
def test_sgd_and_nesterov_follow_torch_optim(optimizer: str, momentum: float) -> None:
    merged = gradients(12)
    parameter = torch.nn.Parameter(torch.ones(50))
    settings = {"lr": 0.7, "momentum": momentum, "nesterov": momentum > 0}
    theirs = torch.optim.SGD([parameter], foreach=False, **settings)
    for one in merged:
        parameter.grad = one.clone()
        theirs.step()
    ours, _ = run(OuterConfig(optimizer=optimizer, lr=0.7, momentum=momentum), merged)
    assert torch.allclose(ours, parameter.detach(), atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_adam_and_yogi_follow_reddi_et_al_in_fp64(optimizer: str) -> None:
    """Algorithm 2 with delta = -D: m <- b1 m + (1-b1) delta; v per rule; x <- x + eta m / (sqrt(v) + tau); v from tau^2."""
    eta, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    merged = gradients(12)
    x, m, v = [torch.full((50,), fill, dtype=torch.float64) for fill in (1.0, 0.0, tau**2)]
    for one in merged:
        delta = -one.double()
        m = b1 * m + (1 - b1) * delta
        v = b2 * v + (1 - b2) * delta**2 if optimizer == "adam" else v - (1 - b2) * delta**2 * torch.sign(v - delta**2)
        x = x + eta * m / (v.sqrt() + tau)
    ours, _ = run(OuterConfig(optimizer=optimizer, lr=eta, beta1=b1, beta2=b2, eps=tau), merged)
    assert torch.allclose(ours.double(), x, rtol=1e-4, atol=1e-4)


def test_nesterov_bits_are_separate_multiplications_and_additions() -> None:
    """Each operation rounded by itself, as numpy does it: a fused multiply-add or an alpha= would show here."""
    config = OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.9)
    merged, v = [one.numpy() for one in gradients(6, 4097)], torch.zeros(4097).numpy()
    lr, mu = torch.tensor(0.7).numpy(), torch.tensor(0.9).numpy()
    _, steps = run(config, gradients(6, 4097))
    for one, step in zip(merged, steps, strict=True):
        v = v * mu + one
        assert ((v * mu + one) * lr).tobytes() == step.numpy().tobytes()


@pytest.mark.parametrize(("period", "c"), [(1, 0.0), (1, 1.0), (3, 0.0), (4, 0.125), (5, 0.2)])
def test_delayed_nesterov_follows_the_paper(period: int, c: float) -> None:
    merged = gradients(12)
    config = OuterConfig(optimizer="delayed_nesterov", lr=0.7, momentum=0.9, period=period, c=c)
    expected = delayed_nesterov(torch.ones(50), merged, 0.7, 0.9, period, c)
    for count in (1, 4, 5, 12):
        assert torch.allclose(run(config, merged[:count])[0], expected[count - 1], atol=1e-5)


@pytest.mark.parametrize(("gap", "clip"), [(1.0, 0.0), (4.0, 0.0), (2.0, 0.7)])
def test_co2_is_heavy_ball_with_its_penalty_and_its_clip(gap: float, clip: float) -> None:
    merged = gradients(6)
    config = OuterConfig(optimizer="co2", lr=0.9, momentum=0.5, gap_penalty=gap, momentum_clip=clip)
    theta, momentum = torch.ones(50), torch.zeros(50)
    for one in merged:
        theta, momentum = co2(theta, momentum, one, 0.9, 0.5, gap, clip)
    assert torch.equal(run(config, merged)[0], theta)
    assert not clip or float(momentum.abs().max()) <= clip


def test_delayed_nesterov_with_one_peer_is_nesterov_to_the_bit() -> None:
    merged = gradients(9, 4097)
    delayed = OuterConfig(optimizer="delayed_nesterov", lr=0.7, momentum=0.9, period=1)
    assert torch.equal(run(delayed, merged)[0], run(OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.9), merged)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_do_not_depend_on_threads_or_on_where_a_vector_is_cut(optimizer: str) -> None:
    config, merged = OuterConfig(optimizer=optimizer), gradients(3, 70_001)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole, _ = run(config, merged)
        torch.set_num_threads(3)
        threaded, _ = run(config, merged)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, threaded)
    cuts = [run(config, [one[a:b] for one in merged])[0] for a, b in ((0, 13), (13, 35_002), (35_002, 70_001))]
    assert torch.equal(whole, torch.cat(cuts))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_pure_and_goes_along_d(optimizer: str) -> None:
    config, merged = OuterConfig(optimizer=optimizer), gradients(1)[0]
    slots = outer_optimizer(config).slots(50)
    before = {name: slot.clone() for name, slot in slots.items()}
    kept = merged.clone()
    step, after = outer_optimizer(config).step(slots, merged)
    assert torch.equal(merged, kept) and all(torch.equal(slots[name], before[name]) for name in before)
    assert after.keys() == slots.keys() and step.data_ptr() != merged.data_ptr()
    assert bool((step.sign() == merged.sign()).all()), "theta - s moves towards the local parameters"
    again, _ = outer_optimizer(config).step(slots, merged)
    assert torch.equal(step, again)


def test_sgd_with_lr_one_makes_theta_the_mean_of_the_peers() -> None:
    step, _ = outer_optimizer(OuterConfig(optimizer="sgd", lr=1.0)).step({}, torch.tensor([0.25]))
    assert step.item() == 0.25
