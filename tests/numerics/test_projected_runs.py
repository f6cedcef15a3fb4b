"""Whole trainings with projected optimizers: stopped and resumed, updated in backward, counted byte by byte."""

import copy
import io
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.param_groups import param_groups
from hf_offload.methods.projected import (
    ApolloConfig,
    FrugalConfig,
    GaLoreConfig,
    ProjectedAdamW,
    UpdateInBackward,
    state_bytes,
)
from hf_offload.methods.projected.sizes import adamw_bytes
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

SHARED = {"update_proj_gap": 5}
EIGHT_BIT = dict.fromkeys(("state_dtype", "plain_state_dtype", "projector_dtype"), "8bit")
METHODS = {
    "galore": GaLoreConfig(rank=4, **SHARED),
    "galore-full": GaLoreConfig(rank=4, proj_type="full", **SHARED),
    "galore-exact-reset": GaLoreConfig(rank=4, proj_type="reverse_std", svd="exact", on_refresh="reset", **SHARED),
    "galore-8bit": GaLoreConfig(rank=4, block_size=64, **EIGHT_BIT, **SHARED),
    "galore-bfloat16": GaLoreConfig(rank=4, projector_dtype="bfloat16", plain_state_dtype="bfloat16", **SHARED),
    "apollo": ApolloConfig(rank=4, **SHARED),
    "apollo-mini": ApolloConfig(rank=1, scale=128**0.5, scale_by="tensor", **SHARED),
    "frugal-blocks": FrugalConfig(free_scale=0.1, **SHARED),
    "frugal-random": FrugalConfig(projection="random", free_scale=0.1, free_rule="sgd", **SHARED),
    "frugal-svd": FrugalConfig(projection="svd", free_scale=0.1, **SHARED),
}


def method_of(name):
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    return METHODS[name]


class Run:
    """A tiny model on a batch that changes, with an optimizer and a schedule."""

    def __init__(self, method, *, architecture="llama", decaying=False, in_backward=False, seed=0, dtype=torch.float32):
        self.architecture = architecture
        self.model = tiny_model(architecture, dropout=0.0, seed=seed).to(dtype)
        groups = param_groups(self.model, weight_decay=0.1)
        self.optimizer = ProjectedAdamW(groups, method, lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 / (1 + s) if decaying else 1.0)
        self.update = UpdateInBackward(self.optimizer) if in_backward else None

    def train(self, start, end):
        losses = []
        for step in range(start, end):
            loss = self.model(**tiny_batch(self.architecture, seed=step % 3)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def save(self):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.schedule)], file)
        return file.getvalue()

    def load(self, saved):
        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.schedule), loaded, strict=True):
            part.load_state_dict(state)
        return self

    def tensors(self):
        states = [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]
        return [*weights(self.model).values(), *(value for state in states for _, value in sorted(state.items()))]


def assert_same(one, other):
    found, wanted = one.tensors(), other.tensors()
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("decaying", "in_backward"), [(False, False), (True, True)])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(name, decaying, in_backward):
    """Stopped after 8 steps, between two projections of most parameters; the resumed one gets new ones later."""
    settings = {"decaying": decaying, "in_backward": in_backward}
    whole = Run(method_of(name), **settings)
    whole.train(0, 8)
    saved = whole.save()
    whole.train(8, 13)
    torch.manual_seed(12345)  # nothing may hang on the global generator
    resumed = Run(method_of(name), seed=1, **settings).load(saved)
    resumed.train(8, 13)
    assert_same(resumed, whole)


def test_loading_keeps_the_dtypes_of_the_state():
    run = Run(GaLoreConfig(rank=4, state_dtype="float32", plain_state_dtype="float32"), dtype=torch.bfloat16)
    run.train(0, 2)
    other = Run(run.optimizer.method, dtype=torch.bfloat16).load(run.save())
    assert_same(other, run)
    for group in other.optimizer.param_groups:
        for one in group["params"]:
            state = other.optimizer.state[one]
            assert state["exp_avg"].dtype == (torch.float32 if one.dim() == 2 else torch.bfloat16)
            assert state.get("right", one).dtype == torch.bfloat16


def test_a_loaded_state_is_no_alias():
    run = Run(METHODS["galore"])
    run.train(0, 1)
    other = Run(METHODS["galore"])
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    before = run.tensors()
    kept = [value.clone() for value in before]
    other.train(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_a_copied_optimizer_goes_on_with_the_same_bits():
    run = Run(METHODS["galore"])
    run.train(0, 3)
    pair = copy.deepcopy((run.model, run.optimizer))
    other = Run(METHODS["galore"])
    other.model, other.optimizer = pair
    other.schedule = torch.optim.lr_scheduler.LambdaLR(other.optimizer, lambda step: 1.0)
    run.train(3, 8), other.train(3, 8)
    assert_same(other, run)


def test_a_state_dict_of_something_else_is_refused():
    run = Run(METHODS["galore"])
    run.train(0, 1)
    before = run.save()
    adamw = torch.optim.AdamW([{"params": g["params"]} for g in run.optimizer.param_groups])
    with pytest.raises(OffloadConfigError, match="not saved by a projected optimizer"):
        run.optimizer.load_state_dict(adamw.state_dict())
    with pytest.raises(OffloadConfigError, match="saved with name='apollo', but this optimizer has 'galore'"):
        run.optimizer.load_state_dict(Run(METHODS["apollo"]).optimizer.state_dict())
    other = Run(GaLoreConfig(rank=8, seed=1, **SHARED)).optimizer.state_dict()
    with pytest.raises(OffloadConfigError, match=r"seed=1, .*; rank=8, but this optimizer has 4"):
        run.optimizer.load_state_dict(other)
    swapped = run.optimizer.state_dict()
    swapped["param_groups"][0]["projected"] = False  # another model, or other targets
    with pytest.raises(OffloadConfigError, match="projected=False in group 0, but this optimizer has True"):
        run.optimizer.load_state_dict(swapped)
    assert run.save() == before


# ----------------------------------------------------------------------------------------------------- update in backward


@pytest.mark.parametrize("name", ["galore", "apollo", "frugal-blocks", "frugal-svd"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_update_in_backward_has_the_bits_of_update_in_step(name, architecture):
    usual = Run(METHODS[name], architecture=architecture, decaying=True)
    inside = Run(METHODS[name], architecture=architecture, decaying=True, in_backward=True)
    assert inside.train(0, 7) == usual.train(0, 7)
    assert_same(inside, usual)
    inside.update.remove()
    assert inside.train(7, 9) == usual.train(7, 9)  # in step() again
    assert_same(inside, usual)


def test_update_in_backward_never_holds_all_gradients():
    def most(in_backward):
        run = Run(METHODS["galore"], in_backward=in_backward)
        parameters = list(run.model.parameters())
        alive = []

        def count(_):
            alive.append(sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None))

        for one in parameters:
            one.register_post_accumulate_grad_hook(count)
        run.model(**tiny_batch("llama")).loss.backward()
        count(None)
        return max(alive), alive[-1]

    total = sum(p.numel() * p.element_size() for p in Run(METHODS["galore"]).model.parameters())
    assert most(in_backward=False) == (total, total)
    # Hooks of one parameter run in the order they were made, so its own gradient is gone when it is counted.
    assert most(in_backward=True) == (0, 0)


def test_a_second_backward_before_a_step_is_refused():
    run = Run(METHODS["galore"], in_backward=True)
    run.train(0, 2)
    run.model(**tiny_batch("llama")).loss.backward()
    before = weights(run.model)
    with pytest.raises(OffloadConfigError, match="second gradient before optimizer"):
        run.model(**tiny_batch("llama")).loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in weights(run.model).items())


def test_a_scaler_is_refused_in_backward_and_works_in_step():
    def train(in_backward):
        run = Run(METHODS["galore"], in_backward=in_backward)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scaler.scale(run.model(**tiny_batch("llama", seed=0)).loss).backward()
        if not in_backward:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        return run

    with pytest.raises(OffloadConfigError, match="GradScaler"):
        train(in_backward=True)
    plain = Run(METHODS["galore"])
    plain.train(0, 1)
    for a, b in zip(train(in_backward=False).tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def two_pretended_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_pretended_ranks")
def test_sharded_parameters_and_several_processes_are_refused():
    run = Run(METHODS["galore"])
    with pytest.raises(OffloadConfigError, match="averaged over 2 processes"):
        UpdateInBackward(run.optimizer)
    mesh = init_device_mesh("cpu", (2,))
    sharded = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh))
    for projected in (True, False):
        with pytest.raises(OffloadConfigError, match=r"layers\.N\.q is sharded"):
            ProjectedAdamW([{"params": [("layers.0.q", sharded)], "projected": projected}], GaLoreConfig(rank=4))
    # accelerate puts sharded parameters in the place of the others after the optimizer was made
    optimizer = ProjectedAdamW([torch.nn.Parameter(torch.randn(8, 8))], GaLoreConfig())
    optimizer.param_groups[0]["params"] = [sharded]
    sharded.grad = sharded.detach().clone()
    with pytest.raises(OffloadConfigError, match="is sharded"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------------- several processes


def replicas_stay_equal(rank, _folder):
    for name in ("galore", "apollo", "frugal-random"):
        method = METHODS[name]
        torch.manual_seed(rank)
        model = tiny_model("llama", dropout=0.0)
        wrapped = DistributedDataParallel(model)
        optimizer = ProjectedAdamW(param_groups(model), method, lr=1e-2)
        before = weights(model)
        for step in range(7):
            wrapped(**tiny_batch("llama", seed=10 * rank + step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        for value in [*weights(model).values(), *states]:
            everywhere = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(everywhere, value.contiguous())
            assert torch.equal(*everywhere), method
        assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


def test_replicas_of_two_processes_stay_equal(tmp_path):
    run_in_processes([replicas_stay_equal], 2, tmp_path)
    assert_done(replicas_stay_equal, 2, tmp_path)


# ------------------------------------------------------------------------------------------------------- bytes and losses


def shapes_of(optimizer):
    """Projected ones as ``[out, in]``, and the others."""
    projected, plain = [], []
    for group in optimizer.param_groups:
        for one in group["params"]:
            shape = tuple(reversed(one.shape)) if group["transposed"] else tuple(one.shape)
            (projected if group["projected"] else plain).append(shape)
    return projected, plain


def real_bytes(optimizer):
    return sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())


@pytest.mark.parametrize(
    ("name", "architecture"), [*((name, "llama") for name in METHODS), ("galore", "gpt2"), ("apollo", "t5")]
)
def test_the_state_has_the_bytes_that_were_counted(name, architecture):
    run = Run(method_of(name), architecture=architecture)
    turns = 20 if "blocks" in name else 2  # in which every matrix has its turn
    sizes = []
    for step in range(turns):
        run.train(step, step + 1)
        sizes.append(real_bytes(run.optimizer))
    counted = state_bytes(*shapes_of(run.optimizer), run.optimizer.method)
    assert max(sizes) == counted
    assert sizes == [counted] * turns or "blocks" in name


def test_every_dtype_takes_the_bytes_that_were_counted():
    pytest.importorskip("bitsandbytes")
    for kept in (None, "float32", "bfloat16", "8bit"):
        method = GaLoreConfig(rank=4, state_dtype=kept, projector_dtype=kept, plain_state_dtype=kept)
        run = Run(method, dtype=torch.bfloat16)
        run.train(0, 1)
        counted = state_bytes(*shapes_of(run.optimizer), method, torch.bfloat16)
        assert real_bytes(run.optimizer) == counted, kept


def test_eight_bits_without_bitsandbytes_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    for kept in ("state_dtype", "plain_state_dtype", "projector_dtype"):
        with pytest.raises(OffloadConfigError, match=r"hf-offload\[low-bit\]"):
            ProjectedAdamW([torch.nn.Parameter(torch.zeros(8, 8))], GaLoreConfig(rank=4, **{kept: "8bit"}))


LLAMAS = {"1B": (2048, 5461, 24, 512), "7B": (4096, 11008, 32, 1024)}


def llama_shapes(hidden, ffn, layers):
    """The paper's LLaMA with a vocabulary of 32000 and a head of its own."""
    block = [(hidden, hidden)] * 4 + [(ffn, hidden)] * 2 + [(hidden, ffn)]
    return block * layers, [(32000, hidden)] * 2 + [(hidden,)] * (2 * layers + 1)


@pytest.mark.parametrize(
    ("kept", "projector", "plain", "block_size", "saved_1b", "saved_7b"),
    [
        ("bfloat16", "float32", "bfloat16", 256, 54.5, 58.1),
        ("bfloat16", "bfloat16", "bfloat16", 256, 61.1, 65.1),
        ("8bit", "bfloat16", "bfloat16", 256, 72.2, 76.9),
        ("8bit", "8bit", "8bit", 256, 80.2, 82.3),
        ("8bit", "8bit", "8bit", 2048, 80.5, 82.5),
    ],
)
def test_the_papers_savings(kept, projector, plain, block_size, saved_1b, saved_7b):
    """-65.5 % and -82.5 %."""
    for size, saved in (("1B", saved_1b), ("7B", saved_7b)):
        *shape, rank = LLAMAS[size]
        projected, others = llama_shapes(*shape)
        method = GaLoreConfig(
            rank=rank, state_dtype=kept, projector_dtype=projector, plain_state_dtype=plain, block_size=block_size
        )
        full = adamw_bytes([*projected, *others], torch.bfloat16)
        found = state_bytes(projected, others, method, torch.bfloat16)
        assert round(100 * (1 - found / full), 1) == saved


def test_the_papers_saving_of_total_memory():
    """8-bit GaLore with update in backward against AdamW in bfloat16, 7B, with 2 GB of activations each: -63.3 %."""
    *shape, rank = LLAMAS["7B"]
    projected, others = llama_shapes(*shape)
    weight_bytes = 2 * sum(torch.Size(one).numel() for one in (*projected, *others))
    method = GaLoreConfig(rank=rank, block_size=2048, **EIGHT_BIT)
    state = state_bytes(projected, others, method, torch.bfloat16)
    largest_gradient = 2 * 32000 * 4096
    ours = weight_bytes + state + largest_gradient + 2e9
    theirs = 2 * weight_bytes + adamw_bytes([*projected, *others], torch.bfloat16) + 2e9
    assert 100 * (1 - ours / theirs) == pytest.approx(63.3, abs=0.2)
