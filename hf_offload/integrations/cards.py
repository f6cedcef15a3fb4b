"""Model cards that a Trainer writes say what offloading did in its run.

The Trainer asks nobody when it writes a card, so its method is wrapped: once, when the first training is offloaded. Cards of
trainings that were not offloaded stay as they were.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

HEADING = "## Memory"
CARD_FILE = "README.md"


def describe_offloading_in_cards(lines_of: Callable[[Trainer], list[str]]) -> None:
    """Let ``create_model_card`` of every Trainer class there is now add ``lines_of(trainer)`` to the card, if there are any.

    Idempotent.
    """
    for kind in _with_subclasses(Trainer):
        usual = vars(kind).get("create_model_card")  # TRL's trainers, and users', write cards of their own
        if usual is not None and not hasattr(usual, "hf_offload_cards"):
            kind.create_model_card = _extended(usual, lines_of)  # type: ignore[method-assign]


def _extended(usual: Callable[..., Any], lines_of: Callable[[Trainer], list[str]]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def create_model_card(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        result = usual(self, *args, **kwargs)
        card = Path(self.args.output_dir or ".") / CARD_FILE
        lines = lines_of(self)
        if lines and self.is_world_process_zero() and card.is_file():
            text = card.read_text(encoding="utf-8")
            if HEADING not in text.splitlines():  # the method of a parent class has written it already
                listed = "\n".join(f"- {line}" for line in lines)
                card.write_text(f"{text.rstrip()}\n\n{HEADING}\n\n{listed}\n", encoding="utf-8")
        return result

    create_model_card.hf_offload_cards = True  # type: ignore[attr-defined]
    return create_model_card


def _with_subclasses(kind: type[Trainer]) -> Iterator[type[Trainer]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _with_subclasses(child)
