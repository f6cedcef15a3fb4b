"""``python -m hf_offload`` is ``hf-offload``."""

from hf_offload.cli.start import main

if __name__ == "__main__":
    main()
