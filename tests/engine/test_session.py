"""Attaching to real models: where hooks are entered and left, what is refused, and that nothing stays behind."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig, OffloadConfigError, attach, offload_activations
from hf_offload.structure.units import find_blocks


def tiny_gpt2(**config):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    defaults = {
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 32,
        "use_cache": False,
    }
    return GPT2LMHeadModel(GPT2Config(**defaults | {"bos_token_id": 0, "eos_token_id": 0} | config))


@pytest.fixture
def config(tmp_path):
    return OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0)


TOKENS = torch.arange(32).reshape(2, 16) % 64


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def no_hooks_on_autograd() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_module_hooks_offload_without_a_with_block(config):
    model = tiny_gpt2()
    session = attach(model, config)
    loss = model(TOKENS, labels=TOKENS).loss
    assert no_hooks_on_autograd()  # left again after forward
    loss.backward()
    assert session.stats.total.offloaded_bytes > 0
    session.detach()
    assert hooks_on(model) == 0
    session.detach()  # idempotent


def test_a_trainer_that_calls_inner_modules_is_served(config):
    model = tiny_gpt2()
    session = attach(model, config)
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    model.transformer.h[0](hidden).sum().backward()
    assert session.stats.total.offloaded_bytes > 0
    session.detach()


def test_a_block_inside_somebody_elses_hooks_leaves_them_innermost(config):
    model = tiny_gpt2()
    session = attach(model, config)
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.numel()) or t, lambda t: t):
        model.transformer.h[0](hidden).sum().backward()
    assert packed
    assert session.stats.total.offloaded_bytes == 0
    session.detach()


def test_units_name_blocks_and_keep_last_count_keeps_them(tmp_path):
    model = tiny_gpt2()
    assert list(find_blocks(model)) == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    sizes = []
    for keep in (0, 1, 3):
        config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, keep_last_count=keep)
        with offload_activations(model, config) as session:
            seen = set()
            original = session._engine._new_record
            session._engine._new_record = lambda t, *a, s=session, o=original, n=seen: n.add(s._engine.unit) or o(t, *a)
            model(TOKENS, labels=TOKENS).loss.backward()
        assert {f"transformer.h.{index}" for index in range(3 - keep)} <= seen
        assert not {f"transformer.h.{index}" for index in range(3 - keep, 3)} & seen
        sizes.append(session.stats.total.offloaded_bytes)
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(OffloadConfigError, match=r"keep_last_count=4.*3 blocks"):
        attach(model, OffloadConfig(tier="ssd", directory=tmp_path, keep_last_count=4))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["transformer.h.1", "transformer.h.1.mlp", "lm_head"])
def test_a_forward_that_raises_leaves_a_usable_session(config, error, where):
    model = tiny_gpt2()
    reference = tiny_gpt2()
    reference(TOKENS, labels=TOKENS).loss.backward()
    session = attach(model, config)

    def stumble(module, args):
        raise error

    handle = model.get_submodule(where).register_forward_pre_hook(stumble, prepend=True)
    with pytest.raises(error):
        model(TOKENS, labels=TOKENS)
    handle.remove()
    model(TOKENS, labels=TOKENS).loss.backward()
    assert no_hooks_on_autograd()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    session.detach()
    assert no_hooks_on_autograd()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_no_hooks_on_the_thread(config, error):
    """PyTorch calls the hooks that leave a module after errors, and not after an interrupt: then detaching leaves it."""
    model = tiny_gpt2()
    session = attach(model, config)

    def stumble(module, args):
        raise error

    model.lm_head.register_forward_pre_hook(stumble)
    with pytest.raises(error):
        model(TOKENS)
    assert no_hooks_on_autograd() or error is KeyboardInterrupt
    session.detach()
    assert no_hooks_on_autograd()


def test_a_recompute_enters_no_hooks(config):
    model = tiny_gpt2()
    session = attach(model, config)
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    loss = checkpoint(model.transformer.h[0], hidden, use_reentrant=True).sum()
    found = []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: found.append(no_hooks_on_autograd()))
    loss.backward()
    assert found == [True]
    assert no_hooks_on_autograd()
    session.detach()


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("tier", ["ssd", "ram"])
def test_a_forward_in_a_backward_hook_is_offloaded(tier, scoped, tmp_path):
    """One whose graph is alive meanwhile, of a model that is called in a hook of its own output."""

    def train(model):
        hidden = model(torch.ones(64, 32))
        second = []

        def again(gradient):
            with torch.enable_grad():
                second.append(model(hidden.detach() + gradient).square())
                moved.append(session and session.stats.step.offloaded_bytes)
                second[0].sum().backward()

        hidden.register_hook(again)
        moved.append(session and session.stats.step.offloaded_bytes)
        hidden.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32), nn.GELU())

    session, moved = None, []
    expected = train(network())
    model = network()
    directory = tmp_path if tier == "ssd" else None
    session, moved = attach(model, OffloadConfig(tier=tier, directory=directory, min_bytes=1024)), []
    with session.scope() if scoped else contextlib.nullcontext():
        found = train(model)
        assert no_hooks_on_autograd() != scoped
    assert no_hooks_on_autograd()
    assert all(map(torch.equal, expected, found))
    first, second = moved
    assert second - first >= 2 * 64 * 256 * 4
    session.detach()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules(config, tmp_path):
    def trained(config=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(8))
        session = config and attach(model, config)
        for _ in range(2):
            model(torch.ones(64, 32)).square().sum().backward()
        moved = session and session.stats.total.offloaded_bytes
        if session:
            session.detach()
        return [parameter.grad for parameter in model.parameters()], moved

    found, moved = trained(config)
    assert all(map(torch.equal, found, trained()[0]))
    assert moved > 0
    with pytest.raises(OffloadConfigError, match=r"^0\.weight gets its shape in the first forward.*run a forward"):
        trained(OffloadConfig(tier="auto", directory=tmp_path))


def test_the_with_block_covers_the_loss_outside_the_model_and_backward_after_it(config):
    model = tiny_gpt2()
    reference = tiny_gpt2()

    def loss_of(model):
        logits = model(TOKENS).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1) * 2, TOKENS.flatten())

    loss_of(reference).backward()
    inside = attach(model, config)
    loss_of(model)
    inner_bytes = inside.stats.total.offloaded_bytes
    inside.detach()
    with offload_activations(model, config) as session:
        loss = loss_of(model)
    assert session.stats.total.offloaded_bytes > inner_bytes
    loss.backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_other_threads_are_served_by_the_module_hooks(config):
    model = tiny_gpt2()
    with offload_activations(model, config) as session:
        thread = threading.Thread(target=lambda: model(TOKENS, labels=TOKENS).loss.backward())
        thread.start()
        thread.join()
        assert session.stats.total.offloaded_bytes > 0


def test_evaluation_in_the_middle(config):
    model = tiny_gpt2()
    with offload_activations(model, config) as session:
        loss = model(TOKENS, labels=TOKENS).loss
        before = session.stats.total.offloaded_bytes
        with torch.no_grad():
            model(TOKENS)
        model.eval()
        model(TOKENS, labels=TOKENS)  # with grad, never used
        model.train()
        loss.backward()
        assert session.stats.total.offloaded_bytes > before > 0


def test_statistics_per_step_add_up(config):
    model = tiny_gpt2()
    with offload_activations(model, config) as session:
        for _ in range(3):
            model(TOKENS, labels=TOKENS).loss.backward()
            session.end_step()
    stats, total = session.stats, session.stats.total
    assert len(stats.steps) == 3
    for name in ("offloaded_bytes", "deduplicated_bytes", "kept_bytes", "written_bytes"):
        # What is still being written when a step ends belongs to the next one, which is running here.
        assert sum(getattr(step, name) for step in (*stats.steps, stats.step)) == getattr(total, name)
    assert total.written_bytes == sum(tier.written_bytes for tier in stats.accounts["activations"].values())
    assert stats.steps[1].offloaded_bytes == stats.steps[2].offloaded_bytes > 0
    needed = {
        *("offloaded_bytes", "deduplicated_bytes", "forwarded_bytes", "kept_bytes", "written_bytes", "read_bytes"),
        *("stall_s", "write_bytes_per_s", "read_bytes_per_s", "peak_resident_bytes"),
    }
    assert needed <= set(stats.total.as_dict())


def test_refusals(tmp_path, monkeypatch, caplog):
    model = tiny_gpt2()
    with pytest.raises(OffloadConfigError, match=r"DataParallel.*accelerate launch"):
        attach(nn.DataParallel(model), OffloadConfig(directory=tmp_path))
    session = attach(model, OffloadConfig(directory=tmp_path))
    with pytest.raises(OffloadConfigError, match="already attached to this model"):
        attach(model, OffloadConfig(directory=tmp_path))
    session.detach()
    with pytest.raises(OffloadConfigError, match=r"disk_budget=.* free"):
        attach(model, OffloadConfig(directory=tmp_path, disk_budget="8000TiB"))
    with pytest.raises(OffloadConfigError, match=r"on meta, which has no streams.*tier='none'"):
        attach(tiny_gpt2().to("meta"), OffloadConfig(tier="ram"))
    assert not attach(tiny_gpt2().to("meta"), OffloadConfig(tier="none")).active
    with pytest.raises(OffloadConfigError, match="not there"):
        attach(model, OffloadConfig(directory=tmp_path / "not there"))
    frozen = tiny_gpt2().requires_grad_(False)
    assert not attach(frozen, OffloadConfig(directory=tmp_path)).active
    assert "nothing to offload" in caplog.text
    monkeypatch.setenv("HF_OFFLOAD_DISABLE", "1")
    assert not attach(model, OffloadConfig(directory=tmp_path)).active
    assert hooks_on(model) == hooks_on(frozen) == 0


def test_an_error_after_the_engine_is_there_leaves_nothing_attached(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no /proc")

    model, auto = tiny_gpt2(), OffloadConfig(directory=tmp_path, recompute_elementwise="exact")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no /proc"):
        patched.setattr("hf_offload.planning.automatic.hardware_of_all", fail)
        attach(model, auto)
    assert hooks_on(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())
    session = attach(model, auto)
    assert session.active
    session.detach()


def test_without_a_directory_the_temporary_one_is_used_named_and_left_empty(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = tiny_gpt2()
    with offload_activations(model, OffloadConfig(min_bytes=0)) as session:
        assert str(tmp_path) in caplog.text
        model(TOKENS, labels=TOKENS).loss.backward()
        assert session.stats.total.written_bytes > 0
        assert list(tmp_path.iterdir()) == []  # unlinked while open: a crash leaves nothing


def test_ram_on_the_cpu_warns_that_it_saves_nothing(caplog):
    with offload_activations(tiny_gpt2(), OffloadConfig(tier="ram", min_bytes=0)):
        assert "saves no memory" in caplog.text


def test_an_input_that_numpy_fills_again_is_another_input(tmp_path):
    def gradient(context):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        inputs = torch.randn(512, 64)
        with context(model) as session:
            earlier = model(inputs).sum()  # never used, and alive
            if session is not None:
                session.settle()  # its bytes are on the drive, however busy the machine is
            inputs.numpy()[:] = 1.0  # which raises no version
            loss = model(inputs).square().mean()
            del inputs
            loss.backward()
        del earlier
        return model[0].weight.grad

    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, read_ahead_bytes=0)
    expected = gradient(lambda model: contextlib.nullcontext())
    found = gradient(lambda model: offload_activations(model, config))
    assert torch.equal(expected, found)
