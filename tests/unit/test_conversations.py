"""What the loss of a conversation is taken on, alone and packed."""

import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import DataRecipe
from hf_offload.training.tasks import conversations
from hf_offload.training.tasks.conversations import collate_packed, pack_rows, refuse_mixing
from hf_offload.training.tasks.task import Setup

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A: {% generation %}"
    "{{ message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ 'Q: ' + message['content'] }}{% endif %}{% endfor %}"
)
# As templates do that leave out what was thought in earlier turns.
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' and loop.last %}hmm "
    "{% endif %}{{ message['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is saved?"},
    {"role": "assistant", "content": "Tensors."},
    {"role": "user", "content": "Wo? Überall?"},
    {"role": "assistant", "content": "Auf der Platte, 日本."},
]


def bytes_tokenizer(template=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    made.chat_template = template
    return made


def rows_of(talks, template=None, length=400, packing=False, columns=None):
    import datasets

    columns = columns or {"messages_column": "messages"}
    data = DataRecipe(files="x.jsonl", sequence_length=length, packing=packing, **columns)
    setup = Setup(data=data, tokenizer=bytes_tokenizer(template))
    rows = datasets.Dataset.from_list(talks if "prompt_column" in columns else [{"messages": talk} for talk in talks])
    return list(conversations.make_rows(rows, setup, "the training data")), setup


def learned(row, setup):
    """The pieces of text that labels are taken from."""
    pieces, ids = [], []
    for label in [*row["labels"], -100]:
        if label != -100:
            ids.append(label)
        elif ids:
            pieces.append(setup.tokenizer.decode(ids))
            ids = []
    return pieces


def test_turns_of_other_names_are_refused():
    with pytest.raises(OffloadConfigError, match="is not a list of turns, each with role and content"):
        rows_of([[{"from": "human", "value": "Hello."}]])


@pytest.mark.parametrize(
    ("template", "end"),
    [(None, "<end>\n"), (CHATML, "<|im_end|>\n"), (MARKED, "<end>")],
    ids=["default", "chatml", "marked"],
)
def test_every_answer_is_learned_with_its_end_and_nothing_else(template, end):
    (row,), setup = rows_of([TALK], template)
    assert learned(row, setup) == [TALK[2]["content"] + end, TALK[4]["content"] + end]
    whole = setup.tokenizer.apply_chat_template(TALK, tokenize=False)
    assert setup.tokenizer.decode(row["input_ids"]) == whole
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_a_prompt_and_an_answer_are_a_conversation_of_two_turns():
    rows, setup = rows_of([{"q": "Why?", "a": 42}], columns={"prompt_column": "q", "answer_column": "a"})
    assert learned(rows[0], setup) == ["42<end>\n"]
    assert "Why?" in setup.tokenizer.decode(rows[0]["input_ids"])


def test_the_default_template_stays_with_the_tokenizer(tmp_path):
    _, setup = rows_of([TALK])
    setup.tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = loaded.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<|system|>\nBe brief.\n<|user|>\nWhat is saved?\n<|assistant|>\n"


def test_a_template_that_changes_earlier_turns_is_refused_for_several_answers():
    with pytest.raises(OffloadConfigError, match=r"does not tell what is to be answered: put \{% generation %\}"):
        rows_of([TALK], FORGETFUL)
    rows, setup = rows_of([TALK[:3]], FORGETFUL)
    assert learned(rows[0], setup) == ["hmm Tensors.\n"]


def test_a_template_that_refuses_a_conversation_is_quoted():
    with pytest.raises(OffloadConfigError, match=r"with the roles system, user, assistant.*: no system here"):
        rows_of([TALK], "{{ raise_exception('no system here') }}")


def test_a_cut_conversation_keeps_what_is_left_and_goes_where_nothing_is():
    ends = len(bytes_tokenizer()("<|system|>\nBe brief.\n<|user|>\nWhat is saved?\n<|assistant|>\n")["input_ids"])
    rows, setup = rows_of([TALK], length=ends + 3)
    assert learned(rows[0], setup) == ["Ten"]
    with pytest.raises(OffloadConfigError, match="No row of the training data can be used"):
        rows_of([TALK], length=ends)
    with pytest.raises(OffloadConfigError, match="nothing that the role assistant says"):
        rows_of([TALK[:2]])


# ------------------------------------------------------------------------------------------------------------- packing

CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, use_cache=False, bos_token_id=None, eos_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=None, eos_token_id=0,
    ),
}  # fmt: skip


def model_of(name, attention):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double().train()


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("gpt2", "eager")])
def test_the_loss_of_packed_rows_is_that_of_their_conversations_alone(name, attention):
    talks = [TALK, TALK[1:3], [{"role": "assistant", "content": "Begins."}, *TALK[3:]], TALK[3:]]
    alone, _ = rows_of(talks)
    packed, _ = rows_of(talks, packing=True)
    assert len(packed) < len(alone) == sum(row["position_ids"].count(0) for row in packed) == 4
    model = model_of(name, attention)
    refuse_mixing(model)

    def summed(batch):
        """The loss in float64, and as the model has it, which takes logits in float32."""
        out, wanted = model(**batch), batch["labels"][:, 1:].flatten()
        exact = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), wanted, reduction="sum").item()
        count = int((wanted != -100).sum())
        return torch.tensor([exact, out.loss.item() * count, count], dtype=torch.float64)

    total = sum(summed({key: torch.tensor([row[key]]) for key in ("input_ids", "labels")}) for row in alone)
    batch = collate_packed(packed)
    assert batch["input_ids"].shape[1] % 8 == 0
    assert "attention_mask" not in batch
    together = summed(batch)
    assert together[2] == total[2]
    assert together[0].item() == pytest.approx(total[0].item(), rel=1e-12)
    assert together[1].item() == pytest.approx(total[1].item(), rel=1e-6)


def test_conversations_go_into_the_first_row_with_room():
    batch = {"input_ids": [[1] * n for n in (6, 5, 4, 3)], "labels": [[1] * n for n in (6, 5, 4, 3)]}
    packed = pack_rows(batch, length=10)
    assert [len(row) for row in packed["input_ids"]] == [10, 8]
    assert packed["position_ids"] == [[*range(6), *range(4)], [*range(5), *range(3)]]
    assert packed["labels"][0] == [-100, *[1] * 5, -100, *[1] * 3]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2), "BloomForCausalLM"),
        (
            transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4),
            "MambaForCausalLM",
        ),
    ],
    ids=["bloom", "mamba"],
)
def test_models_that_let_packed_conversations_see_each_other_are_refused(config, part):
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(
        OffloadConfigError, match=re.escape(f"data.packing: {part}") + "|" + re.escape(f"data.packing: in {part}")
    ):
        refuse_mixing(model)
    assert model.training
