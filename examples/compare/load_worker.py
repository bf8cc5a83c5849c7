"""Puts load on servers by vLLM's own tool, `vllm bench serve`; `serving.py` runs this file with vLLM's Python.

JSON lines on standard input and output: `{"arguments": [...], "limit": seconds}` with the tool's arguments, answered by
what the tool found, or by `{"error"}`. The tool is kept, as starting it takes longer than many a measurement.
"""

import argparse
import asyncio
import json
import os
import sys


def main() -> None:
    """Serves until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tool prints
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
        except Exception as error:  # whatever it is, the other servers are to be measured
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found, default=str), file=replies, flush=True)


if __name__ == "__main__":
    main()
