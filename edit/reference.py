"""DiLoCo, EDiT, streaming, eager and asynchronous rules in their most readable form: the oracle of the tests.

Written from the papers alone, in plain operations; slow on purpose. It must not import the fast code that it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median, median_low

import torch
from blake3 import blake3
from torch import Tensor

__all__ = [
    "Edit",
    "EditByLevels",
    "Gossip",
    "Inner",
    "anchored",
    "averaged",
    "by_model",
    "centered_clip",
    "delayed_nesterov",
    "diloco",
    "e3m0",
    "equalised",
    "feedback",
    "gaussian_privacy",
    "geometric_median",
    "gossip_pairs",
    "heloco",
    "integers",
    "loss_priors",
    "loss_score",
    "masked_integers",
    "masked_mean",
    "masked_steps",
    "multi_krum",
    "nearest_neighbour_mixing",
    "nesterov",
    "private_mean",
    "rda",
    "sdd",
    "sign",
    "stale_weights",
    "stat2",
    "step_ahead",
    "streaming",
    "top1",
    "topk",
]

# (local fragments, inner step 1, 2, ...) -> local fragments after that step
Inner = Callable[[list[Tensor], int], list[Tensor]]


def nesterov(theta: Tensor, momentum: Tensor, merged: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """Return (theta, momentum) after one outer step: v <- mu v + D; theta <- theta - nu (D + mu v)."""
    momentum = mu * momentum + merged
    return theta - lr * (merged + mu * momentum), momentum


def co2(
    theta: Tensor, momentum: Tensor, merged: Tensor, lr: float, mu: float, gap: float, clip: float
) -> tuple[Tensor, Tensor]:
    """arXiv 2401.16265, as its authors' code: v <- mu v + D / gap, within +-clip (0: any); theta <- theta - nu v."""
    v = mu * momentum + merged * (1 / gap)
    v = v.clamp(-clip, clip) if clip else v
    return theta - lr * v, v


def planned_momentum(mu: float, exchange: int, warmup: int, restarts: Sequence[int]) -> tuple[float, bool]:
    """Return mu at a fragment's exchange 0, 1, ..., and whether its momentum v is first set to zero."""
    begun = max([0, *(each for each in restarts if each <= exchange)])
    return mu * min(1.0, (exchange - begun) / warmup) if warmup else mu, exchange in restarts


def averaged(thetas: Sequence[Tensor], *, decay: float | None = None, last: int | None = None) -> Tensor:
    """Return the average of theta after outer steps 1, 2, ...: weights decay ** age, normalised, or the mean of the `last`."""
    if decay is not None:
        weights = [decay ** (len(thetas) - 1 - i) for i in range(len(thetas))]
    else:
        weights = [1.0 if last is None or i >= len(thetas) - last else 0.0 for i in range(len(thetas))]
    return sum((weight * theta for weight, theta in zip(weights, thetas, strict=True)), torch.zeros_like(thetas[0])) / sum(
        weights
    )


def delayed_nesterov(theta: Tensor, arrivals: Sequence[Tensor], lr: float, mu: float, period: int, c: float) -> list[Tensor]:
    """Return theta after each arrival: delayed Nesterov (arXiv 2401.09135, algorithm 3)."""
    momentum, gathered, history = torch.zeros_like(theta), torch.zeros_like(theta), []
    for t, g in enumerate(arrivals):
        gathered = gathered + g
        if (t + 1) % period == 0:
            momentum = mu * momentum + gathered / period
            theta = theta - lr * ((1 - c * period + c) * mu * momentum + g / period)
            gathered = torch.zeros_like(theta)
        else:
            theta = theta - lr * (c * mu * momentum + g / period)
        history.append(theta)
    return history


def stale_weights(weights: Sequence[float], staleness: Sequence[int], a: float) -> list[float]:
    """Return each weight times (1 + s)^-a (arXiv 1903.03934, section 5.2), normalised."""
    factors = [weight / (1 + s) ** a for weight, s in zip(weights, staleness, strict=True)]
    return [factor / sum(factors) for factor in factors]


def rda(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of the lengths times the normalised mean of the directions (arXiv 2604.21428)."""
    length = sum(weight * float(delta.norm()) for weight, delta in zip(weights, deltas, strict=True))
    units = [weight * delta / float(delta.norm()) for weight, delta in zip(weights, deltas, strict=True)]
    direction = torch.stack(units).sum(dim=0)
    return direction * (length / float(direction.norm()))


def equalised(rows: Tensor) -> Tensor:
    """Return the rows with the median length; none is made more than 4 times as long."""
    lengths = rows.norm(dim=1)
    scales: Tensor = (lengths.quantile(0.5) / lengths).clamp(max=4)
    return rows * scales[:, None]


def nearest_neighbour_mixing(rows: Tensor, f: int) -> Tensor:
    """Return each row replaced by the mean of the n - f nearest to it, itself among them (arXiv 2302.01772)."""
    apart = (rows[:, None] - rows[None]).norm(dim=2)
    return torch.stack([rows[order[: len(rows) - f]].mean(dim=0) for order in apart.argsort(dim=1, stable=True)])


def geometric_median(rows: Tensor, steps: int = 32) -> Tensor:
    """Return Weiszfeld's approximation (arXiv 1912.13445; nu is a thousandth of the median length).

    From the mean of the rows, each shortened to 4 times the median length.
    """
    lengths = rows.norm(dim=1)
    centre: Tensor = (rows * (4 * lengths.quantile(0.5) / lengths).clamp(max=1)[:, None]).mean(dim=0)
    near = 1e-3 * float(lengths.square().quantile(0.5)) ** 0.5
    for _ in range(steps):
        weights = 1 / (rows - centre).norm(dim=1).clamp(min=near)
        centre = (rows * weights[:, None]).sum(dim=0) / weights.sum()
    return centre


def centered_clip(rows: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Return the centre after 5 means of what is clipped around it (arXiv 2012.10333, algorithm 2)."""
    for _ in range(5):
        away = rows - centre
        centre = centre + (away * (radius / away.norm(dim=1)).clamp(max=1)[:, None]).mean(dim=0)
    return centre


def multi_krum(rows: Tensor, f: int) -> Tensor:
    """Return the mean of the n - f rows with the least sum of n - f - 2 squared distances (arXiv 1703.02757)."""
    squares = (rows[:, None] - rows[None]).square().sum(dim=2)
    scores = squares.sort(dim=1).values[:, 1 : len(rows) - f - 1].sum(dim=1)
    return rows[scores.argsort(stable=True)[: len(rows) - f]].mean(dim=0)


def by_model(fragments: Sequence[Tensor], rule: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what a rule makes of the rows of several fragments, [n, numel] each, where a row is one vector of all of them."""
    return list(torch.split(rule(torch.cat(list(fragments), dim=1)), [rows.shape[1] for rows in fragments]))


def anchored(rows: Tensor, anchors: Sequence[int]) -> Tensor:
    """Return the mean by cosine to the mean of the anchors' rows, each as long as that (FLTrust, arXiv 2012.13995)."""
    server = rows[list(anchors)].mean(dim=0)
    scores = [max(0.0, float(row @ server / (row.norm() * server.norm()))) for row in rows]
    return sum((s * server.norm() / row.norm() * row for s, row in zip(scores, rows, strict=True)), 0 * server) / sum(scores)


def loss_score(loss: Callable[[Tensor], float], theta: Tensor, contribution: Tensor) -> float:
    """Return what half of a contribution lowers the loss by, as a share of it."""
    return (loss(theta) - loss(theta - 0.5 * contribution)) / loss(theta)


def loss_priors(scores: Sequence[Sequence[float]]) -> list[float]:
    """Return the prior of each peer from the scores of all outer steps, [steps][peers], normalised.

    The moving mean with rate 0.4; 0 below a quarter of the median, four times the median at most; uniform where no median is.
    """
    ages = range(len(scores) - 1, -1, -1)
    means = [
        sum(0.6**age * row[m] for age, row in zip(ages, scores, strict=True)) / sum(0.6**age for age in ages)
        for m in range(len(scores[0]))
    ]
    middle = median(means)
    if middle <= 0:
        return [1 / len(means)] * len(means)
    kept = [min(mean, 4 * middle) if mean >= middle / 4 else 0.0 for mean in means]
    return [each / sum(kept) for each in kept]


def private_mean(contributions: Sequence[Tensor], clip: float, noise: Tensor, denominator: int) -> Tensor:
    """Return the mean with privacy of organisations: no contribution longer than `clip`, a denominator that nobody changes.

    noise: N(0, z^2 S^2 I), with S = clip.
    """
    total = torch.stack([delta * min(1.0, clip / float(delta.norm())) for delta in contributions]).sum(dim=0)
    return (total + noise) / denominator


def gaussian_privacy(epsilon: float, steps: int, z: float) -> float:
    """Return delta at this epsilon of `steps` sums with noise of z times what one party can change (arXiv 1905.02383)."""
    mu, phi = steps**0.5 / z, NormalDist().cdf
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def heloco(delta: Tensor, m: Tensor, c_ok: float = 0.2) -> Tensor:
    """Correct one tensor towards the momentum m, a mean of pseudo-gradients (arXiv 2606.00271); k_s = k_d = kappa = 1."""
    length, reference = float(delta.norm()), float(m.norm())
    u, v = delta / length, m / reference
    c, confidence = float(u @ v), length / (length + reference)
    if c >= c_ok:
        return delta
    if c < 0:
        return delta - v * (min(-c * confidence, 1.0) * c * length)
    turn = min((1 - c) * confidence, 1.0)
    turned = u * (1 - turn) + v * turn
    return turned * (length / float(turned.norm()))


def diloco(theta: Tensor, momentum: Tensor, local: Mapping[str, Tensor], lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """Run one DiLoCo round (arXiv 2311.08105): the mean of the peers' pseudo-gradients, then Nesterov. local: by peer_id."""
    merged = torch.zeros_like(theta)
    for peer_id in sorted(local):
        merged = merged + (theta - local[peer_id]) * (1 / len(local))
    return nesterov(theta, momentum, merged, lr, mu)


@dataclass
class _History:
    """One peer's norms so far."""

    mean: float = 0.0  # moving sums as they come, not bias-corrected
    square: float = 0.0
    count: int = 0


@dataclass
class Edit:
    """EDiT (arXiv 2412.07210), detector "edit", norm = "raw", no verdict on idle peers. `round` replaces theta and momentum."""

    theta: Tensor
    lr: float = 0.8
    mu: float = 0.85
    alpha: float = 0.02
    delta: float = 3.0
    observations: int = 10
    temperature: float = 1.0
    clip: float = 10.0
    momentum: Tensor = field(default_factory=lambda: torch.zeros(()))
    history: dict[str, _History] = field(default_factory=dict)

    def round(self, local: Mapping[str, Tensor]) -> dict[str, float]:
        """Run one round from every peer's local parameters, and return the weights (0: bad). All bad: nothing moves."""
        deltas = {peer_id: self.theta - local[peer_id] for peer_id in sorted(local)}
        norms = {peer_id: float(delta.double().square().sum().sqrt()) for peer_id, delta in deltas.items()}
        good = [peer_id for peer_id in deltas if not self._bad(peer_id, norms[peer_id])]
        for peer_id in good:
            self._observe(peer_id, norms[peer_id])
        if not good:
            return dict.fromkeys(deltas, 0.0)
        least = min(norms[peer_id] for peer_id in good)
        shares = {peer_id: math.exp(-(norms[peer_id] - least) / self.temperature) for peer_id in good}
        weights = {peer_id: shares.get(peer_id, 0.0) / sum(shares.values()) for peer_id in deltas}
        merged = torch.zeros_like(self.theta)
        for peer_id in good:
            merged = merged + weights[peer_id] * deltas[peer_id]
        merged = merged * min(1.0, self.clip / (float(merged.double().square().sum().sqrt()) + 1e-6))
        self.theta, self.momentum = nesterov(self.theta, self.momentum, merged, self.lr, self.mu)
        return weights

    def _bad(self, peer_id: str, norm: float) -> bool:
        seen = self.history.setdefault(peer_id, _History())
        if not math.isfinite(norm) or seen.count < self.observations:
            return not math.isfinite(norm)
        correction = 1 - (1 - self.alpha) ** seen.count
        mean = seen.mean / correction
        sigma = max(math.sqrt(seen.square / correction), 1e-3 * mean)  # equal norms: rounding is no anomaly
        return (norm - mean) / sigma > self.delta if sigma > 0 else norm > mean

    def _observe(self, peer_id: str, norm: float) -> None:
        seen = self.history[peer_id]
        seen.count += 1
        seen.mean = self.alpha * norm + (1 - self.alpha) * seen.mean
        deviation = norm - seen.mean / (1 - (1 - self.alpha) ** seen.count)
        seen.square = (1 - self.alpha) * seen.square + self.alpha * deviation**2


@dataclass
class EditByLevels:
    """EDiT with the detector "level", every learned level kept: Edit's rule, amended. norm = "raw"; `round` as Edit's.

    x = log G - p log steps is judged, with 3 or more contributions relative to the round's median, against the mean or the last
    three; what is rejected `relearn` times in a row, alike, is the new history; zeros and tiny norms are idle; no share exceeds
    max_share / M.
    """

    theta: Tensor
    lr: float = 0.8
    mu: float = 0.85
    alpha: float = 0.02
    delta: float = 3.0
    observations: int = 10
    step_power: float = 0.5
    relearn: int = 3
    max_ratio: float = 10.0
    idle_ratio: float = 0.01
    max_share: float = 1.5
    temperature: float = 1.0
    clip: float = 10.0
    momentum: Tensor = field(default_factory=lambda: torch.zeros(()))
    learned: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by (peer_id, "own" or "relative")
    row: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # rejected in a row
    accepted: list[str] = field(default_factory=list)  # in the last round

    def round(self, local: Mapping[str, Tensor], steps: Mapping[str, int]) -> dict[str, float]:
        """Run one round; return the weights (0: bad or idle)."""
        deltas = {peer_id: self.theta - local[peer_id] for peer_id in sorted(local)}
        norms = {peer_id: float(delta.double().square().sum().sqrt()) for peer_id, delta in deltas.items()}
        good = self.accepted = self._good(norms, steps)
        if not good:
            return dict.fromkeys(deltas, 0.0)
        shares = {
            peer_id: math.exp(-(norms[peer_id] - min(map(norms.__getitem__, good))) / self.temperature) for peer_id in good
        }
        shares = {peer_id: share / sum(shares.values()) for peer_id, share in shares.items()}
        limit = self.max_share / len(good)
        low, high = 1.0, 1e9  # the factor by which shares below the limit grow, by bisection
        for _ in range(200):
            factor = (low + high) / 2
            total = sum(min(limit, factor * share) for share in shares.values())
            low, high = (factor, high) if total < 1 else (low, factor)
        weights = {peer_id: min(limit, high * shares[peer_id]) if peer_id in good else 0.0 for peer_id in deltas}
        merged = torch.zeros_like(self.theta)
        for peer_id in good:
            merged = merged + weights[peer_id] * deltas[peer_id]
        merged = merged * min(1.0, self.clip / (float(merged.double().square().sum().sqrt()) + 1e-6))
        self.theta, self.momentum = nesterov(self.theta, self.momentum, merged, self.lr, self.mu)
        return weights

    def _good(self, norms: Mapping[str, float], steps: Mapping[str, int]) -> list[str]:
        most = self.max_ratio * sorted(steps.values())[(len(steps) - 1) // 2] if len(steps) >= 3 else math.inf
        x = {p: math.log(g) - self.step_power * math.log(min(steps[p], most)) for p, g in norms.items() if 0 < g < math.inf}
        ok = {p: g for p, g in norms.items() if g == 0}
        learned: list[tuple[tuple[str, str], float]] = []
        levels = {(p, "own"): x[p] for p in x}
        if len(x) >= 3:
            middle = float(torch.tensor(list(x.values()), dtype=torch.float64).quantile(0.5))
            levels |= {(p, "relative"): x[p] - middle for p in x}
        odd = {key: self._odd(key, levels) for key in levels}
        for p in x:
            if levels.get((p, "relative"), 0) > math.log(self.max_ratio):
                continue
            by = (p, "relative") if (p, "relative") in levels and self._known((p, "relative")) else (p, "own")
            if not odd[by]:
                ok[p] = norms[p]
            for key in ((p, "own"), (p, "relative")):
                if key in levels and odd[key]:
                    row = self.row[key] = [*self.row.get(key, []), levels[key]][-self.relearn :]
                    if len(row) == self.relearn and max(row) - min(row) <= math.log(2):
                        learned += [(key, math.nan), *((key, level) for level in row)]
                elif key in levels and not odd[by]:
                    learned.append((key, levels[key]))
        largest = max(ok, key=lambda p: ok[p], default="")
        idle = set()
        for p, g in ok.items():
            tiny = g < self.idle_ratio * ok[largest]
            below = g > 0 and self._known((p, "own")) and x[p] < self._mean((p, "own"))[0] + math.log(self.idle_ratio)
            if ok[largest] > 0 and (g == 0 or (tiny and (len(x) >= 3 or self._known((largest, "own")) or below))):
                idle.add(p)
        for key, level in learned:
            if key[0] not in idle:  # NaN: what was known is forgotten
                self.learned[key] = [] if math.isnan(level) else [*self.learned.get(key, []), level]
                self.row[key] = []
        return sorted(set(ok) - idle)

    def _known(self, key: tuple[str, str]) -> bool:
        return len(self.learned.get(key, ())) >= self.observations

    def _mean(self, key: tuple[str, str]) -> tuple[float, float, float]:
        """Return mean, unbiased variance and effective number of what was learned."""
        levels = self.learned[key]
        w = [(1 - self.alpha) ** (len(levels) - 1 - i) for i in range(len(levels))]
        mean = sum(a * b for a, b in zip(w, levels, strict=True)) / sum(w)
        n = sum(w) ** 2 / sum(a * a for a in w)
        variance = sum(a * (b - mean) ** 2 for a, b in zip(w, levels, strict=True)) / sum(w)
        return mean, variance * n / max(n - 1, 1.0), n

    def _forecast(self, key: tuple[str, str]) -> tuple[float, float, float]:
        """Return the next level, its mean square error, and the degrees of freedom of that: by the mean, or the last three."""
        mean, variance, n = self._mean(key)
        slow = mean, variance * (1 + 1 / n), max(n - 1, 1.0)
        levels = self.learned[key]
        misses = [levels[i] - median_low(levels[max(0, i - 3) : i]) for i in range(1, len(levels))]
        w = [(1 - max(self.alpha, 0.1)) ** (len(misses) - 1 - i) for i in range(len(misses))]
        if not misses:
            return slow
        error = sum(a * b * b for a, b in zip(w, misses, strict=True)) / sum(w)
        fast = median_low(levels[-3:]), error, sum(w) ** 2 / sum(a * a for a in w)
        return fast if error < slow[1] / 2 else slow

    def _odd(self, key: tuple[str, str], levels: Mapping[tuple[str, str], float]) -> bool:
        if not self._known(key):
            return False
        forecast, own, freedom = self._forecast(key)
        alike = [other for other in levels if other[1] == key[1]]
        errors = [self._forecast(other)[1] for other in alike if self._known(other)]
        f = freedom * 4 * len(errors) / (len(errors) + 3)
        delta = self.delta * (1 + 1 / len(alike) ** 2) if key[1] == "relative" else self.delta
        sigma = max(math.sqrt((own + median(errors)) / 2), 0.05)
        return levels[key] - forecast > delta * sigma * (1 + (self.delta**2 + 1) / (4 * f))


def gossip_pairs(seed: int, outer_step: int, peers: Sequence[str]) -> list[list[str]]:
    """Return who meets whom: neighbours in the order of BLAKE3(seed, outer step, name), as two numbers of 8 bytes and UTF-8."""
    order = [(blake3(b"".join([seed.to_bytes(8, "little"), outer_step.to_bytes(8, "little"), p.encode()])).hexdigest(), p)
             for p in peers]  # fmt: skip
    names = [name for _, name in sorted(order)]
    return [names[i : i + 2] for i in range(0, len(names), 2)]


@dataclass
class Gossip:
    """NoLoCo with groups of two (arXiv 2506.10911, equations 1 to 3, the second term's sign so that it descends).

    phi, delta, lr, momentum, mixing are the paper's phi, delta, beta, alpha, gamma. lossy: what a codec leaves of what a peer
    sends, of phi and of theta - phi. edit: by peer, its judge of all it meets, without softmax and clip; None: no verdicts.
    """

    phi: dict[str, Tensor]
    seed: int
    lr: float = 0.7
    momentum: float = 0.5
    mixing: float = 0.7
    lossy: Callable[[Tensor], Tensor] = lambda tensor: tensor
    edit: Mapping[str, Edit] | None = None
    delta: dict[str, Tensor] = field(default_factory=dict)
    outer_step: int = 0

    def round(self, local: Mapping[str, Tensor]) -> None:
        """Take one outer step from every peer's local parameters; replaces phi and delta."""
        gradients = {peer: self.phi[peer] - local[peer] for peer in local}
        shown = {peer: self.lossy(self.phi[peer]) for peer in local}
        good = {peer: self._judge(peer, gradients) for peer in local}
        after = {}
        for pair in gossip_pairs(self.seed, self.outer_step, list(local)):
            met = len(pair) == 2 and all(good[i][j] for i in pair for j in pair)
            for i in pair:
                if not met and not good[i][i]:
                    continue
                group = sorted(pair) if met else [i]
                mean = torch.zeros_like(self.phi[i])
                for j in group:
                    mean = mean + gradients[j] * (1 / len(group))
                delta = self.momentum * self.delta.get(i, torch.zeros_like(mean)) - self.lr * mean
                if met:
                    (other,) = set(pair) - {i}
                    delta = delta + self.mixing * ((shown[other] - shown[i]) / 2)  # mean(phi) - phi_i of two
                after[i] = self.phi[i] + delta, delta
        for i, (phi, delta) in after.items():
            self.phi[i], self.delta[i] = phi, delta
        self.outer_step += 1

    def __post_init__(self) -> None:
        """At the beginning all peers have the same phi."""
        self._common = next(iter(self.phi.values()))

    def settle(self) -> Tensor:
        """Return one model from all: a round from the last model in common with the mean of that - phi_i, rate 1."""
        mean = torch.zeros(())
        for peer in sorted(self.phi):
            mean = mean + (self._common - self.phi[peer]) * (1 / len(self.phi))
        self._common = self._common - mean
        self.phi = dict.fromkeys(self.phi, self._common)
        return self._common

    def _judge(self, me: str, gradients: Mapping[str, Tensor]) -> dict[str, bool]:
        """By peer whether `me` finds its pseudo-gradient good, of itself and the one it meets; learns of them."""
        pair = next(pair for pair in gossip_pairs(self.seed, self.outer_step, list(gradients)) if me in pair)
        norms = {peer: float(gradients[peer].double().square().sum().sqrt()) for peer in pair}
        if self.edit is None:
            return {peer: math.isfinite(norm) for peer, norm in norms.items()}
        good = {peer: not self.edit[me]._bad(peer, norm) for peer, norm in norms.items()}
        for peer in pair:
            if good[peer]:
                self.edit[me]._observe(peer, norms[peer])
        return good


def streaming(
    theta: Sequence[Tensor],
    inner: Mapping[str, Inner],
    *,
    every: int,
    outer_steps: int,
    groups: int = 1,
    pattern: str = "strided",
    delay: int = 0,
    mix: str = "replay",
    alpha: float = 0.5,
    lr: float = 1.0,
    mu: float = 0.0,
) -> list[list[Tensor]]:
    """Return the fragments of theta after each outer step of Streaming DiLoCo (arXiv 2501.18512).

    inner: by peer_id, what one inner step does to a peer's local fragments. Every `every` / `groups` inner steps one group of
    fragments is merged. `delay` inner steps later, before anything else that is due then, the peers apply the result by `mix`:
    `replace` their own parameters, `lerp` (alpha of their own), or `replay` their progress meanwhile onto it. `eager`
    (arXiv 2502.12996) is replay, and meanwhile training goes on from an estimate of the result: the fragment's last outer step
    again, with the peer's own old contribution in it exchanged for the new one.
    """
    now, momenta = list(theta), [torch.zeros(()) for _ in theta]
    local = {peer_id: list(theta) for peer_id in sorted(inner)}
    went_on_from: dict[str, list[Tensor]] = {peer_id: list(theta) for peer_id in local}
    last: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}  # by fragment: its last outer step, and the contributions to it
    history: list[list[Tensor]] = []
    due: list[int] = []
    interval = every // groups
    for step in range(1, outer_steps * interval + 1):
        local = {peer_id: list(inner[peer_id](own, step)) for peer_id, own in local.items()}
        if history and step == len(history) * interval + delay:
            _take(due, now, local, went_on_from, mix, alpha)
        if step % interval > 0:
            continue
        due = [i for i in range(len(now)) if _group(i, len(now), groups, pattern) == len(history) % groups]
        for i in due:
            before, at_send = now[i], {peer_id: own[i] for peer_id, own in local.items()}
            for peer_id, own in local.items():
                if mix == "eager" and i in last:
                    moved, deltas = last[i]
                    change = (before - own[i]) - deltas[peer_id]
                    own[i] = before - moved - lr * (1 + mu) * change * (1 / len(local))
                went_on_from[peer_id][i] = own[i]
            now[i], momenta[i] = diloco(before, momenta[i], at_send, lr, mu)
            last[i] = (before - now[i], {peer_id: before - sent for peer_id, sent in at_send.items()})
        history.append(list(now))
        if delay == 0:
            _take(due, now, local, went_on_from, mix, alpha)
    return history


def _group(i: int, fragments: int, groups: int, pattern: str) -> int:
    return i % groups if pattern == "strided" else i * groups // fragments


def _take(
    due: list[int],
    theta: list[Tensor],
    local: dict[str, list[Tensor]],
    went_on_from: dict[str, list[Tensor]],
    mix: str,
    alpha: float,
) -> None:
    for peer_id, own in local.items():
        for i in due:
            if mix == "replace":
                own[i] = theta[i]
            elif mix == "lerp":
                own[i] = alpha * own[i] + (1 - alpha) * theta[i]
            else:
                own[i] = theta[i] + (own[i] - went_on_from[peer_id][i])


# Codecs: what a vector is after it was encoded and decoded.


def integers(x: Tensor, bits: int, block: int) -> Tensor:
    """Round each block to the multiples -(2^(bits-1) - 1) .. 2^(bits-1) - 1 of its largest magnitude's share."""
    largest = 2 ** (bits - 1) - 1
    parts = []
    for part in _parts(x, block):
        scale = part.abs().max() / largest
        parts.append((part / scale).round() * scale)
    return torch.cat(parts)


def masked_steps(merged: Tensor, bits: int, peers: int, block: int = 256) -> list[float]:
    """A masked sum's s by element: a power of two from the same block of the last merged vector."""
    limit = (2 ** (bits - 1) - 1) // peers
    kappa = 6 if bits == 8 else 32
    floor = 2**-6 * math.sqrt(sum(x * x for x in merged.tolist()) / len(merged))
    found = []
    for before in _parts(merged, block):
        rms = math.sqrt(sum(x * x for x in before.tolist()) / len(before))
        found += [2.0 ** math.ceil(math.log2(kappa * max(rms, floor) / limit))] * len(before)
    return found


def masked_integers(u: Tensor, steps: Sequence[float], weight: float, bits: int, peers: int) -> Tensor:
    """What a peer masks: q = clamp(round(w u / s), -L, L)."""
    limit = (2 ** (bits - 1) - 1) // peers
    return torch.tensor([max(-limit, min(limit, round(weight * x / s))) for x, s in zip(u.tolist(), steps, strict=True)])


def masked_mean(integers: Sequence[Tensor], steps: Sequence[float], weights: Sequence[float]) -> Tensor:
    """D = s (sum of q) / (sum of w): what is merged of a masked sum."""
    return (torch.tensor(steps, dtype=torch.float64) * torch.stack(list(integers)).sum(0) / sum(weights)).float()


def e3m0(x: Tensor, block: int) -> Tensor:
    """Round each element to the nearest of 0 and +-2^-6 .. 2^0 times its block's largest magnitude (arXiv 2501.18512)."""
    grid = torch.tensor([0.0] + [sign * 2.0**e for e in range(-6, 1) for sign in (1, -1)])
    parts = []
    for part in _parts(x, block):
        values = grid * part.abs().max()
        parts.append(values[(part.unsqueeze(1) - values).abs().argmin(dim=1)])
    return torch.cat(parts)


def sign(x: Tensor, block: int) -> Tensor:
    """Replace each magnitude by its block's mean magnitude (arXiv 1901.09847)."""
    return torch.cat([torch.where(part < 0, -1.0, 1.0) * part.abs().mean() for part in _parts(x, block)])


def stat2(x: Tensor, block: int, spread: float) -> Tensor:
    """Replace each magnitude by the mean of those of its row up to, or above, spread / 4 standard deviations about 0."""
    return torch.cat([_two_levels(part, float(part.square().mean().sqrt()) * spread / 4) for part in _parts(x, block)])


def topk(x: Tensor, k: int, chunk: int = 4096) -> Tensor:
    """Keep the k largest magnitudes of each chunk (of equal ones the first) as two levels, the rest is 0 (arXiv 2508.15706)."""
    parts = []
    for part in _parts(x, chunk):
        magnitudes = part.abs().tolist()
        kept = [i for _, i in sorted((-magnitude, i) for i, magnitude in enumerate(magnitudes))[:k]]
        sent = torch.zeros_like(part)
        sent[kept] = _two_levels(part[kept], float(part[kept].abs().mean()))
        parts.append(sent)
    return torch.cat(parts)


def top1(x: Tensor, of: int, chunk: int = 4096) -> Tensor:
    """Keep the largest magnitude of each group of `of` (the first of equal ones) as two levels of the chunk, the rest is 0."""
    parts = []
    for part in _parts(x, chunk):
        kept = [
            start + int(group.abs().argmax()) for start, group in zip(range(0, part.numel(), of), _parts(part, of), strict=True)
        ]
        sent = torch.zeros_like(part)
        sent[kept] = _two_levels(part[kept], float(part[kept].abs().mean()))
        parts.append(sent)
    return torch.cat(parts)


def sdd(x: Tensor, columns: int, rank: int) -> Tensor:
    """Replace each block, as a matrix, by a sum of `rank` terms d a b' with a and b of -1, 0, 1 (Kolda and O'Leary, 1998)."""
    sent = []
    for part in _parts(x, columns * min(columns, 2**17 // columns)):
        rows = -(-part.numel() // columns)
        left = torch.zeros(rows * columns, dtype=torch.float64)
        left[: part.numel()] = part
        left, step = left.view(rows, columns), 0.0
        if left.any():
            step = 2.0 ** (math.floor(math.log2(float(left.abs().max()))) - 12)
            left = (left / step).round()
        total = torch.zeros_like(left)
        for _ in range(min(rank, rows)):
            b = _three_values(max(left, key=lambda row: float(row.abs().sum())))
            for _ in range(3):
                a = _three_values(left @ b)
                b = _three_values(a @ left)
            if a.any() and b.any():
                d = round(float(a @ left @ b) / float(a.abs().sum() * b.abs().sum()))
                total += d * torch.outer(a, b)
                left -= d * torch.outer(a, b)
        sent.append((step * total).flatten()[: part.numel()].float())
    return torch.cat(sent)


def _three_values(x: Tensor) -> Tensor:
    return torch.where(x.abs() >= 0.75 * x.abs().mean(), x.sign(), 0.0)


def _parts(x: Tensor, size: int) -> list[Tensor]:
    return [x[start : start + size] for start in range(0, x.numel(), size)]


def _two_levels(x: Tensor, edge: float) -> Tensor:
    levels = torch.zeros_like(x)
    for group in (x.abs() <= edge, x.abs() > edge):
        if bool(group.any()):
            levels[group] = x[group].abs().mean()
    return torch.where(x < 0, -levels, levels)


def feedback(deltas: Sequence[Tensor], lossy: Callable[[Tensor], Tensor], decay: float, clip: float = math.inf) -> list[Tensor]:
    """Return what is sent of each of a row of vectors: u = Delta + decay e; send lossy(u); e <- u - lossy(u).

    Contributions of one peer; merges as they are recorded for the outer optimizer; outer steps as they are published.
    clip: u <- u min(1, clip / ||u||) first, so what is cut off is not sent later.
    """
    error, sent = torch.zeros_like(deltas[0]), []
    for delta in deltas:
        total = delta + decay * error
        total = total * min(1.0, clip / max(float(total.double().square().sum().sqrt()), 1e-300))
        sent.append(lossy(total))
        error = total - sent[-1]
    return sent


def step_ahead(theta: Tensor, local: Tensor, sent: Tensor, stepped: Tensor, decay: float) -> Tensor:
    """Return a peer's local parameters after an outer step from theta to `stepped` (step-ahead error feedback, 2008.05823).

    local: as they were contributed; sent: what was decoded of theta - local. They keep what was not sent.
    """
    return stepped - decay * ((theta - local) - sent)
