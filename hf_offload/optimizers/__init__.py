"""Optimizers that need less memory than AdamW."""
