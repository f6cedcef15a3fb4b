"""MeZO (Malladi et al., NeurIPS 2023, arXiv 2305.17333): fine-tuning with forward passes alone, and the log that
rebuilds every step. Nothing here knows the Trainer.
"""

from hf_offload.methods.mezo.log import LOG_FILE, MezoLog, replay
from hf_offload.methods.mezo.optimizer import MeZO

__all__ = ["LOG_FILE", "MeZO", "MezoLog", "replay"]
