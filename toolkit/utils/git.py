"""Questions to git about a checkout."""

import subprocess

from arbordraft.utils.files import StrPath


def git(*arguments: str, folder: StrPath | None = None) -> str | None:
    """Output of a git command without its last line break; ``None`` outside of a checkout, or without git.

    Args:
        arguments: of a command that only reads: the index is not locked.
        folder: where to ask, by default the working folder.
    """
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


__all__ = ["git"]
