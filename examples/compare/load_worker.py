"""Puts load on servers with vLLM's own tool, `vllm bench serve`; `serving.py` runs this file with vLLM's Python.

Standard input and output carry JSON lines: `{"arguments": [...], "limit": seconds}` with the tool's arguments, answered
by the tool's results or by `{"error"}`. The tool stays loaded, as its start takes longer than many measurements.
"""

import argparse
import asyncio
import json
import os
import sys


def main() -> None:
    """Serves until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tool prints to standard output, too
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    print(json.dumps({}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            work = main_async(parser.parse_args(request["arguments"]))
            found = asyncio.run(asyncio.wait_for(work, request["limit"]))
        except TimeoutError:
            found = {"error": f"not done within {request['limit']} s"}
        except Exception as error:  # after any error, the other servers are measured
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found, default=str), file=replies, flush=True)


if __name__ == "__main__":
    main()
