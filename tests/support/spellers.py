"""A tiny random model that can write any text, with the byte-level BPE tokenizer that grammars need."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from arbordraft import RaggedModel
from support.models import EOS, tiny

_TEXT = [
    '{"name": "Ada", "age": 36, "tags": ["one", "two"], "kind": "cat", "ok": true, "none": null}',
    '{"city": "Lisbon", "items": [{"id": 1, "price": 2.5}, {"id": 2, "price": 10.0}], "ok": false}',
    "yes no maybe red green blue alpha beta gamma",
]
SPEAKER_VOCAB = 400


@cache
def speller_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with all bytes, special tokens at the ids of tiny models, and merges learned from JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    spelling = Tokenizer(models.BPE())
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<bos>", "<eos>"]
    spelling.train_from_iterator(
        _TEXT * 4,
        trainers.BpeTrainer(
            vocab_size=SPEAKER_VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=spelling, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


@cache
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte: it writes every text in a single way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    spelling.add_special_tokens(special)
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=spelling, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


@cache
def speller(seed: int = 0, sharpness: float = 3.0) -> RaggedModel:
    """Returns a model with this tokenizer."""
    tokenizer = speller_tokenizer()
    assert tokenizer.eos_token_id == EOS
    model = tiny(seed=seed, sharpness=sharpness, vocab_size=SPEAKER_VOCAB, max_position_embeddings=512)
    return RaggedModel(model, tokenizer, kernels="torch", self_test=False)
