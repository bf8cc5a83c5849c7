"""Answers decoding requests with a peer; `peers.py` runs this file with the Python that the peer is installed in.

Standard input and output carry JSON lines. First come the arguments of the peer's `load`, answered by `{"seconds"}`
once it is up. Then come requests `{"prompts": [[token ids], ...], "max_tokens": n, "temperature": t}`, answered by
`{"seconds", "tokens", "counters"}`. All output of the peer goes to standard error. This file imports only the standard
library and the peer.
"""

import json
import os
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    """Serves until standard input ends."""
    # Peers and their processes print to file descriptor 1: give them standard error there, and keep the pipe.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    settings = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    generate = import_module(sys.argv[1]).load(settings)
    reply({"seconds": time.perf_counter() - start})
    for line in sys.stdin:
        request = json.loads(line)
        # After a second of rest vLLM's processes have to be woken, and may notice a request five seconds late.
        generate(request["prompts"][:1], 1, 0.0)
        start = time.perf_counter()
        tokens, counters = generate(request["prompts"], request["max_tokens"], request["temperature"])
        reply({"seconds": time.perf_counter() - start, "tokens": tokens, "counters": counters})


if __name__ == "__main__":  # vLLM starts its own processes by importing this file again
    main()
