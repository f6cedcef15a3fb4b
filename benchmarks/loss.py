"""Output head and loss alone: the usual way, in pieces, and Liger's kernel where it is installed.

Memory is what a forward and a backward need beside hidden states, weights and their gradients; a run of its own counts it.
"""
