"""The one exception by which a command says that its input is wrong (exit code 2, no traceback)."""


class BadInput(Exception):
    """What the user gave cannot work; the message names it and the fix."""
