"""Parameters whose memory, next value or gradient is elsewhere, and comes when it is used.

Nothing here knows models, tiers or optimizers: what a parameter waits for says by itself how it comes.
"""
