"""Errors whose message is for the user."""


class UserError(RuntimeError):
    """Something went wrong though all arguments were valid; the message names the cause and the fix.

    Wrong arguments and files raise ValueError, missing libraries ImportError, failures of disks and networks OSError.
    The command line shows messages of these and of this class in one line. Any other error is a bug and keeps its
    traceback.
    """


__all__ = ["UserError"]
