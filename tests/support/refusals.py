"""One table of `(call, error, words)` per room: calls that cannot work, and the error that names the argument."""

import re

import pytest


def refusals(*rows):
    """Parametrises a test by rows of a table; the words are their names."""
    names = [re.sub(r"[^\w ,-]", "", words)[:60] for _, _, words in rows]
    return pytest.mark.parametrize(("call", "error", "words"), rows, ids=names)


def check_refusal(call, error, words):
    """The call raises an error of exactly this type; its message is one line that matches the words."""
    with pytest.raises(error, match=words) as caught:
        call()
    assert caught.type is error
    assert "\n" not in str(caught.value)
