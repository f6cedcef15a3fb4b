"""Estimates from a part of the input: unbiased, by enumeration and by many draws. The published biased ones are not."""

import fractions
import itertools

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_offload import SampledLinearConfig
from hf_offload.transforms.sampling import linear as sampled_linears
from hf_offload.transforms.sampling.apply import convert_linears
from hf_offload.transforms.sampling.gradient_cache import GradientCache
from hf_offload.transforms.sampling.linear import PADDING_WEIGHT, draw_part, draw_rows, winners
from tests.helpers.tables import rows as table

PROBABILITIES = {
    "flat": [0.2] * 5,
    "peaked": [0.7, 0.2, 0.05, 0.03, 0.02],
    "very peaked": [0.997, 0.001, 0.001, 0.001],
    "with zeros": [0.0, 0.6, 0.0, 0.4],
    "one": [0.0, 1.0, 0.0],
    "nothing": [0.0, 0.0, 0.0],
    "small": [0.3, 0.25, 0.2, 0.1, 0.05, 0.05, 0.05],
}


# ------------------------------------------------------------------------------------------------------- by enumeration


@pytest.fixture(params=["of a CPU", "of an accelerator"])
def sums(request, monkeypatch):
    """How probabilities are added up."""
    if request.param == "of an accelerator":
        monkeypatch.setattr(sampled_linears, "running_sums", sampled_linears._whole_sums)


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("name", PROBABILITIES)
def test_winners_are_those_of_brute_force(name):
    ordered = torch.tensor(PROBABILITIES[name], dtype=torch.double).sort(descending=True).values
    for count in range(1, len(ordered)):
        values = [(1 - ordered[:c].sum().item()) / (count - c) for c in range(count)]
        found = winners(ordered, count).item()
        assert values[found] <= min(values) + 1e-12
        assert 0 <= found < count


def outcomes(importance, count, keep_winners):
    """Every (indices, factors) that can be drawn, with its probability: the random numbers are chosen, not drawn."""
    weights = torch.tensor(importance, dtype=torch.double)
    total = weights.sum()
    chances = weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))
    ordered = chances.sort(descending=True, stable=True).values
    certain = winners(ordered, count).item() if keep_winners else 0
    upto = torch.cat([torch.zeros(1, dtype=torch.double), ordered.cumsum(0)])
    rest = (upto[-1] - upto[certain]).item()
    others = [place for place in range(certain, len(ordered)) if ordered[place] > 0] if rest > 1e-12 else [certain]
    for places in itertools.product(others, repeat=count - certain):
        middle = [(upto[place] + upto[place + 1]) / 2 for place in places]
        heights = [0.5] * certain + [((m - upto[certain]) / rest).item() if rest > 1e-12 else 0.5 for m in middle]
        probability = 1.0
        for place in places:
            probability *= ordered[place].item() / rest if rest > 1e-12 else 1.0
        random = torch.tensor(heights, dtype=torch.double)
        yield (*draw_rows(weights, random, keep_winners=keep_winners), probability)


def moments(importance, count, keep_winners, terms):
    """Mean and variance of the estimate of ``terms.sum(0)``, over all outcomes."""
    found = [
        (probability, (terms[indices] * factors[:, None]).sum(0))
        for indices, factors, probability in outcomes(importance, count, keep_winners)
    ]
    assert sum(probability for probability, _ in found) == pytest.approx(1, abs=1e-9)
    mean = sum(probability * value for probability, value in found)
    variance = sum(probability * (value - mean).square().sum() for probability, value in found)
    return mean, float(variance)


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", PROBABILITIES)
def test_every_estimate_is_unbiased_and_winners_never_add_variance(name, count):
    importance = PROBABILITIES[name]
    if count >= len(importance):
        pytest.skip("nothing is left out")
    # The theorem is about terms whose size is what importance says; directions are random.
    size = torch.tensor(importance, dtype=torch.double)[:, None]
    directions = torch.randn(len(importance), 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    terms = size * nn.functional.normalize(directions, dim=1)
    spreads = []
    for keep_winners in (True, False):
        mean, variance = moments(importance, count, keep_winners, terms)
        torch.testing.assert_close(mean, terms.sum(0), rtol=1e-9, atol=1e-12)
        spreads.append(variance)
    assert spreads[0] <= spreads[1] + 1e-12


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("keep_winners", [True, False])
def test_stale_importance_is_unbiased_too(keep_winners):
    """Any importance that is positive where a row counts: only the variance is worse."""
    terms = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    mean, _ = moments([0.1, 0.5, 0.2, 0.05, 0.15], 3, keep_winners, terms)
    torch.testing.assert_close(mean, terms.sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 7, 100_003])
def test_sums_of_whole_numbers_are_those_of_the_probabilities(rows):
    """Nearer to the true sums than float64 comes by adding up, and never falling."""
    generator = torch.Generator().manual_seed(rows)
    probabilities = torch.rand(rows, generator=generator, dtype=torch.double).pow(8)
    probabilities = (probabilities / probabilities.sum()).sort(descending=True).values
    found = sampled_linears._whole_sums(probabilities)
    exact = list(itertools.accumulate(fractions.Fraction(one) for one in probabilities.tolist()))
    worst = max(abs(fractions.Fraction(one) - other) for one, other in zip(found.tolist(), exact, strict=True))
    assert worst <= 2**-53 + rows * 2**-63  # of the last rounding, and of each number's
    assert (found.diff() >= 0).all()


# ---------------------------------------------------------------------------------------------------------- by many draws

ROWS, COLUMNS, OUTPUTS, DRAWS = 256, 24, 16, 1500
# 16 projections of up to 50 cases: a normal value is beyond this in one of a million families.
LIMIT = 6.5


def inputs(kind):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(ROWS, COLUMNS, generator=generator)
    if kind == "peaked":
        rows *= torch.logspace(0, -4, ROWS)[:, None]
    elif kind == "sparse":
        rows *= torch.rand(ROWS, COLUMNS, generator=generator) < 0.05
    elif kind == "duplicates":
        rows[ROWS // 2 :] = rows[0]
    elif kind == "zero rows":
        rows[::2] = 0
    elif kind == "zero":
        rows.zero_()
    return rows


def farthest(estimates, exact):
    """How many standard errors the mean of ``estimates`` is from ``exact``, in the worst of 16 fixed projections."""
    generator = torch.Generator().manual_seed(4)
    projections = torch.randn(16, exact.numel(), generator=generator, dtype=torch.double)
    values = torch.stack([projections @ one.double().flatten() for one in estimates])
    wanted = projections @ exact.double().flatten()
    error = (values.mean(0) - wanted).abs()
    spread = values.std(0) / len(values) ** 0.5
    floor = 1e-5 * wanted.abs().max() + 1e-12  # rounding in 32 bits
    return float(((error - floor).clamp_min(0) / spread.clamp_min(1e-30)).max())


def gradient_of(rows):
    return torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(5)) + 0.3 * rows[:, :OUTPUTS].sign()


@pytest.mark.parametrize("name", ["wta-crs", "crs", "rad", "features"])
@pytest.mark.parametrize(
    "kind",
    table(["flat", "peaked", "sparse", "duplicates", "zero rows", "zero"], quick=["peaked", "zero rows", "zero"]),
)
def test_the_mean_of_many_draws_is_the_gradient(name, kind):
    torch.manual_seed(0)
    rows = inputs(kind)
    gradient = gradient_of(rows)
    config = SampledLinearConfig(ratio=0.25, min_rows=1, estimator=name)

    def estimate():
        part = draw_part(rows, rows.dtype, config)
        return part.product(gradient, part.kept)

    assert farthest([estimate() for _ in range(DRAWS)], gradient.t() @ rows) < LIMIT


SAMPLES = 8


def samples_of(norms):
    """A forward of as many samples as there are ``norms``, each of which is as many rows."""
    cache = GradientCache(len(norms), ["layer"], torch.device("cpu"))
    cache.norms[:, 0] = norms
    cache.begin(torch.arange(len(norms)))
    return cache.rows_of("layer", torch.empty(len(norms), ROWS // len(norms), 1))


def gradient_by_sample():
    """Some samples are learned already, and their gradients are small."""
    scale = torch.logspace(0, -3, SAMPLES).repeat_interleave(ROWS // SAMPLES)
    return gradient_of(inputs("flat")) * scale[:, None]


CACHES = {
    "true": torch.logspace(0, -3, SAMPLES),
    "stale": torch.logspace(-3, 0, SAMPLES),
    "empty": torch.zeros(SAMPLES),
    "half": torch.logspace(0, -3, SAMPLES) * (torch.arange(SAMPLES) % 2),
}


@pytest.mark.parametrize("name", ["wta-crs", "crs"])
@pytest.mark.parametrize("cache", table(CACHES, quick=["stale", "half"]))
@pytest.mark.parametrize("kind", table(["flat", "peaked", "zero rows"], quick=["flat", "zero rows"]))
def test_any_cache_is_unbiased(kind, cache, name):
    torch.manual_seed(0)
    rows, gradient = inputs(kind), gradient_by_sample()
    config = SampledLinearConfig(ratio=0.25, min_rows=1, estimator=name, probabilities="gradient-cache")
    samples = samples_of(CACHES[cache])

    def estimate():
        part = draw_part(rows, rows.dtype, config, samples=samples)
        return part.product(gradient, part.kept)

    assert farthest([estimate() for _ in range(DRAWS)], gradient.t() @ rows) < LIMIT


def test_a_true_cache_lowers_the_error():
    torch.manual_seed(0)
    rows, gradient = inputs("flat"), gradient_by_sample()
    exact = gradient.t() @ rows
    config = SampledLinearConfig(ratio=0.25, min_rows=1, probabilities="gradient-cache")
    errors = {}
    for name, samples in (("true", samples_of(CACHES["true"])), ("none", None)):
        parts = [draw_part(rows, rows.dtype, config, samples=samples) for _ in range(100)]
        errors[name] = sum((part.product(gradient, part.kept) - exact).square().sum() for part in parts)
    assert errors["true"] < 0.5 * errors["none"]


def without_weights(rows, gradient, count):
    """The most important rows and some others, none of them weighted: what is published with an empty cache."""
    importance = rows.norm(dim=1)
    indices, factors = draw_rows(importance, torch.rand(count, dtype=torch.double), keep_winners=True)
    return gradient[indices].t() @ (rows[indices] * (factors > 0)[:, None])


def without_replacement(rows, gradient, count):
    """Distinct rows with weights of draws that may repeat: the published second level."""
    importance = rows.norm(dim=1) + 1e-12
    indices = torch.multinomial(importance, count, replacement=False)
    return gradient[indices].t() @ rows[indices]


@pytest.mark.parametrize("mutant", [without_weights, without_replacement])
def test_the_published_biased_ways_are_found_out(mutant):
    torch.manual_seed(0)
    rows = inputs("peaked")
    gradient = gradient_of(rows)
    estimates = [mutant(rows, gradient, ROWS // 4) for _ in range(DRAWS)]
    assert farthest(estimates, gradient.t() @ rows) > LIMIT


def test_winners_lower_the_error_on_peaked_rows():
    torch.manual_seed(0)
    rows = inputs("peaked")
    gradient = gradient_of(rows)
    exact = gradient.t() @ rows
    errors = {}
    for name in ("wta-crs", "crs"):
        config = SampledLinearConfig(ratio=0.25, min_rows=1, estimator=name)
        parts = [draw_part(rows, rows.dtype, config) for _ in range(200)]
        errors[name] = sum((part.product(gradient, part.kept) - exact).square().sum() for part in parts)
    assert errors["wta-crs"] < 0.5 * errors["crs"]


# ----------------------------------------------------------------------------------------------------- what stays exact


def usual_and_sampled(kind, **settings):
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20) if kind == "linear" else Conv1D(20, 12) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    convert_linears(layers[1], SampledLinearConfig(targets="all", **settings))
    assert isinstance(layers[1], type(layers[0]))
    return layers


def run(layer, autocast=None):
    torch.manual_seed(1)
    values = torch.randn(4, 16, 12).requires_grad_()
    weights = torch.randn(4, 16, 20)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        output = layer(values)
    layer.zero_grad()
    (output.float() * weights).sum().backward()
    return output.detach(), values.grad, layer.bias.grad, layer.weight.grad


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["wta-crs", "crs", "rad", "features"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_outputs_and_other_gradients_are_exact(kind, name, autocast):
    usual, sampled = usual_and_sampled(kind, ratio=0.5, min_rows=1, estimator=name)
    expected, found = run(usual, autocast), run(sampled, autocast)
    for one, other in zip(expected[:3], found[:3], strict=True):
        assert torch.equal(one, other)
    assert expected[3].dtype == found[3].dtype
    assert expected[3].shape == found[3].shape
    assert not torch.equal(expected[3], found[3])


@pytest.mark.parametrize("settings", [{"ratio": 1.0}, {"ratio": 0.1, "min_rows": 64}])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_everything_kept_is_exact_to_the_last_bit(kind, settings):
    usual, sampled = usual_and_sampled(kind, **settings)
    assert all(torch.equal(one, other) for one, other in zip(run(usual), run(sampled), strict=True))


# -------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("name", ["wta-crs", "crs"])
def test_rows_of_padding_are_rarely_drawn_and_never_for_nothing(name):
    """Unbiased even where padding has gradients; where it has none, half of the rows are as good as all of them would be."""
    torch.manual_seed(0)
    rows, gradient = inputs("flat"), gradient_of(inputs("flat"))
    weights = torch.ones(ROWS)
    weights[ROWS // 2 :] = PADDING_WEIGHT
    config = SampledLinearConfig(ratio=0.25, min_rows=1, estimator=name)

    def estimates(gradient, weights, count):
        parts = [draw_part(rows, rows.dtype, config, weights) for _ in range(count)]
        return [part.product(gradient, part.kept) for part in parts]

    assert farthest(estimates(gradient, weights, DRAWS), gradient.t() @ rows) < LIMIT
    gradient[ROWS // 2 :] = 0
    exact = gradient.t() @ rows
    errors = [sum((one - exact).square().sum() for one in estimates(gradient, some, 200)) for some in (weights, None)]
    assert errors[0] < 0.6 * errors[1]
