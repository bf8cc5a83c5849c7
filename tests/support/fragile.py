"""A logits processor that fails on purpose."""

from transformers import LogitsProcessor


class Fragile(LogitsProcessor):
    """Raises once a text has a given length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("broken on purpose")
        return scores
