"""A small Qwen3 with a large vocabulary and tied embeddings that has learned to chat: no download, and no noise.

Its world has few words. As in a real target, most tokens of the vocabulary hardly ever come up.
"""

import json
import random
from collections.abc import Iterator
from itertools import product
from math import log
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from support.chats import CHATML, END, START

THINGS = ("bee", "river", "lamp", "garden", "train", "violin", "castle", "winter", "bridge", "story", "captain")
TRAITS = ("small", "old", "bright", "quiet", "heavy", "green", "famous", "slow", "gentle", "wide")
_USED = 600  # tokens that the world's texts are made of
_OTHERS = 400  # tokens that stand for all others while the model is trained


def texts(source: random.Random) -> Iterator[list[dict[str, str]]]:
    """Conversations about things and what they are like."""
    while True:
        thing, other = source.sample(THINGS, 2)
        one, two, three = source.sample(TRAITS, 3)
        ask = source.choice([f"What is the {thing}?", f"Tell me about the {thing} and the {other}.", f"Why a {thing}?"])
        answer = (
            f"The {thing} is {one} and {two}. It stands near the {other}, which is {three}. A {thing} is never {three}."
        )
        yield [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from these texts and filled up with words that they lack."""
    begun = Tokenizer(models.BPE())
    begun.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_USED, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    source = texts(random.Random(0))
    begun.train_from_iterator((turn["content"] for _ in range(500) for turn in next(source)), trainer)
    learned = json.loads(begun.to_str())["model"]
    known = dict(learned["vocab"])
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    while len(known) < vocabulary:
        known.setdefault(next(words), len(known))
    spelling = Tokenizer(models.BPE(known, [tuple(merge) for merge in learned["merges"]]))
    spelling.pre_tokenizer, spelling.decoder = begun.pre_tokenizer, decoders.ByteLevel()
    spelling.add_special_tokens([START, END])
    return PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token=END, chat_template=CHATML)


def save_talker(folder: Path, vocabulary: int = 151_936, steps: int = 200) -> Path:
    """Trains one for some seconds and saves it with its tokenizer."""
    spelling, source = tokenizer(vocabulary), texts(random.Random(1))
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": spelling.convert_tokens_to_ids(END),
    }
    small = Qwen3ForCausalLM(Qwen3Config(vocab_size=_USED + _OTHERS, **settings))
    optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)
    for _ in range(steps):
        chats = [spelling.apply_chat_template(next(source), return_dict=True)["input_ids"] for _ in range(8)]
        tokens = pad_sequence(list(map(torch.tensor, chats)), batch_first=True, padding_value=_USED)
        scores = small(tokens[:, :-1]).logits
        scores[..., _USED:] += log((vocabulary - _USED) / _OTHERS)
        functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=_USED).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **settings))
    rows = torch.arange(vocabulary)
    rows = torch.where(rows < _USED, rows, _USED + rows % _OTHERS)
    weights = small.state_dict()
    whole.load_state_dict({n: w[rows] if len(w) == _USED + _OTHERS else w for n, w in weights.items()})
    whole.save_pretrained(folder)
    spelling.save_pretrained(folder)
    return folder
