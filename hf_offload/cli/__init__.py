"""The command ``hf-offload``: a file for each of its commands, which read options and print results.

What a command does is done below, by what Python code can call, too; nothing imports this folder.
"""
