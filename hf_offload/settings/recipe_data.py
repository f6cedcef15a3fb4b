"""The section ``data`` of a recipe: which rows, and what their columns mean."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import from_mapping, in_section, settings
from hf_offload.settings.load import refuse
from hf_offload.settings.shown import shown
from hf_offload.settings.values import Flag, Reader, Text, Whole, one_of, path_text, patterns, section, size

RANDOM_TOKENS = "random-tokens"
SOURCES = ("python-stdlib", RANDOM_TOKENS)
SMALLEST_BPE = 257
"""All 256 byte values and the end-of-text token."""

# The kinds of rows, and the columns that only each of them reads.
TEXT, CONVERSATIONS, PAIRS, CLASSES = "text", "conversations", "pairs", "classes"
COLUMNS = {
    TEXT: ("text_column",),
    CONVERSATIONS: ("messages_column", "prompt_column", "answer_column", "packing"),
    PAIRS: ("source_column", "target_column", "source_prefix", "target_length"),
    CLASSES: ("text_column", "text_pair_column", "label_column"),
}
KINDS = {
    "causal-lm": (TEXT, CONVERSATIONS),
    "masked-lm": (TEXT,),
    "seq2seq-lm": (PAIRS,),
    "sequence-classification": (CLASSES,),
}
"""Which kinds of rows a task takes."""


@settings(frozen=True, kw_only=True)
class HubData:
    """A dataset of the hub: its ``name``, ``config`` and ``split``."""

    name: Annotated[str, path_text()]
    config: Text | None = None
    split: Text = "train"


def _validation(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        split = value.get("split")
        if list(value) != ["split"] or not isinstance(split, str) or not split:
            raise OffloadConfigError(f"{name}={shown(value)}: write {{split: validation}}, and nothing else.")
        return value
    if isinstance(value, (int, float)):
        if isinstance(value, bool) or not 0 < value < 1:
            raise OffloadConfigError(f"{name}={shown(value)} is not a share of the rows: give one such as 0.05.")
        return value
    return patterns()(name, value)


@settings(frozen=True, kw_only=True)
class _TrainedTokenizer:
    train_bpe: Annotated[Whole, Field(ge=SMALLEST_BPE)]


def _tokenizer(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return path_text()(name, value)
    return {"train_bpe": from_mapping(_TrainedTokenizer, value, name, in_section(name)).train_bpe}


@settings(frozen=True, kw_only=True)
class DataRecipe:
    """Which rows, from exactly one of ``source``, ``files`` and ``hub``, and what is in them.

    Args:
        source: ``python-stdlib``: the source code of Python's standard library, found on every machine.
            ``random-tokens``: as many rows of random token ids as the run needs, for measuring memory and time.
        max_bytes: With ``python-stdlib``: stop after the file that reaches this many bytes.
        files: Local files or patterns: text (one document a file), JSON lines, CSV or Parquet.
        data_dir: Folder that ``files`` and the files of ``validation`` start from. Default: the current one.
        hub: A dataset's name, or a mapping with ``name``, ``config`` and ``split``.
        validation: What to evaluate on: files or patterns; ``{split: validation}`` of the dataset of the hub; or a share of
            the training rows, such as 0.05, which are then not trained on: the same rows whatever the seed of training. Of
            a single text, that share at its end.
        streaming: Read while training instead of preparing everything first.
        text_column: The column that holds the text. Default: ``text``. Texts are joined and cut into blocks, except for
            ``sequence-classification``.
        text_pair_column: For ``sequence-classification``: the column with the second text of a pair.
        label_column: For ``sequence-classification``: the column with the class, as text or a whole number.
        messages_column: For ``causal-lm``: the column with conversations, each a list of ``role`` and ``content``. The loss
            is taken on what the role ``assistant`` says, and on nothing else.
        prompt_column: Likewise, with ``answer_column``: for conversations of one prompt and one answer. To ``instruction``,
            a column ``input`` is appended.
        answer_column: The column with that answer.
        packing: Whether several conversations share a row; none of them sees another.
        source_column: For ``seq2seq-lm``: the column with the text to translate or to sum up.
        target_column: The column with the translation or the summary.
        source_prefix: Written before every source, such as ``"summarize: "``.
        target_length: Most tokens of a target. Default: ``sequence_length``.
        sequence_length: Tokens in a block, or most tokens in a row: longer rows are cut off at the end.
        tokenizer: Hub name or folder, or ``{train_bpe: vocabulary size}`` to train one on the data. Default: that of
            the model.
        cache_dir: Where the prepared data and the trained tokenizer go. Default: ``data`` in the output directory.
    """

    source: Annotated[str | None, one_of(SOURCES)] = None
    max_bytes: Annotated[int | str | None, size()] = None
    files: Annotated[str | Sequence[str] | None, patterns()] = None
    data_dir: Annotated[str | None, path_text()] = None
    hub: Annotated[HubData | str | Mapping[str, Any] | None, section(HubData, "and no name", short="name")] = None
    validation: Annotated[
        str | Sequence[str] | Mapping[str, Any] | float | None,
        Reader(_validation, {"type": ["string", "array", "object", "number"]}),
    ] = None
    streaming: Flag = False
    text_column: Text | None = None
    text_pair_column: Text | None = None
    label_column: Text | None = None
    messages_column: Text | None = None
    prompt_column: Text | None = None
    answer_column: Text | None = None
    packing: Flag = False
    source_column: Text | None = None
    target_column: Text | None = None
    source_prefix: Text | None = None
    target_length: Annotated[Whole | None, Field(ge=1)] = None
    sequence_length: Annotated[Whole, Field(ge=2)] = 512
    tokenizer: Annotated[str | Mapping[str, Any] | None, Reader(_tokenizer, {"type": ["string", "object"]})] = None
    cache_dir: Annotated[str | None, path_text()] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("data section", self._conflicts())
        return self

    def _conflicts(self) -> Iterator[str]:
        given = [name for name in ("source", "files", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"data: give exactly one of source, files and hub, not {' and '.join(given) or 'none'}."
        if self.max_bytes is not None and self.source in (None, RANDOM_TOKENS):
            yield "data.max_bytes is for data.source=python-stdlib only: drop it."
        value = self.validation
        if isinstance(value, Mapping) and self.hub is None:
            yield "data.validation: only data.hub has splits: give files, or a share such as 0.05."
        if isinstance(value, float) and self.streaming:
            yield "data.validation: no share can be taken of a stream, whose end is unknown: name files or a split."
        if isinstance(value, tuple) and self.hub is not None:
            yield "data.validation: of data.hub, give {split: validation}, or a share such as 0.05, not files."
        if self.data_dir is not None and self.files is None and not isinstance(value, tuple):
            yield "data.data_dir is for data.files, and this data is not in local files: drop it."
        if self.source == RANDOM_TOKENS:
            for field in ("tokenizer", "streaming", "validation", "source_prefix", "packing", *_COLUMN_FIELDS):
                if getattr(self, field):
                    yield f"data.{field}: {RANDOM_TOKENS} are not text and need none: drop it."

    def conflicts_with(self, task: str) -> Iterator[str]:
        """All columns that are missing for ``task`` or that it does not read."""
        kinds = KINDS[task]
        for field in dict.fromkeys(name for names in COLUMNS.values() for name in names):
            if getattr(self, field) and not any(field in COLUMNS[kind] for kind in kinds):
                tasks = [other for other, read in KINDS.items() if any(field in COLUMNS[kind] for kind in read)]
                yield (
                    f"data.{field}: model.task={task} does not read it, {' and '.join(tasks)} do: drop it, or change the "
                    "task."
                )
        if self.source == RANDOM_TOKENS:
            if task == "sequence-classification":
                yield f"data.source: {RANDOM_TOKENS} have no classes: give files or hub."
            return
        kind = self.kind(task)
        needed: tuple[str, ...] = ()
        if kind == PAIRS:
            needed = ("source_column", "target_column")
        elif kind == CLASSES:
            needed = ("label_column",)
        elif kind == CONVERSATIONS and not self.messages_column:
            needed = ("prompt_column", "answer_column")
        for field in needed:
            if not getattr(self, field):
                yield f"data.{field} is missing: {task} needs the name of that column."
        if kind == CONVERSATIONS and self.messages_column and (self.prompt_column or self.answer_column):
            yield "data: give messages_column, or prompt_column and answer_column, not both."
        if kind == CONVERSATIONS and self.text_column:
            yield "data.text_column: conversations are read from other columns: drop it."

    def kind(self, task: str) -> str:
        """Which kind of rows ``task`` makes of these columns: :data:`TEXT`, :data:`CONVERSATIONS`, ..."""
        kinds = KINDS[task]
        if CONVERSATIONS in kinds and any(getattr(self, field) for field in COLUMNS[CONVERSATIONS]):
            return CONVERSATIONS
        return kinds[0]

    def text_columns(self) -> tuple[str, ...]:
        """The columns with text in them."""
        named = (
            (self.messages_column,),
            (self.prompt_column, self.answer_column),
            (self.source_column, self.target_column),
            (self.text_column or "text", self.text_pair_column),
        )
        return next(tuple(name for name in names if name) for names in named if names[0])

    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.text_columns(), *((self.label_column,) if self.label_column else ()))

    @property
    def train_bpe(self) -> int | None:
        """Vocabulary size of the tokenizer to train; ``None`` when an existing one is used."""
        return self.tokenizer["train_bpe"] if isinstance(self.tokenizer, Mapping) else None


_COLUMN_FIELDS = tuple(field.name for field in dataclasses.fields(DataRecipe) if field.name.endswith("_column"))
