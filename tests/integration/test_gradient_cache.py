"""Probabilities from the gradients of the last epoch: whose they are, where they are kept, and what happens without them."""

import copy
import json
import logging
import pickle

import datasets
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening

from hf_offload import OffloadConfig, OffloadConfigError, attach, offload_activations
from hf_offload.transforms.sampling.apply import carry_sample_ids
from hf_offload.transforms.sampling.gradient_cache import CACHE_FILE, SAMPLE_IDS, SAMPLE_PLACES
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights
from tests.helpers.trainers import make_trainer

SAMPLING = {"ratio": 0.25, "min_rows": 1, "probabilities": "gradient-cache"}
CONFIG = OffloadConfig(tier="none", sampled_linear=SAMPLING)
ROWS = 8


def rows(count=ROWS):
    examples = ExampleDataset("llama", count)
    return [dict(examples[index]) for index in range(count)]


def trainer(folder, data=None, **arguments):
    torch.manual_seed(0)
    settings = {"sampled_linear": json.dumps(SAMPLING), "max_steps": -1, **arguments}
    return make_trainer(
        folder, tiny_model("llama"), data=ExampleDataset("llama", ROWS) if data is None else data, **settings
    )


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# --------------------------------------------------------------------------------------------------------- in the Trainer


def test_one_argument_is_enough_and_the_checkpoint_holds_the_norms(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="hf_offload")
    trainer(tmp_path, num_train_epochs=1, save_strategy="epoch").train()
    kept = load_file(tmp_path / "checkpoint-4" / CACHE_FILE)["norms"]
    assert kept.shape == (ROWS, 12)  # two blocks with six sampled layers each
    # Every sample was seen, in each of the three inputs of a block that are shared by layers.
    assert (kept > 0).all(0).sum() == 6
    assert f"{ROWS} samples and 12 layers" in caplog.text
    assert "192 B" in caplog.text


def test_resuming_is_as_if_nothing_had_happened(tmp_path):
    whole = trainer(tmp_path / "whole", num_train_epochs=2, save_strategy="steps", save_steps=3)
    whole.train()
    again = trainer(tmp_path / "whole", num_train_epochs=2, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    found = weights(again.model)
    assert all(torch.equal(weight, found[name]) for name, weight in weights(whole.model).items())


def test_norms_of_other_data_are_not_taken(tmp_path, caplog):
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    file = tmp_path / "checkpoint-2" / CACHE_FILE
    save_file({"norms": torch.ones(3, 12)}, file, metadata={"names": "\n".join("abcdefghijkl")})
    other = trainer(tmp_path, max_steps=3, save_strategy="no")
    other.train(resume_from_checkpoint=str(file.parent))
    assert "3 samples and 12 layers" in caplog.text
    file.unlink()
    caplog.clear()
    trainer(tmp_path, max_steps=3, save_strategy="no").train(resume_from_checkpoint=str(file.parent))
    assert "all samples count as new" in caplog.text


@pytest.mark.parametrize("columns", ["padded", "packed"])
def test_datasets_rows_padded_and_packed(columns, tmp_path):
    lengths = [5, 9, 7, 12, 6, 8, 10, 4]
    data = datasets.Dataset.from_list(
        [
            {"input_ids": row["input_ids"][:length].tolist(), "unused": "x"}
            for row, length in zip(rows(), lengths, strict=True)
        ]
    )
    seen = []

    def pad(features):
        assert all(feature.keys() == {"input_ids"} for feature in features)  # the Trainer's own removal still works
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(f["input_ids"]) for f in features], batch_first=True)
        return {"input_ids": ids, "labels": ids.clone()}

    run = trainer(tmp_path, data=data, max_steps=4, save_strategy="steps", save_steps=4)
    run.data_collator = pad if columns == "padded" else DataCollatorWithFlattening()
    run.model.register_forward_pre_hook(lambda *a: seen.append(a[2].keys()), with_kwargs=True)
    run.train()
    assert not any({SAMPLE_IDS, SAMPLE_PLACES} & names for names in seen)  # taken out before the model sees them
    kept = load_file(tmp_path / "checkpoint-4" / CACHE_FILE)["norms"]
    assert (kept > 0).all(0).sum() == 6


def test_a_stream_has_no_samples(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows())

    with pytest.raises(OffloadConfigError, match=r"rows of a stream .* map-style"):
        trainer(tmp_path, data=Stream(), max_steps=2).train()


# ------------------------------------------------------------------------------------------------------- in other loops


def loader_of(count=ROWS, **settings):
    return DataLoader(rows(count), batch_size=2, **settings)


def test_what_is_kept_is_the_size_of_each_samples_gradient():
    model = tiny_model("llama")
    batch = tiny_batch("llama", size=3)
    expected = {}
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"]
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, outputs, name=name: (
                outputs.register_hook(lambda g: expected.__setitem__(name, g.square().sum(-1).mean(-1))) and None
            )
        )
    with offload_activations(model, CONFIG) as session:
        loader = DataLoader([{key: value[row] for key, value in batch.items()} for row in range(3)], batch_size=3)
        cache = session.carry_sample_ids(loader)
        model(**next(iter(loader))).loss.backward()
        cache.flush()
        found = cache.norms[:, cache.names.index(names[0])].float()
    wanted = sum(expected.values()).sqrt()
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


def test_the_next_epoch_draws_other_rows():
    """With norms of one large sample, that sample's rows are taken."""
    model = tiny_model("llama")
    with offload_activations(model, CONFIG) as session:
        loader = loader_of(4)
        cache = session.carry_sample_ids(loader)
        batch = next(iter(loader))
        torch.manual_seed(0)
        first = gradients(model, batch)
        cache.norms[:] = torch.tensor([1e-3, 1, 1, 1])[:, None]
        torch.manual_seed(0)
        second = gradients(model, batch)
        part = cache.rows_of(cache.names[0], torch.zeros(2, 24, 32))
        assert part.guesses().unique().numel() == 2
    assert any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_new_samples_count_as_usual_ones():
    """Nothing known: the same rows as without a cache. Something known: the mean of it, and never far below."""
    usual, cached = tiny_model("llama"), tiny_model("llama")
    torch.manual_seed(0)
    plain = {**SAMPLING, "probabilities": "activation"}
    with offload_activations(usual, OffloadConfig(tier="none", sampled_linear=plain)):
        expected = gradients(usual, tiny_batch("llama", size=2))
    torch.manual_seed(0)
    with offload_activations(cached, CONFIG) as session:
        cache = session.carry_sample_ids(loader_of())
        found = gradients(cached, {**tiny_batch("llama", size=2), SAMPLE_IDS: torch.tensor([0, 1])})
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        cache.flush()
        cache.norms[:3, 0] = torch.tensor([1.0, 3.0, 0.001])
        cache.begin(torch.tensor([0, 1, 2, 5]))
        guesses = cache.rows_of(cache.names[0], torch.zeros(4, 32)).guesses()
        mean = cache.norms[:3, 0].float().mean()
        torch.testing.assert_close(guesses, torch.stack([torch.tensor(1.0), torch.tensor(3.0), 0.1 * mean, mean]))


def test_steps_that_a_scaler_skips_and_evaluation_leave_the_norms():
    model = tiny_model("llama")
    with offload_activations(model, CONFIG) as session:
        cache = session.carry_sample_ids(loader_of())
        cache.norms[:] = 2
        batch = {**tiny_batch("llama", size=2), SAMPLE_IDS: torch.tensor([0, 1])}
        (model(**batch).loss * float("inf")).backward()
        cache.flush()
        assert (cache.norms == 2).all()
        model.eval()
        model(**batch)
        model(**tiny_batch("llama", size=2))  # nobody asks for ids here
        with torch.no_grad():
            model.train()(**tiny_batch("llama", size=2))


def test_two_forwards_before_their_backwards():
    model = tiny_model("llama")
    with offload_activations(model, CONFIG) as session:
        cache = session.carry_sample_ids(loader_of())
        losses = [model(**{**tiny_batch("llama", size=2), SAMPLE_IDS: torch.tensor([n, n + 1])}).loss for n in (0, 2)]
        for loss in losses:
            loss.backward()
        cache.flush()
        assert ((cache.norms > 0).any(1) == torch.tensor([True] * 4 + [False] * 4)).all()


def test_prepared_loaders_and_workers():
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(tiny_model("llama"), loader_of(shuffle=True, num_workers=2))
    with offload_activations(model, CONFIG) as session:
        cache = session.carry_sample_ids(loader)
        assert session.carry_sample_ids(loader) is cache
        for batch in loader:
            ids = batch[SAMPLE_IDS]
            assert all(torch.equal(batch["input_ids"][n], rows()[ids[n]]["input_ids"]) for n in range(2))
            accelerator.backward(model(**batch).loss)
        cache.flush()
        assert (cache.norms > 0).any(1).all()
    assert all(SAMPLE_IDS not in batch for batch in loader)  # taken back
    model(**next(iter(loader)))


def test_copies_and_pickles_know_no_samples():
    model = tiny_model("llama")
    with offload_activations(model, CONFIG) as session:
        cache = session.carry_sample_ids(loader_of())
        batch = {**tiny_batch("llama", size=2), SAMPLE_IDS: torch.tensor([0, 1])}
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.eval()(**batch)
            with pytest.raises(OffloadConfigError, match="carry_sample_ids"):
                other.train()(**batch)
        cache.flush()
        assert not cache.norms.any()


def test_a_loop_that_says_nothing_of_its_samples():
    model = tiny_model("llama")
    with offload_activations(model, CONFIG) as session:
        with pytest.raises(OffloadConfigError, match=r"session\.carry_sample_ids\(loader\)"):
            model(**tiny_batch("llama", size=2))
        session.carry_sample_ids(loader_of())
        with pytest.raises(OffloadConfigError, match="has no sample_ids"):
            model(**tiny_batch("llama", size=2))
        with pytest.raises(OffloadConfigError, match="from 7 to 8, and there are 8"):
            model(**tiny_batch("llama", size=2), sample_ids=torch.tensor([7, 8]))
    assert attach(tiny_model("llama"), OffloadConfig(tier="none")).carry_sample_ids(None) is None


def strange(kind):
    if kind == "list":
        return loader_of(collate_fn=list)
    if kind == "merged":
        return loader_of(collate_fn=lambda features: {"input_ids": torch.cat([f["input_ids"] for f in features])[None]})
    if kind == "single":
        return DataLoader(rows(), batch_size=None)
    return rows()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("list", "no place"),
        ("merged", "1 rows of 2 samples, without position_ids"),
        ("single", "batch_size=None"),
        ("no loader", "A list is not a DataLoader"),
    ],
)
def test_loaders_that_cannot_carry_ids(kind, part):
    with pytest.raises(OffloadConfigError, match=part):
        loader = strange(kind)
        carry_sample_ids(loader)
        next(iter(loader))


def test_columns_have_no_samples():
    with pytest.raises(OffloadConfigError, match="draws columns"):
        OffloadConfig(sampled_linear={**SAMPLING, "estimator": "rad"})
