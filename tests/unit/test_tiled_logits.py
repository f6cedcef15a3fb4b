"""Logits that are read: always the true ones, or a clear error."""

import pytest
import torch
from torch import nn

from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead
from hf_offload.transforms.tiling.logits import TiledLogits

VOCABULARY, WIDTH = 50, 16


@pytest.fixture
def pair():
    """Lazy logits, and the ones they stand for."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(2, 6, WIDTH, requires_grad=True)
    true = head(hidden)
    TiledHead("head", head, Cut()).install()
    lazy = head(hidden)
    assert type(lazy) is TiledLogits
    return lazy, true


REMEMBERED = {
    "float": lambda logits: logits.float(),
    "double": lambda logits: logits.double(),
    "to a dtype": lambda logits: logits.to(torch.bfloat16),
    "to the same device": lambda logits: logits.to("cpu"),
    "view": lambda logits: logits.view(-1, VOCABULARY),
    "view with the size left open": lambda logits: logits.view(12, -1),
    "reshape": lambda logits: logits.reshape((3, 4, VOCABULARY)),
    "flatten": lambda logits: logits.flatten(0, 1),
    "contiguous": lambda logits: logits.contiguous(),
    "without the last token": lambda logits: logits[..., :-1, :],
    "without the first": lambda logits: logits[:, 1:],
    "one token": lambda logits: logits[:, -1, :],
    "one row": lambda logits: logits[0],
    "a new dimension": lambda logits: logits[:, None],
    "masked tokens": lambda logits: logits[torch.tensor([[True, False] * 3] * 2)],
    "chosen rows": lambda logits: logits[torch.tensor([1, 0])],
    "times a number": lambda logits: logits * 0.5,
    "a number times": lambda logits: 0.5 * logits,
    "soft cap": lambda logits: 30.0 * torch.tanh(logits / 30.0),
    "minus": lambda logits: -logits - 1,
    "plus a bias": lambda logits: logits + torch.arange(VOCABULARY).float()[None],
    "times a scalar tensor": lambda logits: logits * torch.tensor(2.0),
}
TRUE = {
    "transposed": lambda logits: logits.transpose(1, 2),
    "over the whole": lambda logits: logits.view(-1),
    "some columns": lambda logits: logits[..., :10],
    "one column": lambda logits: logits[:, :, 3],
    "an index behind": lambda logits: logits[..., None],
    "softmax": lambda logits: logits.softmax(-1),
    "flatten all": lambda logits: logits.flatten(),
    "sum": lambda logits: logits.sum(),
    "a matrix product": lambda logits: logits @ torch.ones(VOCABULARY, 3),
    "with another tensor": lambda logits: torch.cat([logits, logits]),
    "clone": lambda logits: logits.clone(),
    "divided by them": lambda logits: 1 / logits,
    "plus one for every token": lambda logits: logits + torch.arange(12.0).view(2, 6, 1),
    "chunks of the vocabulary": lambda logits: torch.cat(logits.chunk(2, dim=-1)),
}


@pytest.mark.parametrize("name", [*REMEMBERED, *TRUE])
def test_whatever_is_done_gives_what_it_gives_with_true_logits(pair, name):
    lazy, true = pair
    function = (REMEMBERED | TRUE)[name]
    found, expected = function(lazy), function(true)
    assert isinstance(found, TiledLogits) == (name in REMEMBERED)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.clone(), expected)


@pytest.mark.parametrize("name", [*REMEMBERED, *TRUE])
def test_gradients_go_all_the_way(pair, name):
    lazy, true = pair
    function = (REMEMBERED | TRUE)[name]
    hidden = lazy._hidden
    gradients = [torch.autograd.grad(function(one).clone().float().square().sum(), hidden)[0] for one in (true, lazy)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_pieces_along_tokens_stay_lazy(pair):
    lazy, true = pair
    for found, expected in zip(lazy.split(4, dim=1), true.split(4, dim=1), strict=True):
        assert isinstance(found, TiledLogits)
        torch.testing.assert_close(found.clone(), expected)


def test_the_best_token_needs_no_logits_of_all_tokens(pair, monkeypatch):
    lazy, true = pair
    monkeypatch.setattr("hf_offload.transforms.tiling.logits.true_logits", None)
    assert torch.equal(lazy.argmax(-1), true.argmax(-1))
    assert torch.equal(torch.argmax(lazy, dim=-1, keepdim=True), true.argmax(-1, keepdim=True))


def test_it_says_what_it_is_without_being_computed(pair, monkeypatch):
    lazy, true = pair
    monkeypatch.setattr("hf_offload.transforms.tiling.logits.true_logits", None)
    assert (lazy.shape, lazy.size(-1), lazy.dim(), lazy.ndim, len(lazy)) == ((2, 6, 50), 50, 3, 3, 2)
    assert (lazy.dtype, lazy.device, lazy.requires_grad) == (true.dtype, true.device, True)
    assert lazy.is_floating_point()
    assert lazy.numel() == true.numel()


def test_true_logits_are_computed_once(pair):
    lazy, _ = pair
    assert lazy.exp().grad_fn.next_functions[0][0] is lazy.sin().grad_fn.next_functions[0][0]


def test_columns_that_are_set_are_remembered_and_other_changes_in_place_refused(pair):
    """Chameleon rules out the tokens of images."""
    lazy, true = pair
    lazy[:, :, 4] = -1e9
    lazy[..., [5, 6]] = 0.0
    expected = true.clone()
    expected[:, :, 4] = -1e9
    expected[..., [5, 6]] = 0.0
    torch.testing.assert_close(lazy.clone(), expected)
    for change in (lambda: lazy.div_(2), lambda: lazy.__setitem__((0, 0), 1.0), lambda: lazy.masked_fill_(lazy > 0, 0)):
        with pytest.raises(RuntimeError, match="tiled_loss='off'"):
            change()


def test_a_gradient_that_would_be_lost_is_an_error(pair):
    lazy, true = pair

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return logits.exp()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    loss = Own.apply(lazy).sum()
    torch.testing.assert_close(loss, true.exp().sum())
    with pytest.raises(RuntimeError, match="never reach the model"):
        loss.backward()
    Own.apply(lazy.clone()).sum().backward()


def test_what_reads_them_behind_autograds_back_is_refused(pair):
    lazy, _ = pair
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="tiled_loss='off'"):
        lazy.exp()


@pytest.mark.parametrize(
    "options",
    [
        {"weight": torch.rand(VOCABULARY)},
        {"labels": torch.rand(12, VOCABULARY).softmax(-1)},
    ],
    ids=["weights of classes", "probabilities"],
)
def test_a_loss_of_another_kind_is_computed_from_true_logits(pair, options):
    lazy, true = pair
    labels = options.pop("labels", torch.arange(12) % VOCABULARY)
    found = nn.functional.cross_entropy(lazy.view(12, VOCABULARY), labels, **options)
    expected = nn.functional.cross_entropy(true.view(12, VOCABULARY), labels, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, lazy._hidden)[0] for one in (found, expected)))


def test_a_label_that_is_no_class_is_an_error(pair):
    lazy, _ = pair
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        nn.functional.cross_entropy(lazy.view(12, VOCABULARY), torch.full((12,), VOCABULARY))
