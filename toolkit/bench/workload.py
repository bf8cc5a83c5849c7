"""Prompts and settings of a measurement, which every suite takes and every result states."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.bench.contexts import lengthened
from arbordraft.decoding.prompts import MIXED, VARIED, chat_batches, read_prompts
from arbordraft.decoding.text import settings_of
from arbordraft.utils.checks import check_float, check_int, check_positive, check_temperature

if TYPE_CHECKING:
    from arbordraft.target.model import RaggedModel

# Settings of `generate` by kind of request: those that people send, most of them with engines' usual values.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.1},
    "n-grams": {"no_repeat_ngram_size": 3},
    "bad-words": {"bad_words_ids": [[100], [200, 300]]},
    "min-tokens": {"min_new_tokens": 64},
    "chat": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
}

# Receives the current case, the number of its finished rounds, and the number of all its rounds.
ProgressCallback = Callable[[str, int, int], object]


def quiet(what: str, done: int, of: int) -> None:
    """Ignores progress."""


def read_texts(prompts: Path | None, limit: int | None = None) -> list[str]:
    """Returns the first prompts of a file, or of the built-in ones.

    Raises:
        ValueError: if the file holds no prompts.
    """
    known = read_prompts(prompts) if prompts else [*MIXED, *VARIED]
    if not known:
        raise ValueError(f"{prompts} holds no prompts")
    return known[:limit]


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are decoded.

    Args:
        prompts: first user turns; by default the built-in ones.
        batch: prompts at a time, or clients of a server, 1 or more.
        new_tokens: most tokens of an answer, 1 or more; clients ask for other numbers, see :meth:`lengths`.
        temperature: 0 for greedy decoding.
        top_p: probability mass of nucleus sampling, 1 for the whole vocabulary.
        repetition_penalty: above 0; 1 for none.
        repeats: rounds of every timing, 1 or more; medians are reported.
        seed: seed of sampled tokens and of random inputs.
        kind: a kind of request of :data:`REQUESTS`, whose settings replace the ones above; none by default.
        context: tokens of a prompt, to which it is lengthened with unrelated text; 0 leaves prompts as they are.
        served: whether ``batch`` counts clients of a server; they share all prompts.
        category: category of the prompts in their file; none by default.

    Raises:
        TypeError: if a value is of the wrong type.
        ValueError: if a value is out of range.

    Examples:
        >>> request = Workload(["a", "b"], batch=2).request()
        >>> request["max_new_tokens"], request["do_sample"]
        (128, False)
    """

    prompts: tuple[str, ...] = (*MIXED, *VARIED)
    batch: int = 8
    new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    repeats: int = 3
    seed: int = 0
    kind: str = ""
    context: int = 0
    served: bool = False
    category: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", tuple(self.prompts))
        for name in ("batch", "new_tokens", "repeats"):
            check_int(name, getattr(self, name), 1)
        object.__setattr__(self, "temperature", check_temperature("temperature", self.temperature))
        object.__setattr__(self, "top_p", check_float("top_p", self.top_p, 0, 1))
        object.__setattr__(self, "repetition_penalty", check_positive("repetition_penalty", self.repetition_penalty))
        for name in ("seed", "context"):
            check_int(name, getattr(self, name), 0)
        if self.kind and self.kind not in REQUESTS:
            raise ValueError(f"there is no kind of request {self.kind!r}: choose among {', '.join(REQUESTS)}")
        if self.kind:
            object.__setattr__(self, "temperature", REQUESTS[self.kind].get("temperature", 0.0))

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled."""
        return self.temperature > 0

    def batches(self, target: "RaggedModel") -> list[dict[str, Any]]:
        """Returns left-padded chats on the target's device: ``input_ids`` and ``attention_mask`` of every batch.

        Clients of a server get one batch of all prompts, and share it out.

        Raises:
            ValueError: if the target has no tokenizer, or all prompts are longer than the context.
        """
        if target.tokenizer is None:
            raise ValueError("prompts are texts: give the target its tokenizer, RaggedModel(model, tokenizer)")
        prompts: Sequence[str] = self.prompts
        if self.context:
            prompts = lengthened(target.tokenizer, prompts, self.context, self.seed)
        return [
            {name: tensor.to(target.device) for name, tensor in batch.items()}
            for batch in chat_batches(target.tokenizer, prompts, len(prompts) if self.served else self.batch)
        ]

    def request(self) -> dict[str, Any]:
        """Returns arguments of ``generate`` that override the model's own settings."""
        penalty = {} if self.repetition_penalty == 1 else {"repetition_penalty": self.repetition_penalty}
        own = REQUESTS.get(self.kind, {}) if self.kind else penalty
        return settings_of(self.new_tokens, self.temperature, self.top_p, 0, None, 1) | own

    def fits(self, target: "RaggedModel") -> bool:
        """Whether the target has positions for a prompt of ``context`` tokens and its answer."""
        return target.max_positions is None or self.context + self.new_tokens <= target.max_positions

    def seeds(self, samples: int, first: int = 0) -> list[int]:
        """Returns the seeds of the prompts from number ``first`` on, equal for every decoder."""
        return [1000 * (self.seed + 1) + sample for sample in range(first, first + samples)]

    def lengths(self, answers: int) -> list[int]:
        """Returns the most tokens of the answers that clients ask for, equal for every decoder.

        They lie between half of ``new_tokens`` and all of it. With equal lengths, plain decoding would keep all
        clients in step: a batch that is full until the end, as no server has.
        """
        drawn = random.Random(self.seed)
        return [drawn.randint((self.new_tokens + 1) // 2, self.new_tokens) for _ in range(answers)]

    def stated(self) -> dict[str, Any]:
        """Returns fields for a file of results; prompts become their number and the SHA-256 of their lines."""
        digest = hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()
        return asdict(self) | {"prompts": {"count": len(self.prompts), "sha256": digest}}
