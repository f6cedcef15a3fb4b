"""Where the command begins: with nothing imported yet, so that Ctrl-C is answered from the first moment on."""

import errno
import os
import sys

from hf_offload.cli.exit_codes import EXIT_INTERRUPTED, EXIT_PROBLEM


def main() -> None:
    """Run the command. Ctrl-C, while modules are being imported too, and a device without room end it with one line."""
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
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(
            f"{error.filename or 'The output'} cannot be written: {error.strerror}. Make room, or write elsewhere.\n"
        )
        # What is left in the buffer cannot be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_PROBLEM)
