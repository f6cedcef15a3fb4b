"""What sampled linear layers and lean activations need on a card, beside the ways they are compared with: counted, not run.

Shapes and baseline are those of the WTA-CRS paper (Liu et al., NeurIPS 2023, arXiv 2305.15265): classification of 128 tokens
in float32, attention that saves its matrices (``eager``), all weights trained with AdamW.
"""
