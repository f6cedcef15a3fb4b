"""What will happen: a footprint, a machine and a budget go in, a plan with its reasons comes out, by arithmetic alone.

No models, no tensors, no engine, and nothing that measures: that is ``planning`` (here and now) and ``forecast`` (on paper).
"""
