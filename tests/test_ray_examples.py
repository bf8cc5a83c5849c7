"""The examples for Ray: training, answering and serving with two processes on this machine, in one cluster."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import openai
import pyarrow as pa
import pytest
import ray
import torch
from ray import serve
from support.chats import chat_tokenizer
from support.models import tiny_checkpoint
from support.served import HELLO, free_port
from support.tiny_training import fit, same, save_config, save_world, stored

from arbordraft.training.fit import data_of

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
SHARE = 0.2  # processors per process in Ray's accounting, not their actual use
PATIENCE = 600  # seconds; on a busy machine, a start may take minutes
NUMBERS = pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.soak)])  # processes start slowly
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves a chat model that takes seconds for a long answer and has the shapes of row-invariant kernels."""
    folder = tmp_path_factory.mktemp("tiny-model")
    return str(tiny_checkpoint(folder, chat_tokenizer(), head_dim=16, num_hidden_layers=24))


@pytest.fixture(scope="module")
def cluster():
    """Starts Ray on this machine and yields its address."""
    with pytest.MonkeyPatch.context() as patch:
        for check in ("READY", "HEALTH"):  # otherwise a slow proxy is replaced by another slow one
            patch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", str(PATIENCE))
        patch.setenv("RAY_worker_niceness", "0")  # otherwise workers wait for all parallel tests
        patch.setenv("PYTHONPATH", str(HERE))  # for the workers
        context = ray.init(num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False)
        yield context.address_info["gcs_address"]
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def run_example(monkeypatch, capfd):
    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


# Training comes first: each of its workers requests a processor.


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


@NUMBERS
def test_actors_write_the_data_of_one_process(cluster, world, tmp_path, run_example, number):
    config = save_config(tmp_path / "config.yaml", world, data={"folder": str(tmp_path / "shared")})
    shown = run_example("ray_generate.py", "--actors", number, "--config", config)
    assert "3 shards are in" in shown
    own = save_config(tmp_path / "own.yaml", world, data={"folder": str(tmp_path / "own")})
    data_of(["--config", str(own)]).generate()
    assert same(stored(tmp_path / "shared"), stored(tmp_path / "own"))


@NUMBERS
def test_workers_train_and_go_on_after_a_failure(cluster, world, tmp_path, run_example, number):
    """The result is that of one process with the batches of all workers. Of two, one fails, which leaves no trace."""
    lost = {"class_path": "support.tiny_training.FailOnce", "init_args": {"mark": str(tmp_path / "mark")}}
    config = save_config(tmp_path / "config.yaml", world, trainer={"callbacks": [lost] if number > 1 else []})
    steps = 16 // number
    own = ["--workers", number, "--retries", 1, "--storage", tmp_path / "ray"]
    shown = run_example("ray_train.py", *own, "--config", config)
    assert f"{steps} steps, " in shown
    assert (tmp_path / "mark").exists() == (number > 1)
    expected, _ = fit(world, tmp_path / "alone", noise=0.0, accumulate_grad_batches=number)
    found = [torch.load(path, weights_only=True) for path in (tmp_path / "ray").rglob("checkpoint.ckpt")]
    (last,) = [checkpoint for checkpoint in found if checkpoint["global_step"] == steps]
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(last["state_dict"][name], tensor, rtol=0, atol=1e-6)


# Serving


def until(true):
    end = time.monotonic() + PATIENCE
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def replicas(app):
    """Returns the names of the actors that answer, once all are running."""
    found = serve.status().applications.get(app)
    if found is None or found.status != "RUNNING":
        return set()
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["name"].startswith(f"SERVE_REPLICA::{app}#")}


def client_of(url, *, key="secret", max_retries=0, timeout=PATIENCE, http_client=None):
    """Returns an OpenAI client, which keeps its connection open while its stream is read."""
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=max_retries, timeout=timeout, http_client=http_client
    )


def ask_of(client, **settings):
    return client.chat.completions.create(model="tiny", messages=HELLO, **settings)


def chat(url, *, key="secret", max_retries=0, timeout=PATIENCE, http_client=None, **settings):
    client = client_of(url, key=key, max_retries=max_retries, timeout=timeout, http_client=http_client)
    return ask_of(client, **settings)


@pytest.fixture(scope="module")
def served(cluster, folder, tmp_path_factory):
    """Starts two replicas as users do; yields their address and the process that ends with them."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "log"
    options = {"model": folder, "drafter": "ngram", "name": "tiny", "max-samples": 4, "max-tokens": 8000, "port": port}
    options |= {"min-replicas": 2, "max-replicas": 2, "cpus-per-replica": SHARE, "max-waiting": 8, "grace": PATIENCE}
    command = [sys.executable, EXAMPLES / "serve_ray.py", *(f"--{name}={value}" for name, value in options.items())]
    settings = {"RAY_ADDRESS": cluster, "ARBORDRAFT_API_KEY": "secret"}
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, command)), env={**os.environ, **settings}, stdout=output, stderr=output
        )
    try:
        assert until(lambda: "is ready at" in log.read_text() or process.poll() is not None), log.read_text()
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def single(served, folder):
    """Starts another application, whose only replica can be broken; yields its address and Ray's handle."""
    example = runpy.run_path(str(EXAMPLES / "serve_ray.py"), run_name="serve_ray")

    class Fragile(example["Replica"]):
        def fail(self):
            self.service.engine.decoder.stepper.step = lambda state: 1 / 0

    deployment = serve.deployment(
        serve.ingress()(Fragile), health_check_period_s=0.5, ray_actor_options={"num_cpus": SHARE}
    )
    settings = example["Settings"](model=folder, drafter="ngram", name="tiny", max_tokens=8000)
    handle = serve.run(deployment.bind(settings.model_dump(), None), name="single", route_prefix="/single")
    yield f"{served[0]}/single", handle
    serve.delete("single")


def test_answers_stream_through_ray(served):
    url, _ = served
    asked = {"seed": 3, "temperature": 1, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    chunks = list(chat(url, **asked, stream=True))
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == chat(url, **asked).choices[0].message.content


def test_errors_keep_their_shape(served):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(served[0], max_tokens=2048)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.soak
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_requests_of_a_client_that_leaves_are_cancelled(single, streaming):
    def cancelled():
        counted = httpx.get(f"{single[0]}/metrics", timeout=PATIENCE).text.splitlines()
        lines = [line for line in counted if 'requests_total{outcome="cancelled"}' in line]
        return sum(float(line.split()[-1]) for line in lines)

    before = cancelled()
    if streaming:
        stream = chat(single[0], stream=True, **LONG)
        next(stream)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            chat(single[0], timeout=0.3, **LONG)
    assert until(lambda: cancelled() == before + 1)


@pytest.mark.soak
def test_a_replica_whose_engine_only_fails_is_replaced(single):
    url, handle = single
    (broken,) = replicas("single")
    handle.fail.remote().result()
    for _ in range(3):
        with pytest.raises(openai.InternalServerError):
            chat(url, max_tokens=2)
    assert until(lambda: replicas("single") not in (set(), {broken}))
    assert chat(url, max_tokens=2, max_retries=5).choices


def test_a_wrong_key_is_refused(served):
    with pytest.raises(openai.AuthenticationError):
        chat(served[0], key="wrong")
    assert chat(served[0], max_tokens=2).choices


@pytest.mark.soak
def test_a_crowd_is_answered_or_told_to_retry(served):
    statuses = []
    counting = httpx.Client(
        event_hooks={"response": [lambda reply: statuses.append(reply.status_code)]}, timeout=PATIENCE
    )
    client = client_of(served[0], max_retries=20, http_client=counting)
    together = Barrier(40)  # otherwise the first answers end before the last request

    def ask(number):
        together.wait(PATIENCE)
        return ask_of(client, seed=number, **LONG | {"max_tokens": 400}).choices

    with ThreadPoolExecutor(40) as crowd:
        assert all(crowd.map(ask, range(40)))
    assert set(statuses) == {200, 503}


@pytest.mark.soak
@pytest.mark.usefixtures("kernels")
def test_no_request_is_lost_with_a_replica(served):
    """Retries give the same answer; OpenAI's client retries by itself, except for streams that have begun."""
    url, _ = served
    statuses, broken = [], []
    client = httpx.Client(
        event_hooks={"response": [lambda reply: statuses.append(reply.status_code)]}, timeout=PATIENCE
    )

    def ask(number):
        settings = {
            "seed": number,
            "temperature": number % 3 / 2,
            "max_tokens": 200,
            "extra_body": {"ignore_eos": True},
        }
        if number % 4:
            return chat(url, max_retries=8, http_client=client, **settings).choices[0].message.content
        while True:
            try:
                stream = chat(url, max_retries=8, http_client=client, stream=True, **settings)
                return "".join(chunk.choices[0].delta.content for chunk in stream)
            except (openai.APIError, httpx.TransportError) as error:
                broken.append(error)

    expected = [ask(number) for number in range(16)]
    assert len(set(expected)) > 8
    assert (set(statuses), broken) == ({200}, [])
    before = replicas("arbordraft")
    with ThreadPoolExecutor(8) as crowd:
        answers = [crowd.submit(ask, number) for number in range(16)]
        assert until(lambda: any(answer.done() for answer in answers))
        ray.kill(ray.get_actor(min(before), namespace="serve"))
        assert [answer.result(PATIENCE) for answer in answers] == expected
    assert broken or max(statuses) >= 500, "no request failed"
    assert until(lambda: len(replicas("arbordraft")) == 2 and replicas("arbordraft") != before)


def test_an_interrupt_lets_answers_end(served):
    url, process = served
    stream = chat(url, stream=True, **LONG | {"max_tokens": 800})
    chunks = [next(stream)]
    process.send_signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait(PATIENCE) == 0
    assert "arbordraft" not in serve.status().applications


@pytest.mark.usefixtures("kernels")
@NUMBERS
def test_actors_answer_like_one_engine(cluster, folder, tmp_path, monkeypatch, number):
    texts = ["hello", "hello", "who is it", *(f"number {number}" for number in range(6)), "a" * 2100]
    rows = [{"id": at, "prompt": text} for at, text in enumerate(texts)]
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"{prompts} {answers} --model={folder} --drafter=ngram --max-new-tokens=40 --temperature=1"
    command += f" --max-tokens=4000 --batch=2 --actors={number} --cpus-per-actor={SHARE}"
    monkeypatch.setattr(sys, "argv", ["ray_batch.py", *command.split()])
    example = runpy.run_path(str(EXAMPLES / "ray_batch.py"), run_name="__main__")
    lines = [line for file in answers.iterdir() for line in file.read_text().splitlines()]
    found = sorted(map(json.loads, lines), key=lambda row: row["id"])

    def alone(seed):
        request = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 1.0, "seed": seed}
        answer = example["Answers"](folder, "ngram", {"max_cache_tokens": 4000}, request)
        return answer(pa.Table.from_pylist(rows)).to_pylist()

    assert found == alone(0)
    assert found != alone(1)
    assert found[0]["answer"] != found[1]["answer"]  # their ids differ
    assert {row["finish_reason"] for row in found[:-1]} <= {"stop", "length"}
    assert (found[-1]["answer"], found[-1]["finish_reason"]) == (None, None)
    assert "positions" in found[-1]["error"]


def test_a_file_without_prompts_is_refused_at_once(cluster, tmp_path, run_example, capfd):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(SystemExit):
        run_example("ray_batch.py", path, tmp_path / "answers")
    assert "it needs prompt" in capfd.readouterr().err
