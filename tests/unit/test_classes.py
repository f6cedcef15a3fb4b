"""Classes and their numbers, from columns of every kind."""

import datasets
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.lora.lora import Lora
from hf_offload.settings.recipes import DataRecipe
from hf_offload.training.tasks import classes
from hf_offload.training.tasks.task import Setup


def words_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "yes": 2, "no": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def table(labels, feature=None):
    rows = datasets.Dataset.from_dict({"text": ["yes no"] * len(labels), "kind": labels})
    return rows if feature is None else rows.cast_column("kind", feature)


def numbers(rows, labels):
    data = DataRecipe(files="x.csv", label_column="kind")
    setup = Setup(data=data, tokenizer=words_tokenizer(), labels=labels)
    return classes.make_rows(rows, setup, "the training data")["labels"][:]


NAMED = datasets.ClassLabel(names=["neg", "pos"])


@pytest.mark.parametrize(
    ("rows", "labels", "expected"),
    [
        (table(["b", "a", "b"]), ("a", "b"), [1, 0, 1]),
        (table([5, 10, 1]), ("1", "5", "10"), [1, 2, 0]),
        (table([True, False]), ("False", "True"), [1, 0]),
        (table([1, 0, 1], NAMED), ("neg", "pos"), [1, 0, 1]),
    ],
    ids=["text", "numbers", "booleans", "named"],
)
def test_classes_are_numbered_in_order(rows, labels, expected):
    assert classes.find_labels(rows, "kind") == labels
    assert numbers(rows, labels) == expected


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        ([0.5, 1.5], "0.5 is neither text nor a whole number"),
        (["a", None], "a row has none"),
        (["a", "a"], "holds only one class, 'a'"),
        ([["a"], ["b"]], "but holds lists: text or whole numbers are needed"),
        ([{"a": 1}, {"a": 2}], "but holds mappings: text or whole numbers are needed"),
        ([b"a", b"b"], "b'a' is neither text nor a whole number"),
        (["a" * 5000, None], "a row has none"),
        (["a" * 5000, "a" * 5000], r"only one class, 'a+\.\.\."),
    ],
)
def test_columns_that_hold_no_classes(labels, part):
    with pytest.raises(OffloadConfigError, match=part):
        classes.find_labels(table(labels), "kind")


def test_a_hidden_class_is_no_class():
    with pytest.raises(
        OffloadConfigError, match=r"classes that are not in the training data: -1. In the training data: neg, pos"
    ):
        numbers(table([0, -1], NAMED), ("neg", "pos"))


def test_a_stream_needs_named_classes():
    with pytest.raises(OffloadConfigError, match=r"drop data\.streaming"):
        classes.find_labels(table(["a", "b"]).to_iterable_dataset(), "kind")
    assert classes.find_labels(table([0, 1], NAMED).to_iterable_dataset(), "kind") == ("neg", "pos")


@pytest.mark.parametrize("targets", ["auto", "all"])
@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (
            transformers.DistilBertConfig(vocab_size=50, dim=32, n_layers=1, n_heads=2, hidden_dim=64),
            ["pre_classifier", "classifier"],
        ),
        (
            transformers.T5Config(vocab_size=50, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2),
            ["classification_head"],
        ),
        (
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1),
            ["score"],
        ),
    ],
    ids=["distilbert", "t5", "gpt2"],
)
def test_adapters_train_all_of_a_new_head_and_keep_the_rest(config, heads, targets):
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    inside = {id(one) for one in model.base_model.parameters()}
    adapted = Lora(rank=8, targets=targets).prepare(model)
    trained = [name for name, one in adapted.named_parameters() if one.requires_grad and "lora_" not in name]
    assert {name.partition("modules_to_save")[0].split(".")[-2] for name in trained} == set(heads)
    assert all(not one.requires_grad for one in adapted.parameters() if id(one) in inside)
    assert not [name for name, _ in adapted.named_parameters() if "lora_" in name and name.split(".")[2] in heads]
