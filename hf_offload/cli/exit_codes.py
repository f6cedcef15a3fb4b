"""How a command that did not succeed ends."""

EXIT_PROBLEM = 1
"""Something failed on the way, such as a full drive."""
EXIT_REFUSED = 2
"""Wrong settings or arguments: nothing was begun."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
