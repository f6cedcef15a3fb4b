"""Benchmarks for users: steps of a recipe with each strategy, drives, and what the package costs the host.

What makes only the tables of this project is in ``benchmarks/`` at the top; nothing here is imported while training.
"""
