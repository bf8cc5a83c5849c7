"""Batches of chats: the ids that complete() would read, left-padded."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from arbordraft.decoding.prompts import chat_batch

TEMPLATE = "<s>{% for message in messages %} {{ message.content }}{% endfor %} :"


def tokenizer(template=None):
    """Builds a tokenizer that begins every text with ``<s>``, as Llama's does; the template writes it, too."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "one": 1, "two": 2, ":": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>"])
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=words)
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, [[0, 1], [0, 2, 1]]), (TEMPLATE, [[0, 1, 3], [0, 2, 1, 3]])],
    ids=["plain", "one start token with a template"],
)
def test_a_batch_of_chats(template, expected):
    batch = chat_batch(tokenizer(template), ["one", "two one"])
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    assert [ids[mask == 1].tolist() for ids, mask in rows] == expected
    assert batch["attention_mask"][0].tolist() == [0, *[1] * len(expected[0])]


def test_an_empty_prompt_is_named():
    bare = tokenizer()
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        chat_batch(bare, ["one", ""])
