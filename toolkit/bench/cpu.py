"""What the native kernels gain on a CPU, each figure paired with transformers in one run.

Ratios are speed-ups: the reference's time over ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from arbordraft import builders
from arbordraft.bench.decoding import Decode, answers, in_turns, theirs
from arbordraft.bench.measure import Measurement, paired, precision
from arbordraft.bench.model import forward_pair
from arbordraft.bench.workload import Tell, Workload, quiet
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, EarlyExitDrafter, HybridDrafter, NGramDrafter
from arbordraft.kernels.prepacked_linear.module import onednn_problem
from arbordraft.kernels.verify import row_max
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling

_REACH = {1: ">= 3.5", 8: ">= 3.0", 16: ">= 2.3"}


def forward_speed(target: RaggedModel, workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """Forwards with the kernels of the target against the model's own, and against reading the weights once."""
    model = target.model
    half = model.dtype == torch.bfloat16
    for new in (1, 8, 16) if half else (8,):
        yield _against_own(target, new, workload, tell, _REACH[new] if half else ">= 3.0")
    if target.backend != "onednn" and onednn_problem(model.dtype) is None:
        yield _against_own(RaggedModel(model, kernels="onednn"), 8, workload, tell)
    if not half:
        return
    size = sum(weight.numel() for weight in set(model.parameters())) * 2
    # Reads as many bytes once, with all threads.
    memory = torch.zeros(torch.get_num_threads(), size // 2 // torch.get_num_threads(), dtype=torch.bfloat16)
    case = f"bfloat16, 1 token, against reading {size / 1e6:.0f} MB of weights"
    forward, _ = forward_pair(target, [200], 1)
    row = paired("cpu forward", case, forward, lambda: row_max(memory), workload, tell, reach="<= 2.0")
    yield replace(row, detail=f"{size / row.reference / 1e6:.1f} GB/s")


def _against_own(
    target: RaggedModel, new: int, workload: Workload, tell: Tell, reach: str = "", shape: str = ""
) -> Measurement:
    case = f"{precision(target.model)}, {target.backend}, {shape}{new} tokens, context 200"
    pair = forward_pair(target, [200], new)
    return paired("cpu forward", case, *pair, workload, tell, reach=reach, speed_up=True)


def other_architectures(workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """Models of two other families with random weights: nothing was tuned for them."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

    shapes = {
        "Qwen3-0.6B": Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        "Gemma-3-1B": Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            sliding_window=512,
        ),
    }
    for name, config in shapes.items():
        tell(f"making {name}'s shape", 0, workload.repeats)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        yield _against_own(RaggedModel(model, kernels="auto"), 8, workload, tell, ">= 2.0", f"{name}'s shape, ")


def equality(
    target: RaggedModel, drafters: Mapping[str, Drafter], workloads: Sequence[Workload], tell: Tell = quiet
) -> Iterator[Measurement]:
    """Share of the tokens of speculative decoding that equal plain decoding's of the same seeds, prompt by prompt.

    The workloads hold the same prompts at the same temperature in batches of several sizes; trained drafters join
    lookups and the model's own first layers.
    """
    wide = replace(workloads[0], batch=16)
    reference = _tokens(target, builders.plain(target), wide, tell, "plain decoding")
    lookup = NGramDrafter(longest=8, shortest=1)
    early = EarlyExitDrafter(target, max(1, target.num_layers // 4))
    hybrid = HybridDrafter(NGramDrafter(longest=8, shortest=3), early)
    shapes = {
        "n-gram chain": (lookup, (1,) * 6),
        "n-gram tree": (lookup, (3, 2, 1)),
        "n-gram hybrid": (hybrid, (2, 1)),
    } | {f"{name}, chain of 4": (drafter, (1,) * 4) for name, drafter in drafters.items()}
    decoders = {
        name: SpeculativeDecoder(target, drafter, TreeTopology.from_k_config(shape), Coupling.shared(max(shape)))
        for name, (drafter, shape) in shapes.items()
    }
    for name, drafter in drafters.items():
        decoders[f"{name}, tree of 16"] = builders.fitted(target, drafter)
        decoders[f"lookup, else {name}, tree of 16"] = builders.fitted(target, drafter, lookup=True)
    for name, decoder in decoders.items():
        promised = decoder.equality_report().equality
        for workload in workloads:
            found = _tokens(target, decoder, workload, tell, f"{name}, batch {workload.batch}")
            pairs = list(zip(found, reference, strict=True))
            total = sum(len(wanted) for _, wanted in pairs)
            equal = sum(_agreeing(tokens, wanted) for tokens, wanted in pairs)
            same = sum(tokens == wanted for tokens, wanted in pairs)
            yield Measurement(
                "cpu equality",
                f"{precision(target.model)}, temperature {workload.temperature:g}, {name}, batch {workload.batch}: "
                "share of plain tokens",
                equal,
                total,
                equal / total,
                ">= 1.0",
                f"{same} of {len(pairs)} answers equal; {promised}",
            )


def decode_speed(target: RaggedModel, workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """Greedy decoding, plain and with lookups where they pay, against ``generate``: milliseconds per token.

    At batch 1 the first four prompts are decoded one after the other, above it as many as fit into one batch.
    """
    decoders: dict[str, SpeculativeDecoder | Decode] = {
        "generate": theirs(target.model),
        "plain": builders.plain(target),
        "n-gram where it pays": builders.lookup(target),
    }
    reach = {1: ">= 5.0", 4: ">= 4.0", 8: ">= 3.5", 16: ">= 2.5"}
    for batch in (size for size in reach if size <= len(workload.prompts)):
        part = replace(workload, prompts=workload.prompts[: max(batch, 4)], batch=batch)
        generate, *rows = in_turns(target, decoders, part, tell)
        for row in rows:
            yield Measurement(
                "cpu decode",
                f"{row.dtype}, batch {batch}, {row.decoder}, {workload.new_tokens} new tokens",
                1e3 / row.tokens_per_second,
                1e3 / generate.tokens_per_second,
                row.speed_up,
                "" if row.decoder == "plain" else reach[batch],
                f"{row.tokens_per_second:.0f} against {generate.tokens_per_second:.0f} tokens/s, tau {row.tau:.2f}",
            )


def _tokens(
    target: RaggedModel, decoder: SpeculativeDecoder, workload: Workload, tell: Tell, what: str
) -> list[list[int]]:
    tokens: list[list[int]] = []
    batches = workload.batches(target)
    for done, inputs in enumerate(batches):
        tell(what, done, len(batches))
        seeds = workload.seeds(len(inputs["input_ids"]), len(tokens))
        output = decoder.generate(**inputs, **workload.request(), seeds=seeds, return_dict_in_generate=True)
        tokens += answers(output, inputs)
    return tokens


def _agreeing(tokens: list[int], wanted: list[int]) -> int:
    """Tokens up to the first difference."""
    shorter = min(len(tokens), len(wanted))
    return next((i for i in range(shorter) if tokens[i] != wanted[i]), shorter)
