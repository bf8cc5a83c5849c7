"""Measures one packed forward of the model's own modules against the model's own forward."""

from collections.abc import Callable, Iterator

import torch

from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import BOTH, DtypesOption, JsonOption, ModelOption, RepeatsOption, SeedOption
from arbordraft.cli.program import run_script
from arbordraft.decoding.prompts import left_padded
from arbordraft.loading import load_target
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.hf_cache import cache_argument
from arbordraft.target.model import RaggedModel
from arbordraft.utils.choices import Kernels
from arborlab.pairs import paired


def forward_cost(
    target: RaggedModel, workload: Workload, on_progress: ProgressCallback = quiet
) -> Iterator[Measurement]:
    """Measures one packed forward against the model's own forward of the same tokens on its own cache.

    At batch 1 both do the same arithmetic. At batch 8 the contexts differ in length, and transformers pads them.
    """
    alone, ragged = [200], [32, 64, 96, 160, 256, 384, 640, 1024]  # the second: chats and documents
    for contexts, new in [(alone, 1), (alone, 8), (alone, 16), (alone, 32), (ragged, 1), (ragged, 8)]:
        batch = len(contexts)
        context = f"context {contexts[0]}" if batch == 1 else f"contexts {min(contexts)}-{max(contexts)}"
        case = f"{precision(target.model)}, batch {batch}, {new} tokens each, {context}"
        reach = "<= 1.10" if batch == 1 else "<= 0.80"
        yield paired("forward", case, *forward_pair(target, contexts, new), workload, on_progress, reach=reach)


def forward_pair(target: RaggedModel, contexts: list[int], new: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns the packed and the padded forward of ``new`` random tokens per sample; both leave caches unchanged."""
    from transformers import DynamicCache

    model, batch = target.model, len(contexts)
    prompts = [torch.randint(target.vocab_size, (length,)).tolist() for length in contexts]
    tokens = torch.randint(target.vocab_size, (batch, new))

    cache = RaggedKVCache()
    handles = [cache.open(length + new) for length in contexts]
    target.prefill(dict(zip(handles, prompts, strict=True)), cache)

    def packed() -> None:
        target(tokens.flatten(), cache.lay_out(handles, [range(new)] * batch), cache)
        cache.drop(handles)

    ids, mask = left_padded(prompts).values()
    past = DynamicCache(config=model.config)
    kept = {cache_argument(model): past}
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **kept)
    # Like generate(), drops a mask that masks nothing, which spares the model work.
    grown = None if batch == 1 else torch.cat([mask, torch.ones(batch, new, dtype=torch.long)], dim=1)
    next_positions = torch.tensor(contexts)[:, None] + torch.arange(new)

    def padded() -> None:
        with torch.no_grad():
            model(tokens, attention_mask=grown, position_ids=next_positions, **kept)
        past.crop(-new)

    return packed, padded


def main(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure one packed forward of the model's own modules against the model's own forward."""
    torch.manual_seed(seed)
    with Report(json, model=model, dtype=dtype, repeats=repeats, seed=seed) as report:
        for each in dtype:
            target, _ = load_target(model, each, Kernels.torch)
            report.take(forward_cost(target, Workload(repeats=repeats, seed=seed), report.on_progress))


if __name__ == "__main__":
    run_script(main)
