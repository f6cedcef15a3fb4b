"""The tasks of recipes."""

from hf_offload.settings.recipe_data import CLASSES, CONVERSATIONS, PAIRS, TEXT
from hf_offload.settings.recipes import Recipe
from hf_offload.training.tasks import classes, conversations, pairs, text
from hf_offload.training.tasks.task import Task

TASKS = {
    ("causal-lm", TEXT): Task(
        auto_model="AutoModelForCausalLM", rows=text.make_blocks, collator=text.make_collator, pads=False
    ),
    ("causal-lm", CONVERSATIONS): Task(
        auto_model="AutoModelForCausalLM",
        rows=conversations.make_rows,
        collator=conversations.make_collator,
        check_model=conversations.check_model,
    ),
    ("masked-lm", TEXT): Task(
        auto_model="AutoModelForMaskedLM", rows=text.make_blocks, collator=text.make_masked_collator, pads=False
    ),
    ("seq2seq-lm", PAIRS): Task(
        auto_model="AutoModelForSeq2SeqLM", rows=pairs.make_rows, collator=pairs.make_collator, seq2seq=True
    ),
    ("sequence-classification", CLASSES): Task(
        auto_model="AutoModelForSequenceClassification",
        rows=classes.make_rows,
        collator=classes.make_collator,
        has_classes=True,
    ),
}


def find_task(recipe: Recipe) -> Task:
    """The task of a recipe, from ``model.task`` and the columns it names."""
    return TASKS[recipe.model.task, recipe.data.kind(recipe.model.task)]
