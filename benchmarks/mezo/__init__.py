"""MeZO with weights on a drive: what a step of GPT-2 XL takes, and what the cores and the drive allow."""
