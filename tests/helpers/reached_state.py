"""State of another module of the user's, for tests of what the code of a block reaches."""

HOLDER = None


def call(use):
    return use(HOLDER)
