"""Measurements of what speculation costs and gains, each paired with its reference in one run.

Shapes: B samples, V vocabulary.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.cache import RaggedKVCache
from arbordraft.coupling import Coupling
from arbordraft.deciders import Backoff
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import NGramDrafter
from arbordraft.laws import Fixed, TopTail, WithoutReplacement
from arbordraft.prompts import REPEATING, VARIED
from arbordraft.sampling import Noise
from arbordraft.target import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree, SampleTree
from arbordraft.verifiers import Lifted, Matching, RecursiveRejection, SpecHub, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Measurement:
    """One comparison. Times are medians in milliseconds; the ratio is the median of the pairs' ratios.

    Args:
        group: which question it belongs to.
        case: what was varied.
        ours: time of arbordraft.
        reference: time of what it is compared with.
        ratio: ``ours / reference``, or for decoding the speed-up ``reference / ours``.
        reach: the bound that the project set itself, if any: ``"<= 1.10"``.
        detail: further figures.
    """

    group: str
    case: str
    ours: float
    reference: float
    ratio: float
    reach: str = ""
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the bound holds; ``None`` without one."""
        if not self.reach:
            return None
        relation, bound = self.reach.split()
        return self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)


def forward_cost(model: "PreTrainedModel", repeats: int = 7, context: int = 200) -> Iterator[Measurement]:
    """One packed forward against the model's own forward of the same tokens, on a cache of its own.

    At batch 1 both do the same arithmetic. At batch 8 the contexts have different lengths: transformers pads them.
    """
    from transformers import DynamicCache

    target = RaggedModel(model)
    dtype = str(model.dtype).removeprefix("torch.")
    vocab = target.vocab_size
    # A mixture of chats and documents.
    ragged = [32, 64, 96, 160, 256, 384, 640, 1024]
    cases = [([context], n) for n in (1, 8, 16, 32)] + [(ragged, n) for n in (1, 8)]
    for lengths, new in cases:
        batch, longest = len(lengths), max(lengths)
        ids = torch.randint(vocab, (batch, longest))
        mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model(ids, attention_mask=mask, position_ids=positions, past_key_values=past, logits_to_keep=1)
        tokens = torch.randint(vocab, (batch, new))
        full_mask = None if batch == 1 else torch.cat([mask, torch.ones(batch, new, dtype=torch.long)], dim=1)
        new_positions = torch.tensor(lengths)[:, None] + torch.arange(new)

        cache = RaggedKVCache()
        handles = [cache.open(length + new) for length in lengths]
        prompts = {h: row[longest - n :].tolist() for h, row, n in zip(handles, ids, lengths, strict=True)}
        target.prefill(prompts, cache)

        def padded(
            tokens: Tensor = tokens,
            mask: Tensor | None = full_mask,
            positions: Tensor = new_positions,
            past: Any = past,
            new: int = new,
        ) -> None:
            with torch.no_grad():
                model(tokens, attention_mask=mask, position_ids=positions, past_key_values=past)
            past.crop(-new)

        def packed(
            tokens: Tensor = tokens.flatten(), cache: RaggedKVCache = cache, handles: list[int] = handles, new: int = new
        ) -> None:
            target(tokens, cache.plan(handles, [range(new)] * len(handles)), cache)
            cache.drop(handles)

        ours, reference, ratio = _paired(packed, padded, repeats)
        contexts = f"context {context}" if batch == 1 else f"contexts {min(lengths)}-{longest}"
        case = f"{dtype}, batch {batch}, {new} tokens each, {contexts}"
        yield Measurement("forward", case, ours, reference, ratio, "<= 1.10" if batch == 1 else "<= 0.80")


def verify_cost(model: "PreTrainedModel", repeats: int = 7) -> Iterator[Measurement]:
    """Verification of a 16-node tree against the target's forward of its rows, and SpecHub against one softmax."""
    target = RaggedModel(model)
    dtype = str(model.dtype).removeprefix("torch.")
    topology = TreeTopology.from_k_config((3, 2, 1))
    generator = torch.Generator().manual_seed(0)
    cache = RaggedKVCache()
    handle = cache.open(300)
    target.prefill({handle: torch.randint(target.vocab_size, (200,), generator=generator).tolist()}, cache)

    def forward() -> None:
        target(torch.arange(topology.num_nodes), cache.plan([handle], [topology.depth_list]), cache)
        cache.drop([handle])

    for name, coupling in (
        ("top-down, without replacement", Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))),
        ("lifted, without replacement", Coupling(WithoutReplacement(3), Lifted(RecursiveRejection()))),
        ("top-down, matching", Coupling(Fixed(3), TopDown(Matching()))),
    ):
        tree, logits = random_tree(topology, coupling, target.vocab_size, generator)

        def verify(coupling: Coupling = coupling, tree: DraftTree = tree, logits: Tensor = logits) -> None:
            coupling(tree, logits.softmax(dim=-1), Noise.draw([generator], topology.num_nodes))

        ours, reference, ratio = _paired(verify, forward, repeats)
        case = f"{topology.num_nodes}-node tree, V={target.vocab_size}, {name}, softmax included, {dtype} forward"
        yield Measurement("verify", case, ours, reference, ratio, "<= 0.15")

    rule, law = SpecHub(), TopTail(1, 1)
    for vocab in (4096, 16384, 49152, 131072, 262144):
        logits = torch.randn(2, vocab, generator=generator) * 3
        p, q = logits.softmax(dim=-1)
        children = law.draw(q, torch.rand(1, generator=generator).tolist())

        def node(p: Tensor = p, q: Tensor = q, children: list[int] = children) -> None:
            for _ in range(20):
                rule(p, 1.0, q, children, law)

        def softmax(row: Tensor = logits[0]) -> None:
            for _ in range(20):
                row.softmax(dim=-1)

        ours, reference, ratio = _paired(node, softmax, repeats)
        case = f"SpecHub at one node, V={vocab}, against one softmax"
        detail = f"{ours / 20 / vocab * 1e6:.2f} ns per token of V"
        yield Measurement("verify", case, ours / 20, reference / 20, ratio, "<= 2.0" if vocab >= 16384 else "", detail)


def decode_speed(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", repeats: int = 3, new_tokens: int = 96
) -> Iterator[Measurement]:
    """Greedy decoding with the n-gram tree against plain ``generate`` at batch 8, on two kinds of prompts."""
    target = RaggedModel(model, tokenizer)
    decoder = ngram_tree(target)
    dtype = str(model.dtype).removeprefix("torch.")
    for name, prompts, reach in (("repeating", REPEATING, ">= 1.5"), ("varied", VARIED, ">= 0.9")):
        inputs = chat_batch(tokenizer, prompts)
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}

        def plain(inputs: Any = inputs, settings: Any = settings) -> None:
            model.generate(**inputs, **settings)

        def speculative(inputs: Any = inputs, settings: Any = settings) -> None:
            decoder.generate(**inputs, **settings)

        ours, reference, ratio = _paired(speculative, plain, repeats)
        stats: Any = decoder.generate(**inputs, **settings).stats  # type: ignore[union-attr]
        detail = (
            f"tau {stats.tau:.2f}, {sum(stats.emitted) / ours * 1e3:.0f} against "
            f"{sum(stats.emitted) / reference * 1e3:.0f} tokens/s"
        )
        case = f"{dtype}, batch {len(prompts)}, {name} prompts, {new_tokens} new tokens"
        yield Measurement("decode", case, ours, reference, 1 / ratio, reach, detail)


def ngram_tree(target: RaggedModel) -> SpeculativeDecoder:
    """The decoder of the demo: a lookup tree that rests while lookups fail."""
    return SpeculativeDecoder(
        target,
        NGramDrafter(),
        TreeTopology.from_k_config((2, 1, 1, 1)),
        Coupling(Fixed(2), TopDown(Matching())),
        Backoff(),
    )


def chat_batch(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]) -> dict[str, Tensor]:
    """A left-padded batch of single-turn chats, or of plain texts if the tokenizer has no chat template."""
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )  # type: ignore[misc]
            for prompt in prompts
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    found = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def random_tree(
    topology: TreeTopology, coupling: Coupling, vocab: int, generator: torch.Generator
) -> tuple[DraftTree, Tensor]:
    """A full tree drawn from random draft rows, and ``[N, V]`` target logits that resemble them."""
    logits = torch.randn(topology.num_nodes, vocab, generator=generator) * 3
    draft = (logits + torch.randn(logits.shape, generator=generator)).softmax(dim=-1)
    tokens, rows = {0: 0}, {}
    for node, children in enumerate(topology.child_list):
        if children:
            uniforms = torch.rand(len(children), generator=generator).tolist()
            drawn = coupling.law.narrow(len(children)).draw(draft[node], uniforms)
            tokens |= dict(zip(children, drawn, strict=True))
            rows[node] = draft[node]
    ordered = {node: tokens[node] for node in sorted(tokens)}
    return DraftTree((SampleTree(topology, coupling.law, ordered, rows),)), logits


def provenance() -> dict[str, Any]:
    """What a figure needs beside it to be read later."""
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    return {
        "argv": sys.argv,
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("arbordraft", "torch", "transformers", "scipy")},
    }


def save(path: Path, measurements: Sequence[Measurement], **settings: Any) -> None:
    """Writes measurements with their provenance as JSON; the file appears only when it is complete."""
    report = {
        "provenance": provenance(),
        "settings": settings,
        "measurements": [asdict(measurement) | {"reached": measurement.reached} for measurement in measurements],
    }
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)


def _paired(ours: Callable[[], None], reference: Callable[[], None], repeats: int) -> tuple[float, float, float]:
    """Medians of both in milliseconds, and the median ratio of neighbours: a drifting machine slows both."""
    ours(), reference()
    pairs = [(_milliseconds(ours), _milliseconds(reference)) for _ in range(repeats)]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def _milliseconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
