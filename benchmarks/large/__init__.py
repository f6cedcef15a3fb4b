"""GPT-2 XL trained in full on a machine that cannot hold it: what it takes, and what the drive and the cores allow."""
