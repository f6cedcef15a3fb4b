"""Trying many seeds from the command line: what failed, and how to go on after Ctrl-C."""

import argparse
import logging
import sys
from collections.abc import Callable

import torch

_SHOWN = 20
_LINE_EVERY = 1000


def try_seeds(run: Callable[[int], list[str]], module: str) -> int:
    """The command ``python -m MODULE``: calls ``run`` with many seeds. Its exit code is 1 if one of them found something.

    The last line is always ``N seeds, M failed``, and names the first seed that failed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--count", type=int, default=10_000, help="How many seeds.")
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--seed", type=int, help="This seed only.")
    parser.add_argument("--stop", action="store_true", help="Stop at the first seed that fails.")
    chosen = parser.parse_args()
    first, count = (chosen.first, chosen.count) if chosen.seed is None else (chosen.seed, 1)
    logging.disable(logging.CRITICAL)  # tiers are full and writes fail on purpose
    torch.set_num_threads(1)
    failed, done = [], 0
    try:
        for seed in range(first, first + count):
            problems = attempt(run, seed)
            done += 1
            if done % _LINE_EVERY == 0:
                _say(f"{done} of {count}, {len(failed)} failed")
            if not problems:
                continue
            failed.append(seed)
            if len(failed) <= _SHOWN:
                _say(f"seed {seed}: " + "\n    ".join(problems))
            if failed and chosen.stop:
                break
    except KeyboardInterrupt:
        _say(f"Stopped. To go on: python -m {module} --first {first + done} --count {count - done}")
    again = f"; again with: python -m {module} --seed {failed[0]}" if failed else ""
    _say(f"{done} seeds from {first} on, {len(failed)} failed{again}")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def attempt(run: Callable[[int], list[str]], seed: int) -> list[str]:
    """What ``run`` found with ``seed``; an error is a find, too."""
    try:
        return run(seed)
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f" at {where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        return [f"{type(error).__name__}: {error}{place}"]
