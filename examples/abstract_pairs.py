"""Pairs of texts to classify, from a data set of abstracts and summaries: does the summary belong to the abstract?

    python examples/abstract_pairs.py scitldr pairs
    hf-offload train bert/minilm_full_auto data.data_dir=.

Reads ``train.jsonl`` and ``validation.jsonl`` in the first folder, with the columns ``document`` and ``summary`` (SciTLDR,
https://github.com/allenai/scitldr, Apache-2.0, has them as ``source`` and ``target``), and writes files of the same names
with ``abstract``, ``summary`` and ``label``: each abstract once with its own summary, and once with another's.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path


def pairs(rows: list[dict[str, str]], seed: int = 0) -> Iterator[dict[str, str]]:
    """The rows, each followed by one whose summary is that of the next row in a shuffled round, so never its own."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    other = dict(zip(order, order[1:] + order[:1], strict=True))
    for number, row in enumerate(rows):
        for origin, label in ((row, "own"), (rows[other[number]], "another")):
            yield {"abstract": row["document"], "summary": origin["summary"], "label": label}


def main(source: Path, target: Path) -> None:
    """Read two files in ``source`` and write two into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("train.jsonl", "validation.jsonl"):
        rows = [json.loads(line) for line in (source / name).read_text(encoding="utf-8").splitlines()]
        lines = [json.dumps(pair) + "\n" for pair in pairs(rows)]
        (target / name).write_text("".join(lines), encoding="utf-8")
        print(f"{target / name}: {len(lines)} pairs")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
