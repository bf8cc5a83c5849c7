"""Tokenizers and ends of texts are those of the file."""

import pytest
from support.models import fusable
from transformers import AutoTokenizer

pytest.importorskip("gguf")
from support.gguf_files import LETTERS, byte_tokens, write_gguf

from arbordraft.checkpoints.gguf_file import GgufFile
from arbordraft.checkpoints.gguf_settings import gguf_config, gguf_generation_config, gguf_tokenizer

TEXTS = ["hello ab", " Héllo\n\n 12  漢字", "<|im_start|>user\nab<|im_end|>\n"]
SPELLED = [*byte_tokens(), "ab", "<|im_start|>", "<|im_end|>", "<|end_of_text|>"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnop", "ab", "▁ab"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
VOCABULARIES = {
    "bytes": (
        SPELLED,
        {
            "tokenizer.ggml.token_type": [1] * 257 + [3] * 3,
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.bos_token_id": 259,
            "tokenizer.ggml.eos_token_id": 259,
            "tokenizer.chat_template": TEMPLATE,
            "tokenizer.ggml.add_bos_token": False,
        },
    ),
    "pieces": (
        PIECES,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259),
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(PIECES) - 259)],
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.unknown_token_id": 0,
        },
    ),
}


def written(path, kind, **fields):
    tokens, known = VOCABULARIES[kind]
    write_gguf(path, fusable(vocab_size=len(tokens)), tokens=tokens, fields=known | fields)
    return GgufFile(path)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_tokenizers_equal_those_of_transformers(tmp_path, kind):
    ours = gguf_tokenizer(written(tmp_path / "x.gguf", kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf", padding_side="left")
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert (ours.padding_side, len(ours)) == ("left", len(theirs))
    assert (
        ours(TEXTS[2])["input_ids"]
        != gguf_tokenizer(written(tmp_path / "y.gguf", "pieces" if kind == "bytes" else "bytes"))(TEXTS[2])["input_ids"]
    )  # control


def test_chat_templates_are_the_files(tmp_path):
    file = written(tmp_path / "x.gguf", "bytes", **{"tokenizer.chat_template.tool_use": "tools"})
    tokenizer = gguf_tokenizer(file)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>ab<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="tool_use") == "tools"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, [259, 258]),  # the template ends turns with <|im_end|>
        ({"tokenizer.chat_template": None}, 259),
        ({"tokenizer.ggml.eot_token_id": 257, "tokenizer.chat_template": None}, [259, 257]),
        ({"tokenizer.ggml.eos_token_id": 258}, 258),
        ({"tokenizer.ggml.token_type": [1] * 260}, 259),  # control: a text may spell it
    ],
    ids=["by template", "by key", "end of turn", "already", "no control token"],
)
def test_turns_end_at_the_files_tokens(tmp_path, fields, ends):
    file = written(tmp_path / "x.gguf", "bytes", **fields)
    assert gguf_generation_config(file, gguf_config(file)).eos_token_id == ends


def test_tokens_that_a_file_does_not_name_are_none(tmp_path):
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=27), fields={"tokenizer.ggml.eos_token_id": None})
    config = gguf_config(GgufFile(tmp_path / "x.gguf"))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, None, None)


def test_files_without_a_vocabulary_have_no_tokenizer(tmp_path):
    fields = dict.fromkeys(f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type", "merges"))
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=27), fields=fields)
    assert gguf_tokenizer(GgufFile(tmp_path / "x.gguf")) is None


@pytest.mark.parametrize(
    "fields", [{"tokenizer.ggml.model": "unheard of"}, {"tokenizer.ggml.eos_token_id": 99}], ids=["kind", "token"]
)
def test_damaged_vocabularies_are_refused(tmp_path, fields):
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=27), fields=fields, tokens=LETTERS)
    with pytest.raises(ValueError, match=r"the tokenizer in .*x\.gguf cannot be read \(.*\): copy or convert"):
        gguf_tokenizer(GgufFile(tmp_path / "x.gguf"))
