"""Phase ``decoders``: whole decoders of tiny models against transformers, and recorded steps against eager ones.

In float32 tokens must be equal. In 16-bit types rounding may decide between two tokens of similar probability. Then the
distance of their logits is reported, and the row is wrong only if rounding cannot explain the distance. With
row-invariant kernels all tokens must equal those of plain decoding in any type, and a row must have the bits that it
has alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, EagleDrafter, LanguageModelDrafter, NGramDrafter, NoDrafter, SelfDrafter
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.testing.models import greedy_reference, left_padded, new_tokens, tiny_model
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling
from arborlab.gpu.problem import named
from arborlab.gpu.setting import Item, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 128
PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [11, 4, 11, 4], list(range(3, 40))]
TREE = TreeTopology.from_k_config((3, 2, 1))
ROUNDINGS = 16  # of the largest logit; two logits that changed places may differ by so much
MOST_ROWS = 64


@dataclass(frozen=True)
class DecoderRow:
    """Comparison of a decoder's tokens with those of another one.

    Args:
        check: name of the comparison, such as ``eager, transformers``.
        tokens: compared tokens of all samples.
        same: tokens before each sample's first difference.
        gap: largest distance of the logits of two tokens that changed places; ``None`` without a difference.
        explained: distance that rounding explains; ``None`` where tokens must be equal.
        graphs: recorded steps; ``None`` where nothing is recorded.
    """

    table: ClassVar[str] = "decoders"

    model: str
    dtype: str
    drafter: str
    check: str
    tokens: int
    same: int
    gap: float | None
    explained: float | None
    graphs: int | None
    correct: bool


@dataclass(frozen=True)
class RowsRow:
    """Dependence of one row's logits on the number of rows beside it.

    Args:
        kernels: ``row-invariant`` or ``default``.
        equal_rows: numbers of rows, from 1 to 64, at which the logits have the bits of the row alone.
        largest: largest difference from the row alone, as a share of the largest logit.
        correct: whether the logits never differ; ``None`` where that is not promised.
    """

    table: ClassVar[str] = "bits by rows"

    model: str
    dtype: str
    kernels: str
    equal_rows: str
    largest: float
    correct: bool | None = None


def decoders(setting: Setting) -> list[Item]:
    """Returns the items of the phase."""
    kinds = {"llama": _llama, "qwen3": _qwen3, "gemma2": _gemma2}
    if not setting.on_gpu:
        kinds = {"llama": _llama}
    types = (torch.float32, torch.bfloat16, torch.float16) if setting.on_gpu else (torch.float32, torch.bfloat16)
    items = []
    for row, dtype in enumerate(types):
        for column, (name, make) in enumerate(kinds.items()):
            parts = _Tiny(name, make, dtype, setting).parts()
            for place, (part, run) in enumerate(parts.items()):
                items.append((row + column + place, Item(f"{name}, {named(dtype)}, {part}", run)))
    # Begins with the first entries of each list, so that a short run covers some of everything.
    return [item for _, item in sorted(items, key=itemgetter(0))]


class _Tiny:
    """A tiny model of random weights in one type, and its decoders."""

    def __init__(self, name: str, make: Callable[..., "PreTrainedModel"], dtype: torch.dtype, setting: Setting) -> None:
        self.name, self.make, self.dtype, self.setting = name, make, dtype, setting
        self.exact = dtype == torch.float32
        self.count = 24 if setting.on_gpu else 8

    def parts(self) -> dict[str, Callable[[], Iterator[Any]]]:
        """Returns makers of each drafter's rows and of the bits by rows, first those that run most kernels."""
        others = ("draft model", *(["itself"] if self.setting.on_gpu else []), "none", "ngram")
        invariant = {"row-invariant": self.invariant} if self.setting.on_gpu else {}
        return {
            "eagle": partial(self.compared, "eagle"),
            "bits": self.bits,
            **invariant,
            **{drafter: partial(self.compared, drafter) for drafter in others},
        }

    def target(self, seed: int = 0, *, row_invariant: bool = False) -> RaggedModel:
        model: Any = self.make(seed)
        model = model.to(self.setting.device, self.dtype)
        kernels = "triton" if self.setting.on_gpu else "torch"
        return RaggedModel(model, kernels=kernels, row_invariant=row_invariant, self_test=False)

    def drafter(self, name: str, target: RaggedModel) -> Drafter:
        if name == "ngram":
            return NGramDrafter(longest=2, shortest=1)
        if name == "itself":
            return SelfDrafter(target)
        if name == "eagle":
            torch.manual_seed(self.setting.seed)
            head = EagleHead.for_target(target.model, list(range(VOCABULARY)), hidden_layers=[0, 1, 2])
            moved: Any = head
            return EagleDrafter(moved.to(target.device, self.dtype), target)
        return LanguageModelDrafter(self.target(seed=3)) if name == "draft model" else NoDrafter()

    def compared(self, name: str) -> Iterator[DecoderRow]:
        target = self.target()
        drafter = self.drafter(name, target)
        coupling = Coupling.matching() if name in ("none", "ngram") else Coupling.shared(3)
        tree = TreeTopology.chain(0 if name == "none" else 4) if name in ("none", "ngram") else TREE
        eager = SpeculativeDecoder(target, drafter, tree, coupling, buckets=None)
        recorded = SpeculativeDecoder(target, drafter, tree, coupling, buckets=(8, 32))
        expected = greedy_reference(target.model, PROMPTS, max_new_tokens=self.count, eos_token_id=None)
        greedy = self.decoded(eager, do_sample=False)
        yield self.row(target, name, "eager, transformers", greedy, expected)
        found = self.decoded(recorded, do_sample=False)
        yield self.row(target, name, "recorded, transformers", found, expected, self.graphs(recorded))
        if name == "ngram":  # lookups draw no tokens, so there is no noise to share
            return
        coupling = Coupling.shared(3)
        eager = SpeculativeDecoder(target, drafter, tree, coupling, buckets=None)
        recorded = SpeculativeDecoder(target, drafter, tree, coupling, buckets=(8, 32))
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seeds": [3, 4, 5]}
        eagerly, found = self.decoded(eager, **drawn), self.decoded(recorded, **drawn)
        if self.exact:  # in 16 bits, rounding moves scores, and 64-bit noise decides between them
            yield self.row(target, name, "recorded, eager, drawn", found, eagerly, self.graphs(recorded))

    def invariant(self) -> Iterator[DecoderRow | RowsRow]:
        """Compares recorded lookups and eager drafts of a head with eager plain decoding; yields the bits, too."""
        target = self.target(row_invariant=True)
        plain = SpeculativeDecoder(target, NoDrafter(), buckets=None)
        eagle = self.drafter("eagle", target)
        decoders = {
            "ngram": SpeculativeDecoder(target, self.drafter("ngram", target), TreeTopology.chain(4), buckets=(8, 32)),
            "eagle": SpeculativeDecoder(target, eagle, TREE, Coupling.shared(3), buckets=None),
        }
        greedy: dict[str, Any] = {"do_sample": False}
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seeds": [3, 4, 5]}
        for check, options in (("plain, row-invariant", greedy), ("plain, row-invariant, drawn", drawn)):
            expected = self.decoded(plain, **options)
            for name, decoder in decoders.items():
                found = self.decoded(decoder, **options)
                row = self.row(target, name, check, found, expected, self.graphs(decoder))
                yield replace(row, explained=None, correct=found == expected)
        yield from self.bits(target)

    def decoded(self, decoder: SpeculativeDecoder, **options: Any) -> list[list[int]]:
        prompts: dict[str, Any] = left_padded(PROMPTS)
        output: Any = decoder.generate(
            **prompts,
            max_new_tokens=self.count,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
        return new_tokens(output.sequences, PROMPTS, output.stats.emitted)

    def graphs(self, decoder: SpeculativeDecoder) -> int | None:
        if not self.setting.on_gpu or decoder.static is None:
            return None
        return sum(recording.recorded for recording in decoder.static.recorder.recordings.values())

    def row(
        self,
        target: RaggedModel,
        drafter: str,
        check: str,
        found: list[list[int]],
        expected: list[list[int]],
        graphs: int | None = None,
    ) -> DecoderRow:
        same = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
            for one, other in zip(found, expected, strict=True)
        ]
        different = [sample for sample, count in enumerate(same) if count < len(expected[sample])]
        gaps = [self.gap(target, sample, same[sample], found, expected) for sample in different]
        right = not different or (not self.exact and all(gap <= bound for gap, bound in gaps))
        return DecoderRow(
            *(self.name, named(self.dtype), drafter, check, sum(map(len, expected)), sum(same)),
            gap=max((gap for gap, _ in gaps), default=None),
            explained=None if self.exact else min((bound for _, bound in gaps), default=None),
            graphs=graphs,
            correct=right and graphs != 0,
        )

    @torch.no_grad()
    def gap(
        self, target: RaggedModel, sample: int, place: int, found: list[list[int]], expected: list[list[int]]
    ) -> tuple[float, float]:
        """Returns the distance of the model's own logits of two tokens, and the distance that rounding explains."""
        text = torch.tensor([PROMPTS[sample] + expected[sample][:place]], device=target.device)
        logits: Tensor = target.model(text).logits[0, -1].float()
        gap = float((logits[expected[sample][place]] - logits[found[sample][place]]).abs())
        return gap, ROUNDINGS * torch.finfo(self.dtype).eps / 2 * float(logits.abs().max())

    @torch.no_grad()
    def bits(self, target: RaggedModel | None = None) -> Iterator[RowsRow]:
        """Compares the logits of the first row after a prompt with 0 to 63 later rows, which that row does not see."""
        target, text = target or self.target(), [*range(3, 3 + MOST_ROWS)]

        def first(rows: int) -> Tensor:
            cache = RaggedKVCache()
            handle = cache.open(len(PROMPTS[2]) + rows)
            target.prefill({handle: PROMPTS[2]}, cache)
            batch = cache.lay_out([handle], [range(rows)])
            return target(torch.tensor(text[:rows]), batch, cache)[0]

        alone = first(1)
        logits_by_rows = {rows: first(rows) for rows in range(1, MOST_ROWS + 1)}
        equal = [rows for rows, logits in logits_by_rows.items() if torch.equal(logits, alone)]
        worst = max(float((logits.float() - alone.float()).abs().max()) for logits in logits_by_rows.values())
        kernels, right = ("row-invariant", len(equal) == MOST_ROWS) if target.row_invariant else ("default", None)
        largest = worst / float(alone.float().abs().max())
        yield RowsRow(self.name, named(self.dtype), kernels, ranges(equal), largest, right)


def ranges(numbers: list[int]) -> str:
    """Formats ascending numbers as ranges.

    Examples:
        >>> ranges([1, 2, 3, 7])
        '1-3, 7'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def _llama(seed: int) -> "PreTrainedModel":
    return tiny_model(
        seed=seed, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=3,
    )  # fmt: skip


def _sizes() -> dict[str, Any]:
    return {
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 128},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }


def _qwen3(seed: int) -> "PreTrainedModel":
    from transformers import Qwen3Config

    return tiny_model(Qwen3Config(**_sizes()), seed=seed)


def _gemma2(seed: int) -> "PreTrainedModel":
    from transformers import Gemma2Config

    config = Gemma2Config(**_sizes(), sliding_window=16, query_pre_attn_scalar=32)
    config._attn_implementation = "eager"  # only eager attention bounds the scores
    return tiny_model(config, seed=seed)
