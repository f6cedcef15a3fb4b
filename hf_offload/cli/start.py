"""Where the command begins: with nothing imported yet, so that Ctrl-C is answered from the first moment on."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; Ctrl-C ends it with one line, also while modules are being imported."""
    try:
        from hf_offload.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        sys.exit(EXIT_INTERRUPTED)
