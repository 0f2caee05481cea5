"""The two ways a command of the kit ends badly.

Entry points turn `MedusaError` into one line on stderr and exit code 2, and `CheckFailed` into exit code 1.
Anything else is a bug and keeps its traceback.
"""


class MedusaError(Exception):
    """Bad input or usage. The message names the thing that is wrong and what to do about it."""


class CheckFailed(Exception):
    """A check that the user asked for did not hold: losslessness, a gate."""
