"""``python -m hf_offload`` is ``hf-offload``."""

from hf_offload.cli.main import app

if __name__ == "__main__":
    app()
