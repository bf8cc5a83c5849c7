"""Answers a file of prompts on many machines with Ray Data: every actor holds an engine.

    python examples/ray_batch.py prompts.jsonl answers --actors 8 --gpus-per-actor 1 --temperature 0.8

Every line of the file is an object with a text ``prompt``. The folder ``answers`` gets these objects with ``answer``,
``finish_reason`` and ``error``, the reason for a missing answer. Both paths may be any that Ray Data reads and writes.
``RAY_ADDRESS`` names a cluster; without it Ray starts on this machine.

A row's seed is a digest of its prompt, of its ``id`` if it has one, and of ``--seed``. So its answer does not depend on
other rows, on the number of actors, or on the loss and replacement of an actor.
"""

import argparse
import hashlib
from typing import Any

import pyarrow as pa
import ray

import arbordraft as ad
from arbordraft.decoding.streams import Stream
from arbordraft.decoding.text import encode
from arbordraft.target.cache import CacheOverflow

SCHEMA = pa.schema({"answer": pa.string(), "finish_reason": pa.string(), "error": pa.string()})


class Answers:
    """An actor whose engine answers all rows of a batch, each as soon as the engine has room.

    Args:
        model: name or path of the target.
        drafter: name of the drafter.
        engine: options of the engine.
        request: options of every request; the seeds of all rows derive from its seed.
    """

    def __init__(self, model: str, drafter: str, engine: dict[str, int], request: dict[str, Any]) -> None:
        decoder = ad.load(model, drafter)
        self.engine, self.tokenizer = ad.Engine(decoder, **engine), decoder.target.tokenizer
        self.request = request

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Returns the rows with their answers."""
        streams = [self.ask(row) for row in rows.to_pylist()]
        answers = pa.Table.from_pylist([self.answer(stream) for stream in streams], SCHEMA)
        for name in SCHEMA.names:
            rows = rows.append_column(name, answers[name])
        return rows

    def ask(self, row: dict[str, Any]) -> Stream | Exception:
        """Submits a row; returns the stream of its answer, or the error that prevents one."""
        digest = hashlib.sha256(repr((self.request["seed"], row.get("id"), row["prompt"])).encode()).digest()
        try:
            prompt = encode(self.tokenizer, [{"role": "user", "content": row["prompt"]}], raw=False)
            own = {"prompt": prompt, "seed": int.from_bytes(digest[:8])}
            return self.engine.submit(ad.Request(**self.request | own))
        except (TypeError, ValueError, CacheOverflow) as error:
            return error

    def answer(self, stream: Stream | Exception) -> dict[str, str]:
        """Waits for an answer and returns its columns; meanwhile the engine steps for all rows."""
        if isinstance(stream, Exception):
            return {"error": str(stream)}
        try:
            (answer,) = stream.result()
        except FloatingPointError as error:
            return {"error": str(error)}
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return {"answer": text, "finish_reason": str(answer.finish_reason)}


def main() -> None:
    """Distributes the rows over the actors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="JSON lines; a file, or a folder of them")
    parser.add_argument("answers", help="folder for JSON lines")
    parser.add_argument("--model", default="smollm2", help="hub name, folder or GGUF file of a causal LM")
    parser.add_argument("--drafter", default="auto", help="as for arbordraft serve")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, help="by default the model's own, or 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-samples", type=int, default=16, help="answers that an actor decodes at a time")
    parser.add_argument("--max-tokens", type=int, help="tokens in an actor's cache; by default as the engine's")
    parser.add_argument("--batch", type=int, default=256, help="rows that an actor takes at a time")
    parser.add_argument("--actors", type=int, default=2, help="processes, each with the model in memory")
    parser.add_argument("--cpus-per-actor", type=float, default=1)
    parser.add_argument("--gpus-per-actor", type=float, default=0)
    given = parser.parse_args()
    rows = ray.data.read_json(given.prompts)
    columns = set(rows.columns() or ())
    if "prompt" not in columns or columns & set(SCHEMA.names):
        parser.error(f"{given.prompts} holds {sorted(columns)}: it needs prompt, and none of {SCHEMA.names}")
    answered = rows.repartition(target_num_rows_per_block=given.batch).map_batches(
        Answers,
        fn_constructor_args=[given.model, given.drafter],
        fn_constructor_kwargs={
            "engine": {"max_samples": given.max_samples, "max_cache_tokens": given.max_tokens},
            "request": {name: getattr(given, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")},
        },
        batch_size=given.batch,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=given.actors),
        num_cpus=given.cpus_per_actor,
        num_gpus=given.gpus_per_actor,
    )
    answered.write_json(given.answers)
    print(f"the answers are in {given.answers}")


if __name__ == "__main__":
    main()
