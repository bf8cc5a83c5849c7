"""Serves a model by several replicas with Ray Serve; every replica runs the app of ``arbordraft serve``.

    python examples/serve_ray.py --model smollm2 --min-replicas 1 --max-replicas 4
    python examples/serve_ray.py --model Qwen/Qwen3-0.6B --gpus-per-replica 1 --host 0.0.0.0

If ``ARBORDRAFT_API_KEY`` is set, clients must send it. ``RAY_ADDRESS`` names a cluster; without it Ray starts here. A
cluster that is configured by files takes ``import_path: serve_ray:application``, and these options as ``args``.

The number of replicas follows the number of requests. If a replica is lost, its requests fail with a status that
OpenAI's client retries. A retried request with a seed gets the same answer from another replica.
"""

import argparse
import os
import signal
from contextlib import suppress
from typing import get_args

import ray
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import HTTPOptions

import arbordraft as ad
from arbordraft.serving.app import build_app
from arbordraft.serving.service import Service

APP = "arbordraft"


class Settings(BaseModel):
    """Settings of the replicas and of their number."""

    model: str = Field("smollm2", description="hub name, folder or GGUF file of a causal LM")
    drafter: str = Field("auto", description="as for arbordraft serve")
    name: str = Field("", description="name of the model for clients; by default that of --model")
    max_samples: int = Field(16, ge=1, description="answers that a replica decodes at a time")
    max_tokens: int | None = Field(
        None, ge=1, description="tokens in the cache of a replica; by default as the engine's"
    )
    max_waiting: int = Field(256, ge=0, description="requests that may wait for a replica; more are refused with 503")
    min_replicas: int = Field(1, ge=1, description="replicas that are always there")
    max_replicas: int = Field(2, ge=1, description="replicas under load")
    cpus_per_replica: float = Field(1, ge=0, description="processors, and as many threads")
    gpus_per_replica: float = Field(0, ge=0)
    grace: float = Field(30, ge=0, description="seconds for running answers to end when a replica ends")


class Replica:
    """One engine and its endpoints; Ray calls the methods."""

    def __init__(self, settings: dict[str, object], api_key: str | None) -> None:
        chosen = Settings.model_validate(settings)
        decoder = ad.load(chosen.model, chosen.drafter)
        engine = ad.Engine(decoder, max_cache_tokens=chosen.max_tokens, max_samples=chosen.max_samples)
        self.service, self.api_key = Service(engine, chosen.name or chosen.model), api_key

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app, which starts and ends the engine's thread."""
        return build_app(self.service, api_key=self.api_key)

    def check_health(self) -> None:
        """Raises as long as the service cannot answer; after three times Ray starts another replica."""
        if problem := self.service.problem:
            raise RuntimeError(problem)


def application(settings: Settings) -> serve.Application:
    """Builds the replicas, with limits of their number and of running and queued requests."""
    deployment = serve.deployment(
        serve.ingress()(Replica),
        # Twice as many as are decoded at a time, so that no place stays free between two answers.
        max_ongoing_requests=2 * settings.max_samples,
        max_queued_requests=settings.max_waiting,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.max_samples,
        },
        graceful_shutdown_timeout_s=settings.grace,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": settings.cpus_per_replica, "num_gpus": settings.gpus_per_replica},
    )
    return deployment.bind(settings.model_dump(), os.environ.get("ARBORDRAFT_API_KEY"))


def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, field in Settings.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        kind = next(iter(get_args(field.annotation)), field.annotation)  # int of int | None
        parser.add_argument(option, type=kind, default=field.default, help=field.description)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 is open to the network")
    parser.add_argument("--port", type=int, default=8000)
    options = vars(parser.parse_args())
    http = HTTPOptions(host=options.pop("host"), port=options.pop("port"))
    replicas = application(Settings(**options))
    ray.init()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler would leave the replicas running
    try:
        serve.start(http_options=http)
    except TimeoutError:  # Ray waits a minute for its proxies; on a busy machine they come later, and this finds them
        serve.start(http_options=http)
    with suppress(KeyboardInterrupt):
        serve.run(replicas, name=APP, blocking=True)
    serve.delete(APP)  # lets running answers end, and leaves other applications of the cluster alone


if __name__ == "__main__":
    main()
