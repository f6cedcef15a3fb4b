"""The entry point of the command: it imports nothing first, so that Ctrl-C works from the start."""

import errno
import os
import sys

from hf_offload.errors import EXIT_INTERRUPTED, EXIT_PROBLEM


def main() -> None:
    """Run the command. Ctrl-C, during imports too, and a full device end it with one line."""
    try:
        try:
            from hf_offload.cli.main import main as run

            run()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        sys.stderr.write(
            f"{error.filename or 'The output'} cannot be written: {error.strerror}. Free some space, or write elsewhere.\n"
        )
        # The rest of the buffer cannot be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_PROBLEM)
