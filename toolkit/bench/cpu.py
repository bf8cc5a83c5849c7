"""What packed kernels gain on a CPU, each figure paired with transformers in one run.

Ratios are speed-ups: the reference's time over ours.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from arbordraft import builders
from arbordraft.bench.measure import Measurement, Tell, milliseconds, paired, precision, quiet
from arbordraft.bench.model import forward_pair
from arbordraft.coupling import Coupling
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import EarlyExitDrafter, HybridDrafter, NGramDrafter
from arbordraft.kernels import native
from arbordraft.kernels.packed_linear.module import onednn_problem
from arbordraft.kernels.verify import row_max
from arbordraft.prompts import chat_batch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REACH = {1: ">= 3.5", 8: ">= 3.0", 16: ">= 2.3"}
# Two architectures that nothing was tuned for, with random weights.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-1B": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
}


def forward_speed(model: "PreTrainedModel", repeats: int = 7, tell: Tell = quiet) -> Iterator[Measurement]:
    """Packed forwards against the model's own, and against reading the weights once."""
    target, half = RaggedModel(model, kernels="auto"), model.dtype == torch.bfloat16
    for new in (1, 8, 16) if half else (8,):
        yield _against_own(target, new, _REACH[new] if half else ">= 3.0", repeats, tell)
    if target.backend != "onednn" and onednn_problem(model.dtype) is None:
        yield _against_own(RaggedModel(model, kernels="onednn"), 8, "", repeats, tell)
    if not half:
        return
    size = sum(weight.numel() for weight in set(model.parameters())) * 2
    case = f"bfloat16, 1 token, against reading {size / 1e6:.0f} MB of weights"
    ours, reference, ratio = paired(forward_pair(target, [200], 1)[0], _reading(size), repeats, tell, case)
    yield Measurement("cpu forward", case, ours, reference, ratio, "<= 2.0", f"{size / reference / 1e6:.1f} GB/s")


def _against_own(target: RaggedModel, new: int, reach: str, repeats: int, tell: Tell) -> Measurement:
    case = f"{precision(target.model)}, {target.backend}, {new} tokens, context 200"
    ours, reference, ratio = paired(*forward_pair(target, [200], new), repeats, tell, case)
    return Measurement("cpu forward", case, ours, reference, 1 / ratio, reach)


def int8_speed(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    repeats: int = 7,
    tell: Tell = quiet,
) -> Iterator[Measurement]:
    """8-bit against 16-bit weights: time of a forward, and what it does to the predictions on real text."""
    if not native.load():
        return
    wide, narrow = (RaggedModel(model, kernels="native", int8=int8) for int8 in (False, True))
    divergence, agreement = _int8_loss(wide, narrow, tokenizer, prompts)
    for new in (1, 8):
        case = f"int8 against {precision(model)} weights, {new} tokens"
        pair = forward_pair(narrow, [200], new)[0], forward_pair(wide, [200], new)[0]
        ours, reference, ratio = paired(*pair, repeats, tell, case)
        detail = f"KL {divergence:.4f} nats per token, {agreement:.1%} of the most probable tokens equal"
        yield Measurement("cpu int8", case, ours, reference, 1 / ratio, "", detail)


def other_architectures(repeats: int = 7, tell: Tell = quiet) -> Iterator[Measurement]:
    """Models of other families with random weights: nothing was tuned for them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, (family, sizes) in _SHAPES.items():
        tell(f"making {name}'s shape", 0, repeats)
        config = AutoConfig.for_model(family, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        target = RaggedModel(model, kernels="auto")
        case = f"bfloat16, {target.backend}, {name}'s shape, 8 tokens"
        ours, reference, ratio = paired(*forward_pair(target, [200], 8), repeats, tell, case)
        yield Measurement("cpu forward", case, ours, reference, 1 / ratio, ">= 2.0")


def equality(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    new_tokens: int = 128,
    batches: Sequence[int] = (1, 8),
    tell: Tell = quiet,
) -> Iterator[Measurement]:
    """Share of the greedy tokens of speculative decoding that equal plain decoding's, prompt by prompt."""
    target = RaggedModel(model, tokenizer, kernels="auto")
    reference = _tokens(builders.plain(target), tokenizer, prompts, 16, new_tokens, tell, "plain decoding")
    lookup = NGramDrafter(longest=8, shortest=1)
    early = EarlyExitDrafter(target, max(1, target.num_layers // 4))
    hybrid = HybridDrafter(NGramDrafter(longest=8, shortest=3), early)
    for name, drafter, shape in (
        ("n-gram chain", lookup, (1,) * 6),
        ("n-gram tree", lookup, (3, 2, 1)),
        ("n-gram hybrid", hybrid, (2, 1)),
    ):
        coupling = Coupling.matching(max(shape))
        decoder = SpeculativeDecoder(target, drafter, TreeTopology.from_k_config(shape), coupling)
        level = decoder.exactness_report().level
        for batch in batches:
            found = _tokens(decoder, tokenizer, prompts, batch, new_tokens, tell, f"{name}, batch {batch}")
            pairs = list(zip(found, reference, strict=True))
            total = sum(len(wanted) for _, wanted in pairs)
            equal = sum(_agreeing(tokens, wanted) for tokens, wanted in pairs)
            same = sum(tokens == wanted for tokens, wanted in pairs)
            yield Measurement(
                "cpu equality",
                f"{precision(model)}, {name}, batch {batch}: share of plain tokens",
                equal,
                total,
                equal / total,
                ">= 1.0",
                f"{same} of {len(prompts)} answers equal; {level}",
            )


def decode_speed(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    repeats: int = 3,
    new_tokens: int = 128,
    tell: Tell = quiet,
) -> Iterator[Measurement]:
    """Greedy decoding, plain and with lookups where they pay, against ``generate``; prefill included.

    At batch 1 the first four prompts are decoded one after the other, above it the first so many together.
    """
    target = RaggedModel(model, tokenizer, kernels="auto")
    decoders = {"plain": builders.plain(target), "n-gram where it pays": builders.lookup(target)}
    reach = {1: ">= 5.0", 4: ">= 4.0", 8: ">= 3.5", 16: ">= 2.5"}
    for batch in (size for size in reach if size <= len(prompts)):
        groups = [[prompt] for prompt in prompts[:4]] if batch == 1 else [list(prompts[:batch])]
        settings = {"max_new_tokens": new_tokens, "do_sample": False}
        requests: list[dict[str, Any]] = [{**chat_batch(tokenizer, group), **settings} for group in groups]
        rounds = []
        for done in range(repeats + 1):  # the first one warms up
            tell(f"batch {batch}", done, repeats + 1)
            rounds.append([milliseconds(_decoding(each, requests)) for each in (model, *decoders.values())])
        theirs = sum(_emitted(model, request) for request in requests)
        for index, (name, decoder) in enumerate(decoders.items(), 1):
            outputs: list[Any] = [decoder.generate(**request, return_dict_in_generate=True) for request in requests]
            emitted = sum(sum(output.stats.emitted) for output in outputs)
            steps = sum(sum(output.stats.forwards) for output in outputs)
            ours, reference = (statistics.median(times[i] for times in rounds[1:]) for i in (index, 0))
            ratio = statistics.median(times[0] / times[index] for times in rounds[1:])
            speeds = f"{emitted / ours * 1e3:.0f} against {theirs / reference * 1e3:.0f} tokens/s"
            yield Measurement(
                "cpu decode",
                f"{precision(model)}, batch {batch}, {name}, {new_tokens} new tokens",
                ours,
                reference,
                ratio * emitted / theirs,
                reach[batch] if index > 1 else "",
                f"{speeds}, tau {emitted / steps:.2f}",
            )


def _decoding(decoder: Any, requests: Sequence[dict[str, Any]]) -> Callable[[], None]:
    def run() -> None:
        for request in requests:
            decoder.generate(**request)

    return run


def _emitted(model: "PreTrainedModel", request: dict[str, Any]) -> int:
    """Tokens that ``generate`` emits, each sample's end of sequence included and its padding not."""
    rows = model.generate(**request)[:, request["input_ids"].shape[1] :].tolist()  # type: ignore[operator]
    ends = model.generation_config.eos_token_id
    known = set(ends) if isinstance(ends, list) else {ends}
    return sum(next((i for i, token in enumerate(row, 1) if token in known), len(row)) for row in rows)


def _reading(size: int) -> Callable[[], None]:
    """Reads so many bytes once, with all threads."""
    memory = torch.zeros(torch.get_num_threads(), size // 2 // torch.get_num_threads(), dtype=torch.bfloat16)

    def read() -> None:
        row_max(memory)

    return read


def _tokens(
    decoder: SpeculativeDecoder,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    batch: int,
    new_tokens: int,
    tell: Tell,
    what: str,
) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        tell(what, start, len(prompts))
        inputs = chat_batch(tokenizer, prompts[start : start + batch])
        output: Any = decoder.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
        )
        columns = inputs["input_ids"].shape[1]
        found += [
            row[columns : columns + emitted].tolist()
            for row, emitted in zip(output.sequences, output.stats.emitted, strict=True)
        ]
    return found


def _agreeing(found: list[int], wanted: list[int]) -> int:
    """Tokens up to the first difference."""
    return next(
        (i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(wanted)),
    )


def _int8_loss(
    wide: RaggedModel, narrow: RaggedModel, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]
) -> tuple[float, float]:
    rows = []
    for prompt in prompts[:8]:
        ids = tokenizer(prompt)["input_ids"][:256]
        pair = []
        for target in (wide, narrow):
            cache = RaggedKVCache()
            batch = cache.plan([cache.open(len(ids))], [range(len(ids))])
            pair.append(target(torch.tensor(ids), batch, cache).float().log_softmax(dim=-1))
        divergence = (pair[0].exp() * (pair[0] - pair[1])).sum(dim=-1)
        rows.append(torch.stack([divergence, (pair[0].argmax(-1) == pair[1].argmax(-1)).float()]))
    means = torch.cat(rows, dim=1).mean(dim=1)
    return means[0].item(), means[1].item()
