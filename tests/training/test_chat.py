"""Chat templates split into pieces, and the openings of user turns that the target writes."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from support.chats import BRACKETS, CHATML, END, START, chat_tokenizer
from support.models import tiny

from arbordraft.training.chat import ChatFormat
from arbordraft.training.prompt_templates import draw_prompt_template, known_words
from arbordraft.training.targets import Target


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("template", [CHATML, BRACKETS])
def test_joined_pieces_give_the_tokens_of_the_template(template, spaced):
    tokenizer = chat_tokenizer(template, spaced=spaced)
    chat = ChatFormat(tokenizer)
    messages = [
        {"role": "user", "content": "who are you"},
        {"role": "assistant", "content": "nobody"},
        {"role": "user", "content": "and i"},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    first = chat.ids(chat.before_user() + "who are you")
    rest = chat.ids_after(f"{chat.to_assistant}nobody{chat.to_user}and i{chat.to_assistant}")
    assert first + rest == whole
    if spaced and template == BRACKETS:  # otherwise the test could not fail
        assert chat.ids(chat.to_assistant) != chat.ids_after(chat.to_assistant)


def test_a_given_system_message_replaces_the_templates_own():
    chat = ChatFormat(chat_tokenizer())
    assert chat.before_user() == f"{START}system\nbe kind{END}\n{START}user\n"
    assert chat.before_user("be brief") == f"{START}system\nbe brief{END}\n{START}user\n"
    assert (chat.to_user, chat.to_assistant) == (f"{END}\n{START}user\n", f"{END}\n{START}assistant\n")


@pytest.mark.parametrize(
    "template",
    [BRACKETS, CHATML.replace("in messages %}", "in messages if message['role'] != 'system' %}")],
    ids=["refused", "ignored"],
)
def test_a_system_message_that_the_template_does_not_take_is_an_error(template):
    chat = ChatFormat(chat_tokenizer(template))
    with pytest.raises(ValueError, match=r"takes no system message .*leave them out"):
        chat.before_user("be brief")


def test_base_models_get_a_template_from_a_file(tmp_path):
    tiny().save_pretrained(tmp_path)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    template = tmp_path / "chat.jinja"  # transformers by itself finds only chat_template.jinja
    template.write_text(BRACKETS)
    base = Target(str(tmp_path), dtype="float32", kernels="torch")
    with pytest.raises(ValueError, match=r"--data\.target\.chat_template"):
        ChatFormat(base.load().tokenizer)
    chat = ChatFormat(replace(base, chat_template=str(template)).load().tokenizer)
    assert chat.to_assistant == ChatFormat(chat_tokenizer(BRACKETS)).to_assistant
    with pytest.raises(FileNotFoundError, match="nowhere"):
        replace(base, chat_template=str(tmp_path / "nowhere")).load()


def test_a_template_that_changes_messages_is_an_error():
    with pytest.raises(ValueError, match="does not repeat messages word by word"):
        ChatFormat(chat_tokenizer(CHATML.replace("message['content']", "message['content'] | upper")))


def test_special_tokens_are_found_with_and_without_a_name():
    tokenizer = chat_tokenizer()
    assert tokenizer.all_special_ids == [2]  # <|start|> has no name
    assert ChatFormat(tokenizer).special == {1, 2}


def test_text_that_continues_a_word_is_tokenised_by_itself():
    """The text merges with the word before it, so no token boundary separates the two."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merging = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, chat_template=CHATML)
    assert ChatFormat(tokenizer).ids_after("b") == [1]
    assert ChatFormat(tokenizer).ids_after("") == []


def test_openings_depend_on_their_source_alone_and_have_two_limits():
    draws = [draw_prompt_template(random.Random(seed)) for seed in range(3000)]
    assert draws == [draw_prompt_template(random.Random(seed)) for seed in range(3000)]
    assert {template.limit for template in draws} == {80, 200}
    counts = Counter(template.text for template in draws)
    assert len(counts) > 300
    texts = {part for template in draws for part in (template.text, *template.around.split("{text}"))}
    assert not any(mark in text for text in texts for mark in "{}|")


@pytest.mark.parametrize(
    ("kinds", "least"),
    [
        ({"free"}, 0.04),
        ({"knowledge", "question"}, 0.2),
        ({"writing"}, 0.1),
        ({"role"}, 0.06),
        ({"mathematics"}, 0.1),
        ({"code", "code to read"}, 0.1),
        ({"summary"}, 0.06),
        ({"retrieval"}, 0.06),
        ({"translation", "translation back"}, 0.06),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_every_kind_of_prompt_has_its_share(kinds, least):
    draws = [draw_prompt_template(random.Random(seed)) for seed in range(3000)]
    share = sum(template.kind in kinds for template in draws) / len(draws)
    assert least < share < 1.5 * least + 0.05
    long = {"summary", "retrieval", "translation", "translation back", "code to read"}
    for template in draws:
        assert template.around.count("{text}") == (template.kind in long)


def test_openings_end_with_the_words_that_they_ask_about():
    words = [f"word{number}" for number in range(5000)]
    texts = [draw_prompt_template(random.Random(seed), words).text for seed in range(3000)]
    asking = [text for text in texts if re.search(r"word\d+", text)]
    assert len(asking) > 0.4 * len(texts)
    assert all(re.search(r"word\d+$", text) for text in asking)
    assert len(set(asking)) > 0.95 * len(asking)


@pytest.mark.parametrize("mark", ["Ġ", "▁"])
def test_words_come_from_the_vocabulary(mark):
    """Words are whole tokens after a space, of at least four letters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    behind_space = [mark + word for word in ("volcano", "tea", "Rome", "2024", "co-op", "")]
    pieces = ["water", *behind_space, "", "<|end|>"]
    inner = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    inner.decoder = decoders.ByteLevel() if mark == "Ġ" else decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    assert known_words(tokenizer) == ["Rome", "volcano"]
