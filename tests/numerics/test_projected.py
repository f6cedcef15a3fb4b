"""Projected optimizers, step by step: torch's AdamW where nothing is projected, the published ones where these are right."""

import itertools

import pytest
import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.projected import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedAdamW
from hf_offload.methods.projected import projections as spaces
from hf_offload.methods.projected.projections import leading_vectors
from tests.helpers.train import saved_and_loaded

SHAPES = {"tall": (24, 16), "wide": (16, 24), "square": (16, 16)}


def parameter(shape, seed=0, dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradient(shape, step, dtype=torch.float32):
    """Another one each step, with a spectrum that falls off, as gradients have it."""
    generator = torch.Generator().manual_seed(1000 + step)
    numbers = torch.randn(shape, generator=generator, dtype=dtype)
    if len(shape) == 2:
        numbers = numbers * torch.linspace(1, 0.1, shape[1], dtype=dtype) + torch.randn(
            shape[0], 1, generator=generator
        ).to(dtype)
    return numbers


def walk(optimizer, parameters, steps, start=0, eps_of=None):
    for step in range(start, start + steps):
        if eps_of is not None:
            optimizer.param_groups[0]["eps"] = eps_of(step + 1)
        for number, one in enumerate(parameters):
            one.grad = gradient(tuple(one.shape), step + 31 * number, one.dtype)
        optimizer.step()
    return [one.detach().clone() for one in parameters]


def projected(parameters, method, **settings):
    settings = {"lr": 1e-2, "weight_decay": 0.0, **settings}
    return ProjectedAdamW([{"params": parameters, "projected": True}], method, **settings)


# --------------------------------------------------------------------------------------------------------- plain AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_not_projected_has_the_bits_of_adamw(dtype):
    shapes = [(12, 8), (8,), ()]
    groups = [{"lr": 3e-3, "weight_decay": 0.1}, {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-5}]

    def run(make):
        parameters = [parameter(shape, seed, dtype) for seed, shape in enumerate(shapes)]
        optimizer = make([{"params": parameters[:2], **groups[0]}, {"params": parameters[2:], **groups[1]}])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(6):
            walk(optimizer, parameters, 1, step)
            scheduler.step()
        return parameters

    found = run(lambda groups: ProjectedAdamW(groups, GaLoreConfig()))
    wanted = run(lambda groups: torch.optim.AdamW(groups, foreach=False))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_frugal_with_everything_projected_is_adamw():
    mine, theirs = parameter((8, 6)), parameter((8, 6))
    method = FrugalConfig(density=1.0, update_proj_gap=4)
    optimizer = projected([mine], method, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, foreach=False)
    (found,), (wanted,) = walk(optimizer, [mine], 10), walk(reference, [theirs], 10)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "method",
    [GaLoreConfig(rank=4, svd="exact"), ApolloConfig(rank=4), FrugalConfig(projection="svd"), FrugalConfig()],
    ids=lambda method: method.name,
)
def test_betas_eps_and_learning_rate_of_a_group_are_used(method):
    """Each number changes the run, and a rate of zero stops it."""

    def run(**numbers):
        ones = [parameter((8, 6))]
        return walk(projected(ones, method, **numbers), ones, 4)[0]

    usual = run()
    for numbers in ({"betas": (0.5, 0.999)}, {"betas": (0.9, 0.9)}, {"eps": 0.1}, {"lr": 2e-2}, {"weight_decay": 0.1}):
        assert not torch.allclose(usual, run(**numbers), rtol=1e-5, atol=1e-7), numbers
    assert torch.equal(run(lr=0.0), parameter((8, 6)).detach())


# --------------------------------------------------------------------------------------------------- published GaLore

GALORE = {"rank": 5, "update_proj_gap": 4, "scale": 0.25}
# The published optimizers add eps before they correct the bias; where it is tiny, that makes no difference.
TINY_EPS = 1e-15


def published_galore(parameters, proj_type, **numbers):
    galore_torch = pytest.importorskip(
        "galore_torch", reason="pip install --no-deps galore-torch (it needs bitsandbytes)"
    )
    group = {"params": parameters, "proj_type": proj_type, **GALORE}
    return galore_torch.GaLoreAdamW([group], lr=1e-2, no_deprecation_warning=True, **numbers)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_galore_takes_the_published_steps(shape, proj_type):
    mine, theirs = parameter(SHAPES[shape]), parameter(SHAPES[shape])
    # No tiny one: of the first gradient, between both of its own spaces, all but the diagonal is what rounding left, and a
    # step that divides by its size alone goes wherever the processor rounded to.
    betas, eps = (0.8, 0.99), 1e-4
    method = GaLoreConfig(**GALORE, proj_type=proj_type, svd="exact", stagger=False)
    # The published one adds eps before it corrects the bias.
    ours = projected([mine], method, betas=betas)
    (found,) = walk(ours, [mine], 10, eps_of=lambda step: eps / (1 - betas[1] ** step) ** 0.5)
    (wanted,) = walk(published_galore([theirs], proj_type, betas=betas, eps=eps), [theirs], 10)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_state_is_loaded_safely():
    """That of the published optimizer has objects in it, which ``weights_only`` refuses."""
    mine = parameter((16, 16))
    ours = projected([mine], GaLoreConfig(**GALORE))
    walk(ours, [mine], 1)
    assert all(isinstance(value, torch.Tensor) for value in ours.state[mine].values())
    saved_and_loaded(ours.state_dict())


# --------------------------------------------------------------------------------------------------- published APOLLO


def published_apollo(ones, seeds=None, **settings):
    apollo_torch = pytest.importorskip(
        "apollo_torch", reason="pip install --no-deps apollo-torch (it needs bitsandbytes)"
    )
    group = {"params": ones, "proj": "random", "proj_type": "std", "update_proj_gap": 100, **settings}
    optimizer = apollo_torch.APOLLOAdamW([group], lr=1e-2, eps=TINY_EPS)
    for one, seed in zip(ones, seeds or [], strict=False):
        optimizer.state[one]["seed"] = seed
    return optimizer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", ["channel", "tensor", "mini"])
def test_apollo_takes_the_published_steps(shape, settings):
    theirs = {
        "channel": {"rank": 4, "scale": 1.0, "scale_type": "channel"},
        "tensor": {"rank": 4, "scale": 9.0, "scale_type": "tensor"},
        "mini": {"rank": 1, "scale": 128.0, "scale_type": "tensor"},
    }[settings]
    method = {
        "channel": ApolloConfig(rank=4),
        "tensor": ApolloConfig(rank=4, scale=3.0, scale_by="tensor"),
        "mini": ApolloConfig(rank=1, scale=128**0.5, scale_by="tensor"),
    }[settings]
    mine, other = parameter(SHAPES[shape]), parameter(SHAPES[shape])
    optimizer = projected([mine], method, eps=TINY_EPS)
    walk(optimizer, [mine], 1)
    seed = int(optimizer.state[mine]["seed"])
    (found,) = walk(optimizer, [mine], 9, 1)
    (wanted,) = walk(published_apollo([other], [seed], **theirs), [other], 10)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_apollos_step_grows_slowly():
    one = parameter((16, 12))
    optimizer = projected([one], ApolloConfig(rank=4))
    norms = []
    for step in range(6):
        one.grad = gradient((16, 12), 0) * 10.0**step
        optimizer.step()
        norms.append(optimizer.state[one]["norm"].item())
    growths = [after / before for before, after in itertools.pairwise(norms)]
    assert max(growths) <= 1.01 + 1e-5
    assert min(growths) == pytest.approx(1.01, rel=1e-4)


def test_apollo_is_not_held_down_by_a_gradient_of_zeros():
    """The published one starts again from a norm of 1e-8, and needs thousands of steps to come back."""

    def moved(make):
        one = parameter((16, 12))
        optimizer = make(one)
        for step, factor in enumerate((1.0, 0.0, 1.0)):
            before = one.detach().clone()
            one.grad = gradient((16, 12), step) * factor
            optimizer.step()
        return (one.detach() - before).norm().item()

    assert moved(lambda one: projected([one], ApolloConfig(rank=4))) > 1e-3
    published = moved(lambda one: published_apollo([one], rank=4, scale=1.0, scale_type="channel"))
    assert published < 1e-6


# -------------------------------------------------------------------------------------------------------------- FRUGAL


def test_frugal_with_nothing_projected_is_sign_sgd():
    for projection in ("blocks", "random", "svd"):
        one = parameter((8, 6))
        wanted = one.detach().clone()
        walk(
            projected([one], FrugalConfig(density=0, projection=projection, free_scale=0.5), weight_decay=0.1), [one], 3
        )
        for step in range(3):
            wanted.mul_(1 - 1e-2 * 0.1).add_(gradient((8, 6), step).sign(), alpha=-1e-2 * 0.5)
        torch.testing.assert_close(one.detach(), wanted)


@pytest.mark.parametrize("projection", ["random", "svd"])
def test_frugal_adds_adam_of_a_part_and_sgd_of_the_rest(projection):
    """The step without either half, from the two halves run alone; the rest has nothing of the part."""
    shape, rate = (12, 8), 1e-2

    def step(**settings):
        one = parameter(shape)
        walk(projected([one], FrugalConfig(projection=projection, free_rule="sgd", **settings), lr=rate), [one], 1)
        return (one.detach() - parameter(shape).detach()) / -rate

    both, part = step(), step(free_scale=0.0)
    rest = both - part
    torch.testing.assert_close((rest * part).sum() / part.norm() / rest.norm(), torch.tensor(0.0), atol=0.15, rtol=0)
    assert torch.linalg.matrix_rank(part, rtol=1e-3) == 2
    assert torch.linalg.matrix_rank(rest, rtol=1e-3) == 6


@pytest.mark.parametrize("projection", ["random", "svd"])
def test_frugal_with_a_whole_basis_leaves_no_rest(projection):
    """Not even the signs of rounding errors."""
    ends = []
    for scale in (0.0, 1.0):
        ones = [parameter((8, 6))]
        method = FrugalConfig(density=1.0, projection=projection, free_scale=scale)
        ends.append(walk(projected(ones, method), ones, 3)[0])
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], parameter((8, 6)))


def test_frugal_gives_every_matrix_its_turn():
    ones = [parameter((4, 4), seed) for seed in range(7)]
    optimizer = projected(ones, FrugalConfig(density=0.3, update_proj_gap=2))
    turns = []
    for step in range(8):
        walk(optimizer, ones, 1, step)
        turns.append({number for number, one in enumerate(ones) if "exp_avg" in optimizer.state[one]})
    assert [turns[step] == turns[step + 1] for step in (0, 2, 4, 6)] == [True] * 4
    assert [len(turns[step]) for step in (0, 2, 4, 6)] == [2, 2, 2, 1]
    assert set.union(*turns) == set(range(7))


# --------------------------------------------------------------------------------------------------------- projections


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (40, 40)])
@pytest.mark.parametrize("side", ["left", "right", "full"])
def test_randomised_vectors_hold_what_the_exact_ones_do(shape, side):
    """On a spectrum that falls slowly, where the randomised ones have it hardest."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) @ torch.diag(
        torch.arange(1, shape[1] + 1) ** -0.5
    )
    rank = 10

    def held(exact):
        vectors = leading_vectors(matrix, rank, side, exact=exact, generator=torch.Generator().manual_seed(1))
        for part, is_left in zip(vectors, (True, False), strict=True):
            assert (part is None) == (side == ("right" if is_left else "left"))
            if part is not None:
                product = part.t() @ part if is_left else part @ part.t()
                torch.testing.assert_close(product, torch.eye(rank), atol=1e-5, rtol=0)
        return spaces.Basis(*vectors).project(matrix).square().sum().item()

    assert held(exact=False) >= 0.99 * held(exact=True)


def raising(*_, **__):
    raise torch.linalg.LinAlgError("did not converge")


def test_svd_that_fails_is_done_in_another_way(monkeypatch):
    matrix = gradient((20, 12), 0)
    wanted = leading_vectors(matrix, 4, "right", exact=True)[1]
    monkeypatch.setattr(torch.linalg, "qr", raising)
    found = leading_vectors(matrix, 4, "right", generator=torch.Generator().manual_seed(0))[1]
    assert torch.equal(found, wanted)
    monkeypatch.setattr(torch.linalg, "svd", raising)
    assert leading_vectors(matrix, 4, "right", generator=torch.Generator().manual_seed(0)) is None


def test_a_gradient_without_numbers_leaves_the_projection_as_it_was(caplog):
    one = parameter((16, 12))
    optimizer = projected([one], GaLoreConfig(rank=4, update_proj_gap=2, stagger=False))
    walk(optimizer, [one], 2)
    before = optimizer.state[one]["right"].clone()
    one.grad = torch.full_like(one, float("nan"))
    optimizer.step()
    assert torch.equal(optimizer.state[one]["right"], before)
    assert "projection stays as it was" in caplog.text


def test_a_first_gradient_without_numbers_gives_a_random_projection(caplog):
    one = parameter((16, 12))
    optimizer = projected([one], GaLoreConfig(rank=4))
    one.grad = torch.full_like(one, float("inf"))
    optimizer.step()
    basis = optimizer.state[one]["right"]
    torch.testing.assert_close(basis @ basis.t(), torch.eye(4), atol=1e-5, rtol=0)
    assert "number 0" in caplog.text


@pytest.mark.parametrize("method", [GaLoreConfig(rank=4, update_proj_gap=6), ApolloConfig(rank=4, update_proj_gap=6)])
@pytest.mark.parametrize("count", [4, 6, 15])
def test_new_projections_are_staggered(method, count):
    ones = [parameter((8, 8), seed) for seed in range(count)]
    optimizer = projected(ones, method)
    name = "right" if method.name == "galore" else "seed"
    walk(optimizer, ones, 1)
    renewals = []
    for step in range(1, 13):
        before = [optimizer.state[one][name].clone() for one in ones]
        walk(optimizer, ones, 1, step)
        renewals.append(
            [not torch.equal(optimizer.state[one][name], old) for one, old in zip(ones, before, strict=True)]
        )
    assert max(sum(step) for step in renewals) <= -(-count // 6)
    assert [sum(step[number] for step in renewals) for number in range(count)] == [2] * count


# ------------------------------------------------------------------------------------------------- moments at a refresh


def at_refresh(on_refresh):
    """Back-projected first moments just before and after a new projection, and both bases; the gradient is zero."""
    one = parameter((16, 12))
    method = GaLoreConfig(rank=4, update_proj_gap=3, on_refresh=on_refresh, stagger=False, proj_type="right")
    optimizer = projected([one], method, betas=(0.9, 0.99), lr=0.0)
    walk(optimizer, [one], 3)
    state = optimizer.state[one]
    before = {name: value.clone() for name, value in state.items()}
    walk(optimizer, [one], 1, 3)
    return before, state, spaces.Basis(None, state["right"]).project(gradient((16, 12), 3))


def test_moments_are_kept_at_a_refresh_as_published():
    before, after, small = at_refresh("keep")
    assert not torch.allclose(before["right"], after["right"])
    torch.testing.assert_close(after["exp_avg"], 0.9 * before["exp_avg"] + 0.1 * small)
    torch.testing.assert_close(after["exp_avg_sq"], 0.99 * before["exp_avg_sq"] + 0.01 * small**2)


def test_moments_start_again_at_a_refresh():
    _, after, small = at_refresh("reset")
    torch.testing.assert_close(after["exp_avg"], 0.1 * small)
    torch.testing.assert_close(after["exp_avg_sq"], 0.01 * small**2)
    assert after["began"] == 3

    def last_step(start):
        """The step with the fourth gradient, from a state that began with it or before it."""
        one = parameter((16, 12))
        method = GaLoreConfig(rank=4, update_proj_gap=3, on_refresh="reset", stagger=False, svd="exact")
        optimizer = projected([one], method)
        walk(optimizer, [one], 3 - start, start)
        before = one.detach().clone()
        walk(optimizer, [one], 1, 3)
        return one.detach() - before

    torch.testing.assert_close(
        last_step(0), last_step(3), rtol=1e-4, atol=1e-6
    )  # the bias correction starts again as well


# ---------------------------------------------------------------------------------------------------- transposed weights


@pytest.mark.parametrize(
    "method",
    [
        *[
            GaLoreConfig(rank=4, svd="exact", update_proj_gap=3, proj_type=side, on_refresh="reset")
            for side in ("std", "reverse_std", "left", "full")
        ],
        ApolloConfig(rank=4, update_proj_gap=3),
        *[FrugalConfig(projection=kind, svd="exact", update_proj_gap=3) for kind in ("blocks", "random", "svd")],
    ],
    ids=lambda method: f"{method.name}-{getattr(method, 'proj_type', getattr(method, 'projection', ''))}",
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_transposed_weight_takes_the_same_steps(method, shape):
    usual = parameter(SHAPES[shape])
    turned = torch.nn.Parameter(usual.detach().t().contiguous())
    # Vectors of the transposed matrix may have other signs, so moments cannot be kept; and where both sides are projected,
    # all but the diagonal of the first projected gradient is rounding error, which Adam must not blow up.
    optimizers = [
        ProjectedAdamW([{"params": [one], "projected": True, "transposed": one is turned}], method, lr=1e-2, eps=1e-3)
        for one in (usual, turned)
    ]
    for step in range(5):
        usual.grad = gradient(SHAPES[shape], step)
        turned.grad = usual.grad.t().contiguous()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(turned.detach().t(), usual.detach(), rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- mistakes


def test_all_wrong_settings_are_told_at_once():
    with pytest.raises(OffloadConfigError, match="Did you mean 'reverse_std'") as caught:
        GaLoreConfig(
            rank=0, proj_type="reverse", scale=float("nan"), update_proj_gap=0, state_dtype="int8", svd="fast", seed=-1
        )
    assert len(caught.value.problems) == 7
    with pytest.raises(OffloadConfigError, match="take their moments with them"):
        FrugalConfig(projection="blocks", on_refresh="keep")
    with pytest.raises(OffloadConfigError, match="growth"):
        ApolloConfig(norm_growth_limit=0.5)


def test_a_rank_above_the_smaller_dimension_names_the_parameters():
    def group(**named):
        return [{"params": [(name, parameter(shape)) for name, shape in named.items()], "projected": True}]

    named = {"layers.0.q.weight": (16, 8), "layers.1.q.weight": (16, 8), "layers.0.up.weight": (32, 16), "bias": (16,)}
    with pytest.raises(OffloadConfigError, match=r"layers\.N\.q\.weight, \(16, 8\).*give 8 or less") as caught:
        ProjectedAdamW(group(**named), GaLoreConfig(rank=12))
    assert len(caught.value.problems) == 2
    assert "bias has the shape (16,): only matrices" in str(caught.value)
    ProjectedAdamW(group(q=(16, 12)), GaLoreConfig(rank=12))
    for proj_type in ("std", "left", "right", "full"):  # there are but 12 singular vectors on either side
        with pytest.raises(OffloadConfigError, match="rank=13"):
            ProjectedAdamW(group(q=(16, 12)), GaLoreConfig(rank=13, proj_type=proj_type))


def test_a_group_that_is_added_later_is_checked_too():
    optimizer = projected([parameter((16, 12))], GaLoreConfig(rank=12))
    with pytest.raises(OffloadConfigError, match="rank=12 is above what parameter number 1"):
        optimizer.add_param_group({"params": [parameter((8, 8))], "projected": True})


@pytest.mark.parametrize("method", [GaLoreConfig(rank=4), ApolloConfig(rank=4), FrugalConfig(projection="svd")])
def test_a_step_under_autocast_has_the_same_bits(method):
    ends = []
    for enabled in (False, True):
        ones = [parameter((16, 12))]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ends.append(walk(projected(ones, method), ones, 2)[0])
    assert torch.equal(*ends)


def test_state_of_a_default_dtype_and_device_of_ones_own():
    ones = [parameter((16, 12), dtype=torch.float32)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = projected(ones, GaLoreConfig(rank=4, on_refresh="reset"))
        ones[0].grad = torch.ones(16, 12, dtype=torch.float32)
        with torch.device("meta"):
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert {(value.dtype, value.device.type) for value in optimizer.state[ones[0]].values()} == {(torch.float32, "cpu")}


def test_numbers_out_of_range_are_refused_together():
    with pytest.raises(OffloadConfigError, match=r"lr=-1: give a number of 0 or more") as caught:
        ProjectedAdamW([parameter((4, 4))], GaLoreConfig(), lr=-1, betas=(0.9, 1.0), eps=float("nan"))
    assert "betas=(0.9, 1.0)" in str(caught.value)
    assert "eps=nan" in str(caught.value)


def test_sparse_gradients_are_refused():
    one = parameter((8, 8))
    optimizer = ProjectedAdamW([one], GaLoreConfig())
    one.grad = torch.eye(8).to_sparse()
    with pytest.raises(OffloadConfigError, match="sparse"):
        optimizer.step()
