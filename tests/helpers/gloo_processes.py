"""Work in several processes that talk over gloo. They take long to begin: all of a module's work is done by the same."""

import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.helpers.loaded_processes import START_METHOD, load


def run_in_processes(works, count, folder):
    """Call each of ``works`` with its rank and a folder, in ``count`` processes that form a group anew for each."""
    load()
    torch.multiprocessing.start_processes(_run, (works, count, folder), nprocs=count, start_method=START_METHOD)


def _run(rank, works, count, folder):
    torch.set_num_threads(1)
    # What a launcher tells its processes, and accelerate wants to know.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for work in works:
        # A file is where they meet: no port that somebody else may have taken.
        dist.init_process_group("gloo", f"file://{folder}/{work.__name__}-meeting", rank=rank, world_size=count)
        try:
            work(rank, folder)
        except BaseException:
            Path(folder, f"{work.__name__}-{rank}").write_text(traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        Path(folder, f"{work.__name__}-{rank}-ended").touch()


def assert_done(work, count, folder):
    """Fail with the error of whichever process had one."""
    for rank in range(count):
        report = folder / f"{work.__name__}-{rank}"
        assert not report.exists(), report.read_text()
        assert (folder / f"{work.__name__}-{rank}-ended").exists()
