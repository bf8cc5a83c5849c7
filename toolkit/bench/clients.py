"""Clients of servers with OpenAI's protocol, as decoders of a workload: each asks again once it has its answer.

A request holds token ids, so that a server answers the very prompts that the library decodes.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from arbordraft.bench.decoding import Decode
from arbordraft.bench.workload import Workload
from arbordraft.decoding.metrics import DecodeStats

if TYPE_CHECKING:
    import httpx

# Fields of a request by argument of `generate`; servers have no fields for other arguments.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
_OF_LIBRARY = {"do_sample", "num_return_sequences"}  # arguments that `temperature` and `n` replace


def fields(workload: Workload) -> dict[str, Any]:
    """Returns the fields of a workload's requests, prompt and seed excepted.

    Raises:
        ValueError: if the protocol has no field for one of its settings.
    """
    settings = workload.request()
    wanted = {name: value for name, value in settings.items() if name not in _OF_LIBRARY and value is not False}
    if unknown := wanted.keys() - _FIELDS.keys():
        raise ValueError(f"OpenAI's protocol has no field for {', '.join(sorted(unknown))}")
    asked = {_FIELDS[name]: value for name, value in wanted.items()}
    if "min_tokens" in asked:  # of which answers of clients may have fewer
        asked["min_tokens"] = min(asked["min_tokens"], asked["max_tokens"])
    return asked if settings["do_sample"] else asked | {"temperature": 0.0}


class Clients:
    """Closed loops of clients, for as long as a ``with`` block runs; connections stay open between measurements.

    Raises:
        ImportError: if httpx is not installed.
    """

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError("clients need httpx; run: pip install 'arbordraft[serve]'") from error
        self._runner = asyncio.Runner()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def decode(self, url: str) -> Decode:
        """Returns a :data:`~arbordraft.bench.decoding.Decode` that asks a server, ``workload.batch`` clients at a time.

        Args:
            url: address of the server.

        Raises:
            httpx.HTTPError: if the server does not answer.
        """
        (model,) = self._runner.run(self._model(url))

        def decode(inputs: dict[str, Any], workload: Workload) -> DecodeStats:
            rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
            prompts = [ids[mask].tolist() for ids, mask in rows]
            own = zip(prompts, workload.seeds(len(prompts)), workload.lengths(len(prompts)), strict=True)
            bodies = [
                {"model": model["id"], "prompt": prompt, "seed": seed, **fields(replace(workload, new_tokens=most))}
                for prompt, seed, most in own
            ]
            usages = self._runner.run(self._answers(f"{url}/v1/completions", bodies, workload.batch))
            details = [usage["completion_tokens_details"] for usage in usages]
            return DecodeStats(
                model.get("exactness", "unknown"),
                emitted=[usage["completion_tokens"] for usage in usages],
                forwards=[each["target_forwards"] for each in details],
                drafted=sum(each["drafted_tokens"] for each in details),
            )

        return decode

    async def _model(self, url: str) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = (await self._http.get(f"{url}/v1/models")).raise_for_status().json()["data"]
        return models

    async def _answers(self, url: str, bodies: list[dict[str, Any]], clients: int) -> list[Mapping[str, Any]]:
        """Returns the usage of every answer, in the order of the requests."""
        usages: list[Mapping[str, Any]] = [{}] * len(bodies)
        waiting = iter(enumerate(bodies))

        async def ask() -> None:
            for number, body in waiting:
                answer: httpx.Response = await self._http.post(url, json=body)
                if answer.is_error:
                    raise ValueError(f"the server refused a request of the measurement: {answer.text}")
                usages[number] = answer.json()["usage"]

        await asyncio.gather(*(ask() for _ in range(clients)))
        return usages


__all__ = ["Clients", "fields"]
