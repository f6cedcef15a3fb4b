"""What users of torch.optim do around a step, with the optimizer in memory and streamed: the same bits, or a refusal."""

import collections
import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadConfigError
from hf_offload.state.gradients import parked_gradient
from hf_offload.state.optimizer import streaming_of
from tests.helpers.streamed import Run, batch, copied, let_state_come_and_go, mlp, same, stream_in_parts, train
from tests.helpers.unusual_optimizers import (
    Factored,
    FillsGradients,
    HasFactor,
    NormalizesConvolutions,
    ReadsParameters,
    TrustRatio,
    WritesGradients,
)

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def adamw(run, model, **options):
    return run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options))


# -- where an update is computed -----------------------------------------------------------------------------------------


@scenario
def weights_are_used_first_in_inference(run):
    model = mlp()
    optimizer = adamw(run, model)

    def evaluate(number):
        with torch.inference_mode():
            run.log(model(batch(100)), model[0].weight.grad.sum())

    train(run, model, optimizer, after=evaluate, zero=False)
    run.log_all(model, optimizer)


def _half_precision(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs).float().square().mean()


@scenario
def weights_are_used_first_under_autocast(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    train(run, model, optimizer, loss=_half_precision)
    run.log_all(model, optimizer)


@scenario
def steps_under_autocast(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        train(run, model, optimizer, loss=lambda model, inputs: model(inputs).float().square().mean())
    run.log_all(model, optimizer)


@scenario
def steps_with_another_default_dtype(run):
    model = mlp()
    optimizer = adamw(run, model)
    model(batch(0)).square().mean().backward()
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer.zero_grad()
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def weights_are_used_first_in_transforms(run):
    model, inputs = mlp(), batch(100)
    optimizer = adamw(run, model)

    def loss(parameters, inputs):
        return torch.func.functional_call(model, parameters, inputs).square().mean()

    uses = [
        lambda: torch.func.grad(loss)(dict(model.named_parameters()), inputs),
        lambda: torch.func.grad(lambda inputs: model(inputs).sum())(inputs),
        lambda: torch.func.vmap(lambda row: row.sum())(model[0].weight),
        lambda: torch.func.vmap(model)(inputs),
        lambda: torch.func.jacrev(lambda inputs: model(inputs).sum(0))(inputs[:1]),
    ]
    train(run, model, optimizer, steps=len(uses), after=lambda number: run.log(uses[number]()))
    run.log_all(model, optimizer)


@scenario
def weights_are_used_first_with_fake_tensors(run):
    model = mlp()
    optimizer = adamw(run, model)

    def trace(number):
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            run.log(list(model(torch.zeros(2, 96)).shape))

    train(run, model, optimizer, after=trace)
    run.log_all(model, optimizer)


@scenario
def functions_are_compiled_later(run):
    torch._dynamo.reset()
    model = mlp()
    optimizer = adamw(run, model)
    compiled = torch.compile(lambda inputs: model(inputs).square().mean(), backend="aot_eager")
    train(run, model, optimizer, loss=lambda _, inputs: compiled(inputs))
    run.log_all(model, optimizer)


@scenario
def a_block_is_compiled(run):
    torch._dynamo.reset()
    model = mlp()
    model[2].compile(backend="aot_eager")
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def attention_has_a_fast_path_in_evaluation(run):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2)
    optimizer = adamw(run, model)
    inputs = torch.randn(3, 7, 64)
    mask = torch.tensor([[False] * 5 + [True] * 2] * 3)
    for _ in range(3):
        loss = model.train()(inputs).square().mean()
        run.log(loss)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            run.log(model.eval()(inputs), model(inputs, src_key_padding_mask=mask))
        optimizer.zero_grad()
    run.log_all(model, optimizer)


# -- memory that others hold ---------------------------------------------------------------------------------------------


@scenario
def memory_of_weights_is_held(run):
    model = mlp()
    views = [p.detach().view(-1) for p in model.parameters()]
    arrays = [p.detach().numpy() for p in model.parameters()]
    optimizer = adamw(run, model)
    train(run, model, optimizer, after=lambda _: run.log(views, [array.tolist() for array in arrays]))
    run.log_all(model, optimizer)


@scenario
def memory_of_gradients_is_held(run):
    model = mlp()
    optimizer = adamw(run, model)
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer

    def zero(number):
        for buffer in buffers:
            buffer.zero_()

    train(run, model, optimizer, before=lambda _: run.log(buffers), after=zero, zero=False)
    model(batch(9)).mean().backward()
    gradients = [p.grad for p in model.parameters()]
    model(batch(9)).mean().backward()
    run.log(gradients)
    run.log_all(model, optimizer)


@scenario
def weights_get_other_memory(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(1024, 8))
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))

    def loss(model, _):
        dtype = model[0].weight.dtype
        return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)).square().mean()

    train(run, model, optimizer, loss=loss, zero=False)
    if run.place != "none" and not run.state_comes_and_goes:
        assert len(streaming_of(optimizer).spans(model[2].weight)) > 1
    model.to(memory_format=torch.channels_last)
    train(run, model, optimizer, loss=loss)
    model[2].weight.data = model[2].weight.data * 2
    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@scenario
def a_backward_is_older_than_the_step(run):
    torch.manual_seed(0)  # a convolution saves its weight, not a view of it
    model = nn.Sequential(nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 256, 3))
    optimizer = adamw(run, model)
    for _ in range(2):
        inputs = batch(0).requires_grad_()
        first, second = (model(inputs).square().mean() for _ in range(2))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(second, inputs)
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@scenario
def parameters_are_made_of_parameters(run):
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer, after=lambda _: run.log(repr(model[0].weight), nn.Parameter(model[0].weight)))
    run.log_all(model, optimizer)


# -- gradients -----------------------------------------------------------------------------------------------------------


@scenario
def weights_are_frozen_before_and_between(run):
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    model[0].weight.requires_grad_(True)
    train(run, model, optimizer)
    model[2].weight.requires_grad_(False)
    train(run, model, optimizer, zero=False)
    if run.place != "none" and not run.state_comes_and_goes:
        assert parked_gradient(model[0].weight.grad) is not None
    run.log_all(model, optimizer)


@scenario
def a_graph_of_the_gradient_is_made(run):
    model = mlp()
    optimizer = adamw(run, model)
    for number in range(3):
        model(batch(number)).square().mean().backward()
        model(batch(number)).square().mean().backward(create_graph=True)
        run.log([p.grad for p in model.parameters()])
        if number == 1:
            sum(p.grad.square().sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@scenario
def gradients_are_set_and_changed(run):
    model = mlp()
    optimizer = adamw(run, model)

    def change(number):
        model[0].weight.grad = None
        model[2].weight.grad = torch.full_like(model[2].weight, 0.1)
        model[4].weight.grad *= 2
        run.log(run.clip(model, 0.5))

    train(run, model, optimizer, before=change, after=lambda _: model[2].weight.grad.mul_(100), zero=False)
    run.log_all(model, optimizer)


@scenario
def hooks_of_the_user_come_before(run):
    """They see the sum of all gradients so far, and change it."""
    model = mlp()
    for number, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(
            [
                lambda weight: setattr(weight, "grad", weight.grad * 0.5),
                lambda weight: run.log(weight.grad.mul_(0.5)),
                lambda weight: run.log(weight.grad),
                lambda weight: setattr(weight, "grad", None),
            ][number % 4]
        )
    optimizer = adamw(run, model)
    for number in range(3):
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        run.log([weight.grad for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@scenario
def hooks_of_the_user_come_before_a_graph_of_the_gradient(run):
    model = mlp()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: run.log(weight.grad))
    optimizer = adamw(run, model)
    model(batch(0)).square().mean().backward()
    model(batch(1)).square().mean().backward(create_graph=True)
    sum(weight.grad.square().sum() for weight in model.parameters()).backward()
    optimizer.step()
    run.log_all(model, optimizer)


@scenario
def hooks_of_the_user_come_before_and_step(run):
    """Every other time, each with an optimizer of its own."""
    model = mlp()
    optimizers, calls = {}, collections.Counter()

    def step(weight):
        calls[weight] += 1
        if calls[weight] % 2 == 0:
            optimizers[weight].step()
            if calls[weight] % 4 == 0:
                optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    for weight in model.parameters():
        optimizers[weight] = run.prepare(model, torch.optim.AdamW([weight], lr=1e-2))
    for number in range(8):
        loss = model(batch(number)).square().mean()
        run.log(loss)
        loss.backward()
    run.log([weight.grad for weight in model.parameters() if weight.grad is not None])
    for optimizer in optimizers.values():
        run.log_all(model, optimizer)


@scenario
def hooks_of_the_user_come_before_and_clip(run):
    model = mlp()
    for weight in (model[0].weight, model[2].weight, model[4].weight):
        weight.register_post_accumulate_grad_hook(lambda _: run.log(run.clip(model, 0.001)))
    optimizer = adamw(run, model)
    for number in range(3):
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@scenario
def gradients_are_clipped_in_all_ways(run):
    model = mlp()
    optimizer = adamw(run, model)
    clips = [
        lambda: run.log(run.clip(model, 0.5), run.clip(model, 0.1)),
        lambda: run.log(nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda: run.log(run.clip(model, 0.1, norm_type=float("inf")), run.clip(model, 0.01, norm_type=1.0)),
        lambda: run.log(run.clip(model, float("inf"))),
    ]
    train(
        run, model, optimizer, len(clips), before=lambda number: clips[number](), after=lambda _: run.clip(model, 0.1)
    )
    run.log_all(model, optimizer)


@scenario
def gradients_are_set_to_zeros(run):
    model = mlp()
    optimizer = adamw(run, model)
    for number in range(4):
        train(run, model, optimizer, steps=1, first=number, zero=False)
        (optimizer if number % 2 else model).zero_grad(set_to_none=False)
        optimizer.step()
        run.log([p.grad for p in model.parameters()])
    run.log_all(model, optimizer)


@scenario
def a_class_writes_its_gradients(run):
    """With Nesterov's momentum, SGD adds to lists of gradients in place."""
    model = mlp()
    optimizer = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, foreach=True)
    )
    train(run, model, optimizer, after=lambda _: run.log([p.grad for p in model.parameters()]), zero=False)
    run.log_all(model, optimizer)


@scenario
def gradients_are_checkpointed_twice(run):
    model = mlp()
    optimizer = adamw(run, model)

    def loss(model, inputs):
        twice = checkpoint(model, checkpoint(model, inputs.requires_grad_(), use_reentrant=True), use_reentrant=True)
        return twice.square().mean()

    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_gradient_scaler(fused, unscaled, tmp_path):
    def scaled(run):
        model = mlp()
        optimizer = adamw(run, model, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for number in range(5):
            loss = model(batch(number)).square().mean() * (float("inf") if number == 3 else 1)
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                if (parked := parked_gradient(parameter.grad)) is not None:
                    parked.leave()  # where backward has ended before it was written
                    parked.wait_until_written()
                    assert parked.is_away
            if unscaled:
                scaler.unscale_(optimizer)
                run.log(run.clip(model, 0.1))
            scaler.step(optimizer)
            scaler.update()
            if number % 2:
                run.log(model[0].weight.grad)
            optimizer.zero_grad()
            run.log(scaler.get_scale())
        run.log_all(model, optimizer)

    _compare(scaled, "ssd", tmp_path)


# -- the optimizer -------------------------------------------------------------------------------------------------------


@scenario
def gradients_are_shared_with_other_processes(run):
    model = mlp()
    optimizer = adamw(run, model)

    def share_and_add(number):
        for parameter in model.parameters():
            if (parked := parked_gradient(parameter.grad)) is not None:
                parked.leave()
                parked.wait_until_written()
        model.share_memory()
        model(batch(100 + number)).square().mean().backward()

    train(run, model, optimizer, before=share_and_add)
    run.log_all(model, optimizer)


@scenario
def state_is_replaced(run):
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    optimizer.state = collections.defaultdict(dict)
    train(run, model, optimizer)
    optimizer.state.clear()
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def state_is_read_and_written(run):
    model = mlp()
    optimizer = adamw(run, model)
    state, weight = optimizer.state, model[0].weight
    train(run, model, optimizer, after=lambda _: run.log(weight in state, state.get(weight)))
    state = optimizer.state  # after all steps: what is taken out of it is not made again
    run.log(state.setdefault(weight, {})["exp_avg"], [one["exp_avg"] for one in state.values()])
    state.update({weight: {name: value * 2 for name, value in state[weight].items()}})
    del state[model[4].weight]
    train(run, model, optimizer)
    run.log(len(state), weight in state, state.copy()[weight]["exp_avg"], {**state}[weight]["exp_avg"])
    run.log((copy.copy(state) | {"a": 1})[weight]["exp_avg"], ({"a": 1} | state)[weight]["exp_avg"])
    state |= {weight: {name: value * 2 for name, value in state[weight].items()}}
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def another_optimizer_follows(run):
    model = mlp()
    train(run, model, adamw(run, model), zero=False)
    gc.collect()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(run, model, optimizer, zero=False)
    run.log_all(model, optimizer)


@scenario
def model_and_optimizer_are_copied(run):
    model = mlp()
    optimizer = adamw(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(run, model, optimizer, after=lambda _: scheduler.step(), zero=False)
    pairs = [(model, optimizer), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for one, its_optimizer in pairs:
        train(run, one, its_optimizer)
        run.log_all(one, its_optimizer)


def _of_class(kind, **options):
    def run_it(run):
        torch.manual_seed(0)
        model = mlp()
        for parameter in model.parameters():
            parameter.scale = 0.5
        optimizer = kind(model.parameters(), **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)  # begins with 0
        run.prepare(model, optimizer)

        def schedule(number):
            scheduler.step()

        train(
            run,
            model,
            optimizer,
            loss=lambda model, inputs: model[0](inputs).square().mean(),
            after=schedule,
            zero=False,
        )
        optimizer.factor = 0.5
        train(run, model, optimizer, steps=4, after=schedule)
        run.log(model[0].weight.grad)
        run.log_all(model, optimizer)

    return run_it


for kind in (Factored, FillsGradients, HasFactor, ReadsParameters, TrustRatio, WritesGradients):
    SCENARIOS[kind.__name__] = _of_class(kind)
STEP_AS_A_WHOLE = [*SCENARIOS.values()][-6:]


@scenario
def a_class_treats_convolutions_in_another_way(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 256, 3), nn.Flatten(), nn.Linear(1024, 96))
    optimizer = run.prepare(model, NormalizesConvolutions(model.parameters()))
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def a_group_is_added_whose_weights_cannot_be_cut(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model[0].parameters(), lr=0.1))
    train(run, model, optimizer)
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@scenario
def a_class_raises_an_error(run):
    model = mlp()
    optimizer = run.prepare(model, HasFactor(model.parameters()))
    train(run, model, optimizer)
    model(batch(0)).mean().backward()
    optimizer.factor = "none"
    with pytest.raises(TypeError):
        optimizer.step()
        model[0].weight.sum()
    optimizer.factor = 1.0
    optimizer.zero_grad()
    train(run, model, optimizer)
    run.log_all(model, optimizer)


STEP_AS_A_WHOLE += [a_class_treats_convolutions_in_another_way, a_class_raises_an_error]


def _compare(function, place, tmp_path):
    logs = []
    for each in ("none", place):
        run = Run(each, tmp_path)
        function(run)
        logs.append(run.logged)
    expected, found = logs
    assert len(expected) == len(found) > 1
    assert [index for index, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)] == []


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning", "ignore:.*is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_has_the_bits_of_the_run_in_memory(name, tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    _compare(SCENARIOS[name], "ssd", tmp_path)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning", "ignore:.*is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_has_them_too_where_the_state_of_some_weights_comes_to_memory_and_leaves_it_again(
    name, seed, tmp_path, monkeypatch
):
    stream_in_parts(monkeypatch)
    counts = let_state_come_and_go(monkeypatch, seed)
    _compare(SCENARIOS[name], "ssd", tmp_path)
    assert any(counts) or SCENARIOS[name] in STEP_AS_A_WHOLE


def test_updates_wait_where_nobody_holds_the_memory(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = adamw(run, model)
    in_parts = {name for name, one in model.named_parameters() if streaming_of(optimizer).spans(one) is not None}
    assert in_parts == {"0.weight", "2.weight", "4.weight"}
    view = model[0].weight.detach()
    for number in range(2):  # the first step makes the state, at once
        model(batch(number)).mean().backward()
        assert all(parked_gradient(p.grad) is not None for p in model.parameters())
        optimizer.step()
    waiting = {record.name for record in streaming_of(optimizer).records if record.update is not None}
    assert waiting == {name for name, _ in model.named_parameters()} - {"0.weight"}
    del view


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: (torch.jit.script(model), torch.optim.SGD(model.parameters())), "TorchScript"),
        (lambda model: (model, _with_own_step(model)), "was replaced"),
    ],
    ids=["TorchScript", "own step"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_streamed_is_refused(make, message, tmp_path):
    model, optimizer = make(mlp())
    with pytest.raises(OffloadConfigError, match=message):
        Run("ssd", tmp_path).prepare(model, optimizer)


def _with_own_step(model):
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize("mode", ["lisa", "badam", "apollo_mini", "frugal", "galore"])
def test_optimizers_of_memory_modes_have_the_bits_of_the_run_in_memory(mode, tmp_path):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=32, resid_pdrop=0.0)
    settings = {"galore": {"rank": 4}, "lisa": {"blocks_active": 1, "switch_every": 1}, "badam": {"switch_every": 1}}
    found = []
    for place in ("none", "ssd"):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        files = {} if place == "none" else {"directory": tmp_path}
        asked = {"memory_mode": mode, "memory_mode_kwargs": settings.get(mode), "optimizer": place, "min_bytes": 256}
        session = attach(model, OffloadConfig(tier="none", **asked, **files))
        optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(5):
            tokens = torch.arange(16)[None] + step
            model(input_ids=tokens, labels=tokens).loss.backward()
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied([model.state_dict(), optimizer.state_dict()]))
        assert (streaming_of(optimizer) is not None) == (place == "ssd")
        session.detach()
    assert same(*found)


def test_activations_leave_memory_with_the_optimizer(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    logs = []
    for run in (Run("none", tmp_path), Run("ssd", tmp_path, tier="ssd", min_bytes=16)):
        model = mlp()
        optimizer = adamw(run, model)
        train(run, model, optimizer)
        run.log_all(model, optimizer)
        logs.append(run.logged)
        if run.session is not None:
            assert run.session.stats.total.offloaded_bytes > 0
            model(batch(0)).mean().backward()
            optimizer.step()
            assert all(record.update is not None for record in streaming_of(optimizer).records)
    assert same(*logs)
