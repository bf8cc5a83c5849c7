"""Answers decoding requests with vLLM; `vllm_cpu.py` runs this file with the Python that vLLM is installed in.

JSON lines on standard input and output: first the arguments of `vllm.LLM`, answered by `{"seconds"}` once the engine is
up, then requests `{"prompts": [[token ids], ...], "max_tokens": n}`, answered by `{"seconds", "tokens"}`, with
`"counters": true` in the request also by `{"counters"}`, what vLLM has counted of speculation so far. Everything that
vLLM prints goes to standard error. Nothing but the standard library and vLLM is imported here.
"""

import json
import os
import sys
import time
from typing import Any


def answers(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decodes greedily until an answer ends by itself or is long enough; only the call of vLLM is timed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    # After a second of rest vLLM's processes wait to be woken, and at times only notice a request five seconds later.
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    answer: dict[str, Any] = {"seconds": seconds, "tokens": [list(each.outputs[0].token_ids) for each in outputs]}
    if request.get("counters"):
        answer["counters"] = counters(llm)
    return answer


def counters(llm: Any) -> dict[str, Any]:
    """What vLLM has counted of speculation: numbers, or a list by position in the draft."""
    prefix = "vllm:spec_decode_"
    metrics = {each.name.removeprefix(prefix): each for each in llm.get_metrics() if each.name.startswith(prefix)}
    return {name: list(each.values) if hasattr(each, "values") else each.value for name, each in metrics.items()}


def main() -> None:
    """Serves until standard input ends."""
    # vLLM and its processes print to file descriptor 1: give them standard error there, and keep the pipe to ourselves.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    settings = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    import vllm

    llm = vllm.LLM(**settings)
    reply({"seconds": time.perf_counter() - start})
    for line in sys.stdin:
        reply(answers(llm, json.loads(line)))


if __name__ == "__main__":  # vLLM starts its own processes by importing this file again
    main()
