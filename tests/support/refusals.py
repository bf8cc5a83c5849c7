"""Tables of `(call, error, words)`, one per subpackage: invalid calls, and the error that names the argument."""

import re

import pytest


def refusals(*rows):
    """Parametrises a test by the rows of a table, whose words become ids."""
    names = [re.sub(r"[^\w ,-]", "", words)[:60] for _, _, words in rows]
    return pytest.mark.parametrize(("call", "error", "words"), rows, ids=names)


def check_refusal(call, error, words):
    """Checks that the call raises exactly this type of error, with a message of one line that matches the words."""
    with pytest.raises(error, match=words) as caught:
        call()
    assert caught.type is error
    assert "\n" not in str(caught.value)
