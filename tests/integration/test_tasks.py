"""Recipes for each task: from rows to a model that loads without this package."""

import json
import random

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe
from tests.helpers.command_line import command, said

WORDS = ["offload", "saved", "tensor", "gradient", "exact", "disk", "memory", "step", "block", "layer"]
GPT2 = {"architecture": "gpt2", "config": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}}
LLAMA = {
    "architecture": "llama",
    "config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
    },
}
BERT = {
    "architecture": "bert",
    "config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
}
T5 = {
    "architecture": "t5",
    "config": {"num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "d_model": 32, "d_ff": 64, "d_kv": 16},
}
BPE = {"train_bpe": 300}
OFFLOAD = {"tier": "ssd", "min_bytes": "256", "directory": "tier"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Data of every kind in an empty current directory; everything a run writes stays there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tier").mkdir()
    draw = random.Random(0)

    def text(least, most):
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def rows(name, count, make):
        (tmp_path / name).write_text("".join(json.dumps(make(i)) + "\n" for i in range(count)))

    for part, count in (("train", 40), ("held", 10)):
        rows(f"text_{part}.jsonl", count, lambda _: {"text": text(10, 30)})
        rows(f"pairs_{part}.jsonl", count, lambda _: {"en": text(2, 8), "de": text(2, 8).upper()})
        rows(
            f"classes_{part}.jsonl",
            count,
            lambda i: {"first": ("good " if i % 2 else "bad ") + text(1, 6), "second": text(1, 4), "kind": i % 2},
        )
        rows(f"prompts_{part}.jsonl", count, lambda _: {"question": text(2, 6), "answer": text(1, 6)})
        rows(
            f"chats_{part}.jsonl",
            count,
            lambda _: {
                "messages": [
                    {"role": role, "content": text(1, 3)}
                    for role in ("system", "user", "assistant", "user", "assistant")
                ]
            },
        )
    words = {word: i for i, word in enumerate(["[PAD]", "[MASK]", "[UNK]", "[SEP]", "[CLS]", *WORDS])}
    whole = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]", sep_token="[SEP]"
    ).save_pretrained(tmp_path / "words")
    return tmp_path


def data(kind, **columns):
    return {
        "files": f"{kind}_train.jsonl",
        "validation": f"{kind}_held.jsonl",
        "sequence_length": 32,
        "tokenizer": BPE,
        **columns,
    }


TASKS = {
    "text": ({"task": "causal-lm", **GPT2}, data("text"), ["perplexity", "token_accuracy"]),
    "prompts": (
        {"task": "causal-lm", **GPT2},
        data("prompts", prompt_column="question", answer_column="answer", sequence_length=64),
        ["perplexity", "token_accuracy"],
    ),
    "packed": (
        {"task": "causal-lm", **LLAMA},
        data("chats", messages_column="messages", packing=True, sequence_length=64),
        ["perplexity", "token_accuracy"],
    ),
    "masked": ({"task": "masked-lm", **BERT}, data("text", tokenizer="words"), ["perplexity", "token_accuracy"]),
    "pairs": (
        {"task": "seq2seq-lm", **T5},
        data("pairs", source_column="en", target_column="de", source_prefix="translate: ", target_length=16),
        ["perplexity", "bleu", "chrf"],
    ),
    "classes": (
        {"task": "sequence-classification", **BERT},
        data("classes", text_column="first", text_pair_column="second", label_column="kind"),
        ["accuracy", "f1", "matthews"],
    ),
    "classes_of_a_decoder": (
        {"task": "sequence-classification", **GPT2},
        data("classes", text_column="first", label_column="kind"),
        ["accuracy"],
    ),
}


def recipe(name, *, overrides=(), **sections):
    model, rows, metrics = TASKS[name]
    tree = {
        "model": model,
        "data": rows,
        "evaluation": {"metrics": metrics},
        "training": {
            "output_dir": "out",
            "seed": 7,
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
        },
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    with open(f"{name}.yaml", "w") as file:  # noqa: PTH123  JSON is YAML
        json.dump(tree, file)
    return load_recipe(f"{name}.yaml", overrides)


def mistake(*arguments, **sections):
    with pytest.raises(OffloadConfigError) as caught:
        run_recipe(recipe(*arguments, **sections))
    return str(caught.value)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_trained_evaluated_and_saved_and_offloading_changes_no_bit(name):
    keep = run_recipe(recipe(name, training={"output_dir": "keep"}))
    assert keep.completed
    assert keep.steps == 4
    assert set(keep.metrics) == {"eval_loss", *(f"eval_{metric}" for metric in TASKS[name][2])}
    if "eval_perplexity" in keep.metrics:
        assert keep.metrics["eval_perplexity"] == pytest.approx(torch.tensor(keep.metrics["eval_loss"]).exp().item())
    offloaded = run_recipe(recipe(name, offload=OFFLOAD))
    assert offloaded.offload["written_bytes"] > 0
    assert offloaded.losses_hex == keep.losses_hex
    assert offloaded.parameters_sha256 == keep.parameters_sha256
    assert offloaded.metrics == keep.metrics

    from hf_offload.training.tasks.table import find_task

    auto = getattr(transformers, find_task(recipe(name)).auto_model)
    loaded = auto.from_pretrained("out")
    assert type(loaded).__module__.startswith("transformers.")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert len(tokenizer) <= loaded.get_input_embeddings().weight.shape[0]
    from hf_offload.training.report import parameter_digest

    assert parameter_digest(loaded) == keep.parameters_sha256


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name
@pytest.mark.parametrize("mode", ["lora", "badam"])
def test_memory_modes_train_the_head_of_a_classifier(mode):
    result = run_recipe(
        recipe("classes", memory={"mode": mode} | ({} if mode == "badam" else {"rank": 2}), training={"max_steps": 40})
    )
    assert result.metrics["eval_accuracy"] == result.metrics["eval_matthews"] == 1.0
    if mode == "badam":
        assert transformers.AutoConfig.from_pretrained("out").id2label == {0: "0", 1: "1"}
        return
    import peft
    from safetensors.torch import load_file

    saved = load_file("out/adapter_model.safetensors")
    assert [name for name in saved if name.endswith("classifier.weight")]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        fresh = transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model("bert", **BERT["config"], vocab_size=300, num_labels=2)
        )
    tuned = peft.PeftModel.from_pretrained(fresh, "out")
    head = tuned.base_model.model.classifier.modules_to_save["default"].weight
    assert torch.equal(head, next(saved[name] for name in saved if name.endswith("classifier.weight")))


def test_a_run_goes_on_from_its_last_checkpoint():
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    saving |= {"lr_scheduler_type": "constant"}
    run_recipe(recipe("packed", training=saving | {"max_steps": 4}))
    whole = run_recipe(recipe("packed", training=saving | {"output_dir": "whole"}))
    resumed = run_recipe(recipe("packed", training=saving), resume=True)
    assert resumed.losses_hex == whole.losses_hex[4:]
    assert resumed.parameters_sha256 == whole.parameters_sha256


def test_nothing_to_resume_is_refused():
    recipe("text")
    result = command("train", "text.yaml", "--resume")
    assert result.exit_code == 2
    assert "no complete checkpoint in out to go on from" in said(result)


def test_the_best_checkpoint_is_kept_and_no_progress_stops():
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "perplexity", "save_total_limit": 1}
    # Such a rate drives the loss up at once.
    result = run_recipe(
        recipe(
            "text",
            training=evaluating | best | {"learning_rate": 3.0, "max_steps": 12, "lr_scheduler_type": "constant"},
            evaluation={"early_stopping_patience": 2},
        )
    )
    state = json.loads(
        sorted((load_recipe("text.yaml").output_dir).glob("checkpoint-*/trainer_state.json"))[-1].read_text()
    )
    measured = [entry["eval_perplexity"] for entry in state["log_history"] if "eval_perplexity" in entry]
    assert result.steps < 12
    assert result.metrics["eval_perplexity"] == min(measured)


def test_a_share_of_the_rows_is_held_back_whatever_the_seed():
    from hf_offload.training.data import load_parts

    settings = data("prompts", prompt_column="question", answer_column="answer", validation=0.25)
    parts = []
    for seed in (1, 2):
        made = recipe("prompts", data=settings, training={"seed": seed})
        parts.append(load_parts(made.data, made.data.columns(), made.cache_dir))
    (train, held), (_, again) = parts
    assert (len(train), len(held)) == (30, 10)
    assert held["question"][:] == again["question"][:]
    assert not set(train["question"]) & set(held["question"])


def test_of_a_single_text_the_end_is_held_back(folder):
    """The tokenizer is trained on the rest alone, too."""
    from hf_offload.training.data import load_parts

    lines = [f"line {number} of a text that has a hundred lines\n" for number in range(100)]
    (folder / "one.txt").write_text("".join(lines), encoding="utf-8")
    made = recipe("text", data={"files": "one.txt", "validation": 0.095, "sequence_length": 16})
    train, held = load_parts(made.data, made.data.columns(), made.cache_dir)
    assert train["text"][:] == ["".join(lines[:90])]  # whole lines, so a little more than the share
    assert held["text"][:] == ["".join(lines[90:])]
    assert run_recipe(made).metrics["eval_loss"] > 0
    (folder / "one.txt").write_text("a single line", encoding="utf-8")
    assert "the text is a single line" in mistake("text", data={"files": "one.txt", "validation": 0.1})


@pytest.mark.parametrize(
    ("name", "sections", "part"),
    [
        (
            "text",
            {"data": {"text_column": "texts"}},
            "The column 'texts' is not in the data. Did you mean 'text'? It has: text",
        ),
        (
            "classes",
            {"data": {"label_column": "first"}},
            "data.validation has classes that are not in the training data",
        ),
        ("classes", {"data": {"files": "text_train.jsonl"}}, "It has: text"),
        ("pairs", {"data": {"validation": "text_held.jsonl"}}, "The column 'en' is not in data.validation"),
        (
            "prompts",
            {"data": {"sequence_length": 4}},
            "No row of the training data can be used: within data.sequence_length=4",
        ),
        ("packed", {"data": {"messages_column": "messages", "files": "odd.jsonl"}}, "is not a list of turns"),
        ("text", {"model": {"name": "no/such", "architecture": None, "config": {}}}, "'no/such' cannot be loaded"),
        (
            "text",
            {"data": {"files": None, "hub": "no/such", "validation": None}, "evaluation": {"metrics": None}},
            "hf download",
        ),
        (
            "text",
            {"data": {"files": "odd.jsonl"}},
            "If these are conversations, set data.messages_column=messages.",
        ),
        ("masked", {"data": {"tokenizer": BPE}}, "the tokenizer has no mask token"),
        ("prompts", {"data": {"validation": 0.001}}, "that share of 40 rows is less than one row"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_message(folder, name, sections, part):
    (folder / "odd.jsonl").write_text('{"messages": "hello"}\n')
    message = mistake(name, **sections)
    assert part in message
    assert len(message) < 900


def test_splits_of_a_data_set_by_name(folder):
    """A folder is loaded as a data set of the hub is."""
    (folder / "set").mkdir()
    for part, name in (("train", "train"), ("held", "validation")):
        (folder / f"pairs_{part}.jsonl").rename(folder / "set" / f"{name}.jsonl")
    hub = {"files": None, "hub": str(folder / "set"), "validation": {"split": "validation"}}
    assert run_recipe(recipe("pairs", data=hub)).metrics["eval_loss"] > 0
    message = mistake("pairs", data=hub | {"validation": {"split": "dev"}})
    assert "data.hub (split dev)" in message
    assert "train" in message
    assert "validation" in message


def test_parts_of_a_column(folder):
    for part in ("train", "held"):
        path = folder / f"pairs_{part}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    nested = {"source_column": "translation.en", "target_column": "translation.de"}
    assert run_recipe(recipe("pairs", data=nested)).steps == 4


def test_rows_without_an_answer_are_left_out_and_counted(folder, caplog):
    long = {"question": " ".join(WORDS * 9), "answer": "exact"}
    with (folder / "prompts_train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n" + json.dumps({"question": "step", "answer": ""}) + "\n")
    result = run_recipe(recipe("prompts"))
    assert "2 of 42 rows of the training data are left out" in caplog.text
    assert all(0 < loss < 100 for loss in result.losses)


@pytest.mark.parametrize("streaming", [False, True])
def test_input_of_alpaca_files_belongs_to_the_prompt_and_columns_that_are_not_read_are_named(folder, caplog, streaming):
    from hf_offload.training.data import load_parts
    from hf_offload.training.prepare import prepare_data

    lines = [
        {"id": 1, "instruction": "Sort.", "input": "b a", "output": "a b", "source": "x"},
        {"id": 2, "instruction": "Greet.", "input": "", "output": "Hello."},
    ]
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = {"prompt_column": "instruction", "answer_column": "output", "validation": None, "streaming": streaming}
    made = recipe("prompts", data={"files": "alpaca.jsonl", **columns}, evaluation={"metrics": None})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "words")
    tokenizer.eos_token = "[SEP]"
    with caplog.at_level("INFO", "hf_offload"):
        train, _ = load_parts(made.data, made.data.columns(), folder / "cache")
        prepare_data(made, tokenizer, folder / "cache")
    assert [row["instruction"] for row in train] == ["Sort.\n\nb a", "Greet."]
    assert caplog.text.count("Not read: the columns id, source of the training data.") == 1


def test_a_model_that_mixes_packed_conversations_is_refused():
    bloom = {"architecture": "bloom", "config": {"hidden_size": 32, "n_layer": 1, "n_head": 2}}
    assert "data.packing: in BloomForCausalLM with eager attention, conversations of one row see" in mistake(
        "packed", model=bloom
    )
