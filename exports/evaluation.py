"""Evaluates a decoder on held-out prompts: whether its answers are the target's own, and its speed."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add, eq
from typing import TYPE_CHECKING, Any

from arbordraft import SpeculativeDecoder, builders
from arbordraft.bench.decoding import Decode, answers, take_turns, warm_up
from arbordraft.bench.workload import Workload
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.prompts import VARIED, chat_batches
from arbordraft.trees.verdict import Exactness

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = VARIED  # no training of this project uses these prompts


@dataclass(frozen=True)
class Evaluation:
    """Greedy decoding of some prompts, with and without drafts.

    Args:
        exactness: the coupling's promise about the output law.
        prompts: number of prompts.
        prompts_sha256: digest of the prompts; figures on other prompts cannot be compared.
        equal: number of answers that are the target's own, token for token.
        tau: emitted tokens per target forward of a sample.
        tokens_per_second: speed with drafts, time for the prompts included.
        plain_tokens_per_second: speed without drafts, with the same kernels.
    """

    exactness: str
    prompts: int
    prompts_sha256: str
    equal: int
    tau: float
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def parity(self) -> bool:
        """Whether nothing is lost: every answer is the target's own, and the coupling is lossless for sampling, too."""
        return self.equal == self.prompts and Exactness(self.exactness).lossless

    def metrics(self) -> dict[str, float]:
        """Returns the figures, by the names under which they are tracked."""
        names = ("tau", "tokens_per_second", "plain_tokens_per_second")
        metrics = {f"eval/{name}": float(getattr(self, name)) for name in names}
        return metrics | {"eval/parity": float(self.parity), "eval/equal": float(self.equal)}

    def report(self) -> dict[str, Any]:
        """Returns all fields and the parity, to be stored as JSON."""
        return {"parity": self.parity, **asdict(self)}


def evaluate(
    decoder: SpeculativeDecoder,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str] = HELD_OUT,
    *,
    new_tokens: int = 64,
    batch: int = 4,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Evaluation:
    """Decodes prompts greedily with a decoder and with its target alone, in turns.

    Args:
        decoder: the decoder.
        tokenizer: the target's tokenizer.
        prompts: first user turns that the drafter has not learned from.
        new_tokens: longest answer, in tokens.
        batch: prompts at a time.
        on_progress: receives messages on the progress.

    Raises:
        ValueError: if there are no prompts.
    """
    if not prompts:
        raise ValueError("a decoder cannot be evaluated without prompts; give at least one")
    decoders = {"drafted": decoder, "plain": builders.plain(decoder.target)}
    texts: dict[str, list[list[int]]] = {name: [] for name in decoders}

    def greedy(name: str) -> Decode:
        def decode(inputs: dict[str, Any], workload: Workload) -> DecodeStats:
            request: dict[str, Any] = {"max_new_tokens": workload.new_tokens, "do_sample": False}
            output: Any = decoders[name].generate(**inputs, **request, return_dict_in_generate=True)
            texts[name] += answers(output, inputs)
            return output.stats

        return decode

    def show_case(name: str, done: int, of: int) -> None:
        on_progress(f"decoding held-out prompts, batch {done // 2 + 1} of {of // 2}")

    workload = Workload(tuple(prompts), batch, new_tokens, repeats=1)
    batches = chat_batches(tokenizer, prompts, batch)
    warm_up(decoders, batches[0], workload)
    seconds = dict.fromkeys(decoders, 0.0)
    counts: dict[str, list[DecodeStats]] = {name: [] for name in decoders}
    for name, spent, stats in take_turns({name: greedy(name) for name in decoders}, batches, workload, show_case):
        seconds[name] += spent
        counts[name].append(stats)
    ours, plain = (reduce(add, each) for each in counts.values())
    return Evaluation(
        exactness=decoder.coupling.exactness.value,
        prompts=len(prompts),
        prompts_sha256=hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        equal=sum(map(eq, *texts.values())),
        tau=ours.tau,
        tokens_per_second=sum(ours.emitted) / seconds["drafted"],
        plain_tokens_per_second=sum(plain.emitted) / seconds["plain"],
    )
