"""A tokenizer with a chat template for tiny models, and completers with predictable answers."""

import random
from collections.abc import Callable, Sequence
from string import ascii_lowercase, ascii_uppercase, digits

from transformers import PreTrainedTokenizerFast

from arbordraft.training.completion import Completion, Sampling
from support.models import EOS, VOCAB

START, END = "<|start|>", "<|end|>"
# Adds a system message if none is given, and a newline after every end.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|start|>system\nbe kind<|end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# Turns of users have no end token, a space precedes the end, and system messages are refused.
BRACKETS = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|start|>Q: ' + message['content'] + ' A:' }}"
    "{% else %}{% generation %}{{ message['content'] + ' <|end|>' }}{% endgeneration %}{% endif %}{% endfor %}"
)


def chat_tokenizer(template: str = CHATML, *, spaced: bool = False) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one character per token id; ``<|end|>`` is the end token of tiny models.

    Args:
        template: chat template.
        spaced: puts a space before every text, as SentencePiece does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    known = ["?", START, END, "\n", " ", ".", "-", ":", *ascii_lowercase, *digits, *ascii_uppercase][:VOCAB]
    tokens = Tokenizer(models.WordLevel({text: token for token, text in enumerate(known)}, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    if spaced:
        tokens.normalizer = normalizers.Prepend(" ")
    tokens.add_special_tokens([START, END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END, chat_template=template)
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.pad_token is None
    return tokenizer


class Scripted:
    """Continues every text by a rule, and records texts and settings of its calls.

    Args:
        rule: returns the continuation of a text, or only the tokens of a continuation that ends.
    """

    def __init__(self, rule: Callable[[list[int], Sampling], Completion | list[int]]) -> None:
        self.rule = rule
        self.asked: list[tuple[list[int], Sampling]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Callable[[int], object]
    ) -> list[Completion]:
        found = []
        for prompt in prompts:
            self.asked.append(([*prompt], sampling))
            continuation = self.rule([*prompt], sampling)
            found.append(continuation if isinstance(continuation, Completion) else Completion(continuation, True))
            done(len(found[-1].tokens))
        return found


class Babble:
    """Continues every text quickly, with tokens that depend only on the text, the sampling and the seed.

    Args:
        fails: returns whether a call fails; asked at the beginning of every call.
    """

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.fails = fails

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Callable[[int], object]
    ) -> list[Completion]:
        if self.fails():
            raise ConnectionError("gone")
        found = []
        for index, prompt in enumerate(prompts):
            source = random.Random(f"{list(prompt)} {sampling} {seed + index}")
            length = source.randint(1, sampling.max_new_tokens)
            tokens = [source.randint(3, VOCAB - 1) for _ in range(length - 1)]
            ended = source.random() < 0.8
            found.append(Completion([*tokens, EOS if ended else 9], ended))
            done(length)
        return found
