"""``python -m benchmarks mezo-sentences``, in small: an encoder without training, and sentences of two words."""

import itertools
import json

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast
from typer.testing import CliRunner

from benchmarks.__main__ import app

GOOD, BAD = ("fine", "great", "lovely"), ("awful", "poor", "dull")
THINGS = ("film", "plot", "cast", "score")


@pytest.fixture
def folders(tmp_path):
    """An encoder, and sentences."""
    model, data = tmp_path / "model", tmp_path / "data"
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *THINGS]
    config = BertConfig(
        vocab_size=len(words), hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(model)
    BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(model)
    data.mkdir()
    rows = [
        {"sentence": f"{word} {thing}", "label": int(word in GOOD)}
        for word, thing in itertools.product((*GOOD, *BAD), THINGS)
    ]
    for part in ("train", "validation"):
        (data / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return model, data


def test_gradients_learn_and_a_stopped_benchmark_goes_on_where_it_was(folders, tmp_path):
    model, data = folders
    output = tmp_path / "results"
    arguments = ["mezo-sentences", "--data", str(data), "--model", str(model), "--most-steps", "200", "--json"]
    ways = "adamw,mezo-head"

    def run():
        result = CliRunner().invoke(app, [*arguments, "--ways", ways, "--output", str(output)])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    found = run()
    assert [one["steps"] for one in found.values()] == [200, 200]
    assert found["adamw"]["accuracy"] == 100
    assert found["adamw"]["losses"][0] < found["mezo-head"]["losses"][0] < 0.7
    kept = output / "mezo-head.pt"
    states = torch.load(kept, weights_only=True)
    encoder = BertModel.from_pretrained(model, add_pooling_layer=False).state_dict()
    assert all(torch.equal(states["model"][f"encoder.{name}"], one) for name, one in encoder.items())
    assert states["model"]["head.weight"].any()
    (output / "mezo-head.json").unlink()
    before = kept.stat().st_mtime_ns
    assert run() == found  # from what was kept, without another step
    assert kept.stat().st_mtime_ns == before


def test_another_way_and_a_folder_without_sentences_are_refused(folders, tmp_path):
    model, data = folders
    for wrong, message in ((["--ways", "sgd"], "sgd"), (["--data", str(model)], "holds no train.jsonl")):
        arguments = ["--data", str(data), "--model", str(model), "--output", str(tmp_path / "none"), *wrong]
        result = CliRunner().invoke(app, ["mezo-sentences", *arguments])
        assert result.exit_code
        assert message in result.output.replace("\n", " ")
