"""Checks that a drafter exported for vLLM gives the same answers and the same acceptance there as here.

vLLM's CPU build needs an environment of its own (see examples/compare/README.md); name its Python with --vllm-python.
All runs are in float32, so that greedy answers can be compared token for token. The check takes ten minutes.

Expect a small difference: we cut the last chain of an answer at the requested length, while vLLM verifies and counts
all of it.
"""

import argparse
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from arbordraft import Coupling, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.bench.decoding import answers
from arbordraft.bench.measure import save
from arbordraft.checkpoints.smollm2 import fetch_smollm2, load_smollm2
from arbordraft.decoding.prompts import MIXED, REPEATING, VARIED, chat_batch
from arbordraft.drafter_names import load_drafter
from arbordraft.exports.engines import export_vllm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "compare"))
from peers import Config, Peer, Tokens, find  # noqa: E402
from vllm_cpu import config as vllm_config  # noqa: E402

PROMPTS = [*VARIED, *MIXED, *REPEATING[:4]]  # 20
TOLERANCE = 0.05  # relative difference of mean acceptance lengths


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of chains in one engine.

    Args:
        case: name of the engine.
        length: mean acceptance length: accepted drafts per chain, plus the one token that every step gives.
        by_position: share of the chains whose draft at each position was accepted.
        chains: number of verified chains.
        equal: number of answers that equal those of vLLM without drafts.
        prompts: number of all answers.
    """

    case: str
    length: float
    by_position: list[float]
    chains: int
    equal: int
    prompts: int


def ours(drafter: Path, prompts: list[str], levels: int, new_tokens: int) -> tuple[Tokens, Tokens, Acceptance]:
    """Returns the prompts' tokens, our answers, and the acceptance of our drafts."""
    model, tokenizer = load_smollm2()
    target = RaggedModel(model, tokenizer)
    decoder = SpeculativeDecoder(target, load_drafter(drafter, target), TreeTopology.chain(levels), Coupling.matching())
    inputs = chat_batch(tokenizer, prompts)
    output: Any = decoder.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    tokens = [ids[mask == 1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    chains = sum(output.stats.forwards)
    rates = [output.stats.accepted[depth] / chains for depth in range(1, levels + 1)]
    return tokens, answers(output, inputs), Acceptance("arbordraft", 1 + sum(rates), rates, chains, 0, len(prompts))


def served(python: Path, config: Config, prompts: Tokens, new_tokens: int, logs: Path) -> tuple[Tokens, dict[str, Any]]:
    """Returns vLLM's answers and its counters."""
    with closing(Peer("vLLM", "vllm_cpu", python, config, logs / f"{config.name}.log")) as vllm:
        answer = vllm.generate(prompts, new_tokens)
        return answer.tokens, answer.counters


def main() -> int:
    """Exports, serves and compares; the exit status is 1 if answers or acceptance differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", type=Path, help="Python of the environment that vLLM is installed in")
    parser.add_argument("--drafter", type=Path, default=HERE / "checkpoints" / "smollm2-135m-instruct-eagle")
    parser.add_argument("--layouts", nargs="+", default=["eagle3", "speculators"])
    parser.add_argument("--method", default="eagle3", help="vLLM's name for the drafter: eagle3, medusa, draft_model")
    parser.add_argument("--levels", type=int, default=4, help="length of the chains")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="use only the first ones of the 20")
    parser.add_argument("--check", action="store_true", help="only say which vLLM would serve")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    version, line = find("vLLM", "vllm", arguments.vllm_python)
    console.print(line, soft_wrap=True)
    if arguments.check or version is None:
        return 0

    prompts = PROMPTS[: arguments.prompts]
    model = fetch_smollm2()
    console.print("decoding here")
    tokens, own, accepted = ours(arguments.drafter, prompts, arguments.levels, arguments.new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        console.print("vLLM without drafts: starting")
        alone = vllm_config("plain", model, "float32", counted=True)
        plain, _ = served(arguments.vllm_python, alone, tokens, arguments.new_tokens, folder)

        def equal(texts: Tokens) -> int:
            return sum(map(eq, texts, plain))

        rows = [replace(accepted, equal=equal(own))]
        for layout in arguments.layouts:
            drafter = folder / f"drafter{len(rows)}"  # vLLM guesses the kind of a drafter from its path
            export_vllm(
                arguments.drafter, drafter, layout=layout, target=str(model), speculative_tokens=arguments.levels
            )
            console.print(f"vLLM with the drafter in the layout {layout}: starting")
            settings = {"method": arguments.method, "model": str(drafter), "num_speculative_tokens": arguments.levels}
            # The speculators layout names its target itself: that folder alone is served.
            place, speculative = (drafter, None) if layout == "speculators" else (model, settings)
            config = vllm_config(layout, place, "float32", speculative, counted=True)
            texts, counted = served(arguments.vllm_python, config, tokens, arguments.new_tokens, folder)
            chains = counted["num_drafts"]
            rates = [count / chains for count in counted["num_accepted_tokens_per_pos"]]
            length = 1 + counted["num_accepted_tokens"] / chains
            rows.append(Acceptance(f"vLLM {version}, {layout}", length, rates, chains, equal(texts), len(prompts)))

    table = Table("", "mean acceptance length", "by position", "chains", "answers equal to plain vLLM's")
    for row in rows:
        rates = " ".join(f"{rate:.3f}" for rate in row.by_position)
        table.add_row(row.case, f"{row.length:.3f}", rates, str(row.chains), f"{row.equal} of {row.prompts}")
    console.print(table)
    differences = [row.length / rows[0].length - 1 for row in rows[1:]]
    agrees = all(abs(difference) <= TOLERANCE for difference in differences)
    same = all(row.equal == row.prompts for row in rows[1:])
    shown = ", ".join(f"{difference:+.1%}" for difference in differences)
    console.print(f"vLLM's mean acceptance length differs from ours by {shown}")
    console.print(f"its answers with and without the drafter are {'equal' if same else 'NOT equal'}")
    if arguments.json:
        settings = {"vllm": version, "dtype": "float32", "levels": arguments.levels, "new_tokens": arguments.new_tokens}
        save(arguments.json, rows, suite="serve vllm", model="smollm2", drafter=arguments.drafter.name, **settings)
    return 0 if agrees and same else 1


if __name__ == "__main__":
    sys.exit(main())
