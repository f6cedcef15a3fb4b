"""Rows of a recipe: every source goes through one ``datasets`` loader, at once or streaming."""

import contextlib
import glob
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.errors import OffloadConfigError
from hf_offload.pretrained.errors import loading
from hf_offload.settings.recipe_data import DataRecipe, HubData
from hf_offload.settings.shown import cropped, listed, nearest, shown
from hf_offload.settings.text_files import check_text, is_file
from hf_offload.settings.values import expand

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SPLIT_SEED = 0
"""Of the rows that are held back for evaluation: the same for every seed of training, so that runs can be compared."""

_READERS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".md": "text",
    ".parquet": "parquet",
    ".py": "text",
    ".rst": "text",
    ".txt": "text",
}
_PROMPT, _MORE_OF_PROMPT = "instruction", "input"
"""Columns of files in the format of Alpaca: what the second one holds, if anything, belongs to the prompt."""
_CONVERSATIONS = {
    "messages": "data.messages_column=messages",
    "instruction": "data.prompt_column=instruction data.answer_column=output",
}
"""Columns that usual files of conversations have: the settings that read them."""
_TEXT = ("string", "large_string", "string_view")
_NO_PROGRAM_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files(max_bytes: int | None = None) -> list[Path]:
    """Python files of the standard library in a fixed order, without tests.

    With ``max_bytes``, the list ends with the file that reaches that many bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path for path in root.rglob("*.py") if not _NO_PROGRAM_TEXT.intersection(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    if not files:
        raise OffloadConfigError(f"data.source=python-stdlib: {root} holds no .py files. Use data.files instead.")
    if max_bytes is None:
        return files
    chosen, size = [], 0
    for path in files:
        if size >= max_bytes:
            break
        chosen.append(path)
        size += path.stat().st_size
    return chosen


def load_parts(
    data: DataRecipe, columns: Sequence[str], cache_dir: Path
) -> "tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]":
    """The rows to train on and those to evaluate on, if any; both have ``columns``."""
    if isinstance(data.hub, HubData):
        rows = _load_hub(data.hub, data.hub.split, data, cache_dir)
    else:
        rows = _load_files(find_files(data), "data.files", data, cache_dir)
    held_back: Dataset | IterableDataset | None = None
    value: Any = data.validation
    rows = _with_columns(rows, columns, data, "the data")
    if isinstance(value, float):
        if len(rows) == len(columns) == 1 and isinstance(text := rows[0][columns[0]], str):
            return _cut_text(text, columns[0], value)
        if round(len(rows) * value) < 1 or len(rows) < 2:
            raise OffloadConfigError(
                f"data.validation={value}: that share of {len(rows)} rows is less than one row: give a larger one, or files."
            )
        parts = rows.train_test_split(test_size=value, seed=SPLIT_SEED)
        return parts["train"], parts["test"]
    if isinstance(value, tuple):
        held_back = _load_files(_find("data.validation", value, data.data_dir), "data.validation", data, cache_dir)
    elif value is not None:
        assert isinstance(data.hub, HubData)  # DataRecipe sees to it
        held_back = _load_hub(data.hub, value["split"], data, cache_dir)
    if held_back is not None:
        held_back = _with_columns(held_back, columns, data, "data.validation")
    return rows, held_back


def _cut_text(text: str, column: str, share: float) -> "tuple[Dataset, Dataset]":
    """A single text, and the end of it: whole lines, at least ``share`` of its characters."""
    from datasets import Dataset

    cut = text.rfind("\n", 0, round(len(text) * (1 - share))) + 1
    if not cut:
        raise OffloadConfigError(
            f"data.validation={share}: the text is a single line, of which none can be held back: give files of their own."
        )
    return Dataset.from_dict({column: [text[:cut]]}), Dataset.from_dict({column: [text[cut:]]})


def _with_columns(
    rows: "Dataset | IterableDataset", columns: Sequence[str], data: DataRecipe, what: str
) -> "Dataset | IterableDataset":
    """``rows`` if they have ``columns``, with text where text is read; parts of a column, such as ``translation.en``, become
    columns of their own.
    """
    if any("." in column for column in columns) and hasattr(rows, "flatten"):
        rows = rows.flatten()
    with reading(f"{what} cannot be read"):
        there = column_names(rows)
    if not there or (hasattr(rows, "__len__") and len(rows) == 0):
        raise OffloadConfigError(f"There are no rows in {what}.")
    for column in columns:
        if column not in there:
            offers = [_CONVERSATIONS[name] for name in there if name in _CONVERSATIONS and data.text_column is None]
            offer = f" If these are conversations, set {offers[0]}." if offers and column == "text" else ""
            raise OffloadConfigError(
                f"The column {shown(column)} is not in {what}.{nearest(column, there)} It has: {listed(there, column)}."
                f"{offer}"
            )
    if data.prompt_column == _PROMPT and _MORE_OF_PROMPT in there and _MORE_OF_PROMPT not in columns:
        rows = rows.map(_with_input, fn_kwargs={"what": what}, remove_columns=[_MORE_OF_PROMPT])
    for column in data.text_columns():
        kind = getattr((rows.features or {}).get(column), "dtype", None)
        if column in columns and column != data.messages_column and rows.features is not None and kind not in _TEXT:
            raise OffloadConfigError(
                f"The column {shown(column)} of {what} holds {kind_of(rows.features[column])}: text is needed."
            )
    return rows


def _with_input(row: dict[str, Any], what: str) -> dict[str, str]:
    texts = [row[_PROMPT], row[_MORE_OF_PROMPT]]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise OffloadConfigError(
            f"The columns {_PROMPT} and {_MORE_OF_PROMPT} of {what} hold {shown(texts)}: text is needed."
        )
    return {_PROMPT: "\n\n".join(text for text in texts if text)}


def kind_of(feature: Any) -> str:
    """What a column holds, in words."""
    kind = str(getattr(feature, "dtype", None) or type(feature).__name__)
    return {"null": "nothing", "dict": "mappings", "list": "lists", "List": "lists", "LargeList": "lists"}.get(
        kind, f"values of type {cropped(kind)}"
    )


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Say in a few words, after ``what``, whatever the readers of `datasets` raise for files they cannot take."""
    try:
        yield
    except OffloadConfigError:
        raise
    except Exception as error:
        reason = error.__cause__ or error
        raise OffloadConfigError(f"{what}: {cropped(str(reason)) or 'it holds nothing'}") from (
            # A RuntimeError that a StopIteration causes is taken for that StopIteration by contextlib.
            None if isinstance(error, StopIteration) else error
        )


def column_names(dataset: "Dataset | IterableDataset") -> list[str]:
    """The dataset's columns; those of a stream may be known only from its first row."""
    return dataset.column_names or list(next(iter(dataset), {}))


def find_files(data: DataRecipe) -> list[Path]:
    """The files of the section data."""
    if data.source is not None:
        return stdlib_files(data.max_bytes)  # type: ignore[arg-type]  # DataRecipe made it an int
    return _find("data.files", data.files or (), data.data_dir)


def _load_hub(hub: HubData, split: str, data: DataRecipe, cache_dir: Path) -> "Dataset | IterableDataset":
    from datasets import load_dataset

    with loading(f"data.hub (split {split})", str(hub.name)):
        return load_dataset(hub.name, hub.config, split=split, streaming=data.streaming, cache_dir=str(cache_dir))


def _load_files(paths: list[Path], setting: str, data: DataRecipe, cache_dir: Path) -> "Dataset | IterableDataset":
    from datasets import load_dataset
    from pyarrow import parquet

    readers = {_READERS[path.suffix.lower()] for path in paths}
    if len(readers) > 1:
        raise OffloadConfigError(f"{setting} mixes {' and '.join(sorted(readers))} files: give files of one kind.")
    (reader,) = readers
    for path in paths if reader != "parquet" else ():  # of a stream, a reader may fail in the middle
        check_text(path, f"{setting}: the file")
    where: dict[str, Any] = {"streaming": data.streaming, "cache_dir": str(cache_dir)}
    if reader == "text":
        where |= {"sample_by": "document"}
    with reading(f"{setting} cannot be read as {reader}"):
        if reader == "parquet" and not sum(parquet.read_metadata(path).num_rows for path in paths):
            raise OffloadConfigError(f"There are no rows in {setting}.")
        return load_dataset(reader, data_files=[str(path) for path in paths], split="train", **where)


def _find(setting: str, patterns: Any, data_dir: str | None) -> list[Path]:
    folder = expand("data.data_dir", data_dir) if data_dir else Path()
    found: list[Path] = []
    for pattern in patterns:
        path = folder / expand(setting, pattern)
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  absolute patterns
        matches = [match for match in matches if is_file(match)]
        if not matches:
            raise OffloadConfigError(
                f"{setting}: there is no file {shown(pattern)} (seen from {cropped(str(folder.absolute()))})."
            )
        found += matches
    for path in found:
        if path.suffix.lower() not in _READERS:
            raise OffloadConfigError(f"{setting}: {path} is of no known kind. Known: {', '.join(sorted(_READERS))}.")
    return found
