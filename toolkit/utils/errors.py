"""Errors whose message is for the user."""


class UserError(RuntimeError):
    """Something went wrong though all arguments were valid; the message names the cause and the fix.

    Wrong arguments and files raise ValueError, missing libraries ImportError, disks and networks OSError. The command
    line shows the messages of these and of this class in one line. Any other error is a bug: its traceback is kept.
    """


__all__ = ["UserError"]
