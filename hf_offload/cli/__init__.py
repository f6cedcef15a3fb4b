"""The command ``hf-offload``: a file for each of its commands, which read options and print results.

The work is done in other folders, by what Python code can call, too; nothing imports this one.
"""
