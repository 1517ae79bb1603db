from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import InnerConfig
from edit.lab.compare.baselines import DeMo, PrimalAveraging, Traffic, _blocks, _dct, _decoded, _side, _transformed
from peers.training.trainer import Trainer


class Line(nn.Module):
    """The loss is the inner product of the parameters with the batch, so that the gradient is the batch."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).view(shape) / 10)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.weight * tokens).sum()


def test_gpa_is_the_papers_three_lines() -> None:
    model, rate, mu_x, mu_y = Line(1, 3), 0.5, 0.9, 0.8
    inner = InnerConfig(optimizer="sgd", momentum=0.0, lr=rate, warmup_steps=0, final_lr_ratio=1.0, weight_decay=0, clip_norm=0)
    gradients = [torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([[0.5, 0.5, -1.0]]), torch.tensor([[2.0, 0.0, 1.0]])]
    batches = iter([(g, g.long()) for g in gradients])
    trainer = Trainer(model, batches, inner, total_steps=3, device=torch.device("cpu"), clock=lambda: 0.0)
    averaging = PrimalAveraging(trainer, mu_x, mu_y)
    x = z = Line(1, 3).weight.detach()
    for gradient in gradients:
        y = mu_y * x + (1 - mu_y) * z
        torch.testing.assert_close(model.weight.detach(), y)
        trainer.step()
        z = z - rate * gradient
        x = mu_x * x + (1 - mu_x) * z
    torch.testing.assert_close(averaging.averaged(model, Line(1, 3)).state_dict()["weight"], x)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (8, 12)])
def test_all_dct_coefficients_are_the_tensor_again(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    bases = [_dct(_side(size, 4)) for size in shape]
    coefficients = _transformed(_blocks(tensor, bases), bases).flatten(1)
    places = torch.arange(coefficients.shape[1]).expand_as(coefficients)
    torch.testing.assert_close(_decoded([(places, coefficients)], tensor.shape, bases), tensor)
    torch.testing.assert_close(coefficients.square().sum(), tensor.square().sum())


def test_a_constant_is_one_coefficient_and_sides_divide() -> None:
    torch.testing.assert_close((_dct(4) @ torch.ones(4)), torch.tensor([2.0, 0, 0, 0]))
    assert [_side(size, 64) for size in (1, 63, 64, 128, 192, 97, 100)] == [1, 63, 64, 64, 64, 1, 50]


def test_demo_moves_by_the_sign_of_what_all_sent_and_keeps_the_rest() -> None:
    model, traffic = Line(4, 4), Traffic()
    before = model.weight.detach().clone()
    demo = DeMo(model, 2, topk=1, chunk=4, decay=1.0, weight_decay=0.0, clip_norm=0.0)
    flat, spike = torch.ones(4, 4), torch.zeros(4, 4)
    spike[0, 0] = 16.0
    demo.step([iter([(flat, flat)]), iter([(flat + spike, flat)])], 0.1, traffic)
    # Both send one coefficient; a constant's only one is sent whole, so nothing of the first peer's is left.
    assert float(demo._momenta[0][0].abs().max()) < 1e-3
    assert float(demo._momenta[1][0].abs().max()) > 0.1
    torch.testing.assert_close((before - model.weight.detach()).abs(), torch.full((4, 4), 0.1))
    assert (traffic.sent, traffic.received) == (4, 8), "an int16 and a bfloat16, of each of two peers"


def test_demo_steps_on_the_mean_gradient_of_the_batches_that_it_accumulates() -> None:
    values = {"topk": 2, "chunk": 4, "decay": 1.0, "weight_decay": 0.0, "clip_norm": 1.0}
    a, b = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    losses, momenta = [], []
    for batches, accumulation in (([a, b], 2), ([(a + b) / 2], 1)):
        demo = DeMo(Line(4, 4), 1, **values, accumulation=accumulation)  # type: ignore[arg-type]
        losses.append(demo.step([iter([(each, each) for each in batches])], 0.1, Traffic()))
        momenta.append(demo._momenta[0][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*momenta)
