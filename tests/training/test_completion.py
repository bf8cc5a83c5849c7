"""Completers of texts: they sample the target's own law, keep the order and record hidden states."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from support.chats import chat_tokenizer
from support.models import EOS, PROMPTS, VOCAB, greedy_reference, next_logits, ragged, tiny

from arbordraft import RaggedModel
from arbordraft.training import completion
from arbordraft.training.completion import DecoderCompleter, Sampling, ServerCompleter
from arbordraft.training.features import FreshFeatures

MANY = [[3 + (7 * index + step) % 50 for step in range(1 + index % 6)] for index in range(11)]


def nothing(_: int) -> None:
    """Ignores progress."""


def with_defaults(**defaults: object) -> RaggedModel:
    """Builds a target with these defaults in its `generation_config`."""
    model = tiny()
    model.generation_config.update(**defaults)
    return RaggedModel(model, self_test=False, kernels="torch")


# -- the target in this process


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_tokens_do_not_depend_on_the_batch(temperature):
    sampling = Sampling(temperature, 12)
    found = [DecoderCompleter(ragged(), batch)(MANY, sampling, 5, nothing) for batch in (1, 4, 64)]
    assert found[0] == found[1] == found[2]
    if temperature > 0:
        assert DecoderCompleter(ragged())(MANY, sampling, 6, nothing) != found[0]


def test_greedy_completions_are_the_models_own():
    found = DecoderCompleter(ragged(), batch=2)(PROMPTS, Sampling(0.0, 20), 0, nothing)
    assert [completion.tokens for completion in found] == greedy_reference(tiny(), PROMPTS, max_new_tokens=20)
    assert all(completion.hidden is None for completion in found)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_tokens_follow_the_softmax(temperature):
    count = 3000
    found = DecoderCompleter(ragged(), batch=count)([[5, 9, 7]] * count, Sampling(temperature, 1), 0, nothing)
    drawn = torch.bincount(torch.tensor([completion.tokens[0] for completion in found]), minlength=VOCAB) / count
    law = (next_logits(ragged().model, [5, 9, 7]) / temperature).softmax(-1)
    distance = (drawn - law).abs().sum() / 2
    assert distance < 0.07  # a correct sampler gives about 0.05
    other = (next_logits(ragged().model, [5, 9, 7]) / (1.5 - temperature)).softmax(-1)
    assert (drawn - other).abs().sum() / 2 > 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_models_own_sampling_defaults_are_ignored(temperature):
    leaking = {"do_sample": True, "temperature": 0.2, "top_p": 0.3, "top_k": 2, "min_p": 0.4, "typical_p": 0.5}
    leaking |= {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "bad_words_ids": [[7]], "suppress_tokens": [8]}
    leaking |= {"epsilon_cutoff": 0.2, "min_new_tokens": 9, "max_length": 4, "num_beams": 3, "forced_eos_token_id": 4}
    target, sampling = with_defaults(**leaking), Sampling(temperature, 20)
    assert target.model.generation_config.repetition_penalty == 3.0
    expected = DecoderCompleter(ragged())(PROMPTS, sampling, 3, nothing)
    assert DecoderCompleter(target)(PROMPTS, sampling, 3, nothing) == expected
    assert target.model.generation_config.repetition_penalty == 3.0


def test_any_of_several_stop_tokens_ends_a_text():
    (whole,) = greedy_reference(tiny(), PROMPTS[:1], max_new_tokens=8, eos_token_id=None)
    for position, token in enumerate(whole[:3]):
        target = with_defaults(eos_token_id=[60, token])
        for most in (8, position + 1):  # the last position may hold it, too
            (found,) = DecoderCompleter(target)(PROMPTS[:1], Sampling(0.0, most), 0, nothing)
            assert found == (whole[: whole.index(token) + 1], True, None)
    (found,) = DecoderCompleter(with_defaults(eos_token_id=[60]))(PROMPTS[:1], Sampling(0.0, 3), 0, nothing)
    assert found == (whole[:3], False, None)


def test_a_target_without_a_stop_token_is_an_error():
    with pytest.raises(ValueError, match=r"set model.generation_config.eos_token_id"):
        DecoderCompleter(with_defaults(eos_token_id=None))


def test_progress_counts_all_tokens():
    told: list[int] = []
    found = DecoderCompleter(ragged(), batch=4)(MANY, Sampling(1.0, 9), 0, told.append)
    assert len(told) == 3
    assert sum(told) == sum(len(completion.tokens) for completion in found)


def test_no_texts_give_no_completions():
    assert DecoderCompleter(ragged())([], Sampling(1.0, 9), 0, nothing) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_recorded_hidden_states_are_those_of_a_fresh_forward(architecture):
    target = ragged(architecture)
    fresh = FreshFeatures(target, (0, 1))
    found = DecoderCompleter(target, 3, (0, 1, target.num_layers))(PROMPTS, Sampling(1.0, 10), 0, nothing)
    expected = fresh([prompt + done.tokens for prompt, done in zip(PROMPTS, found, strict=True)])
    for prompt, done, features in zip(PROMPTS, found, expected, strict=True):
        assert done.hidden.shape == (len(prompt) + len(done.tokens) - 1, 3 * 32)
        wanted = torch.cat([features.inputs, features.final], dim=-1)
        torch.testing.assert_close(done.hidden, wanted, rtol=1e-4, atol=1e-5)
        shifted = done.hidden.roll(1, dims=0)  # a shift by one position must be detected
        assert not torch.allclose(shifted, wanted, rtol=1e-2, atol=1e-2)


# -- a server


class Server:
    """Answers like a server whose model spells the prompt's tokens backwards."""

    def __init__(self, tokenizer, *, statuses=(), ids=False, form=None) -> None:
        self.tokenizer, self.statuses, self.ids, self.form = tokenizer, list(statuses), ids, form
        self.requests: list[dict] = []

    def __call__(self, path: str, request: dict) -> tuple[int, object]:
        self.requests.append(request)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return status, {"error": {"message": "no such model"}}
        if self.form is not None:
            return 200, self.form
        assert path == "/v1/completions"
        prompt = request["prompt"]
        time.sleep(0.02 * (prompt[0] % 3))  # so that later requests overtake earlier ones
        tokens = prompt[::-1]
        cut, ended = tokens[: request["max_tokens"]], len(tokens) < request["max_tokens"]
        choice = {"text": self.tokenizer.decode(cut), "finish_reason": "stop" if ended else "length"}
        if self.ids:
            choice |= {"text": "?", "token_ids": [*cut, EOS] if ended else cut}
        return 200, {"choices": [choice]}


@contextmanager
def served(answer: Server):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(self.path, request)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(completion, "_PAUSE", 0.0)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_answers_come_in_order_with_their_stop_tokens(ids, spaced):
    prompts = [[8 + index, 9, 10, *range(11, 11 + index % 4)] for index in range(20)]
    answer = Server(chat_tokenizer(spaced=spaced), ids=ids)
    told: list[int] = []
    with served(answer) as url:
        complete = ServerCompleter(url + "/", "tiny", answer.tokenizer, parallel=7)
        found = complete(prompts, Sampling(0.7, 5), 40, told.append)
    for prompt, done in zip(prompts, found, strict=True):
        ended = len(prompt) < 5
        assert done == ((prompt[::-1] + [EOS] * ended)[:5], ended, None)
    assert told == [len(done.tokens) for done in found]
    assert sorted(request["seed"] for request in answer.requests) == list(range(40, 60))
    for request in answer.requests:
        assert prompts[request["seed"] - 40] == request["prompt"]
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.7, 5)
        assert (request["top_p"], request["top_k"], request["min_p"], request["repetition_penalty"]) == (1, -1, 0, 1)


def test_a_stop_token_that_the_server_names_is_kept():
    form = {"choices": [{"text": "ab", "finish_reason": "stop", "stop_reason": 1}]}
    with served(Server(chat_tokenizer(), form=form)) as url:
        (found,) = ServerCompleter(url, "tiny", chat_tokenizer())([[5]], Sampling(0.0, 9), 0, nothing)
    assert found == ([8, 9, 1], True, None)


def test_loops_in_a_servers_answer_are_cut_off():
    form = {"choices": [{"token_ids": [7, 8, 9] * 20, "text": "", "finish_reason": "length"}]}
    with served(Server(chat_tokenizer(), form=form)) as url:
        (found,) = ServerCompleter(url, "tiny", chat_tokenizer())([[5]], Sampling(0.0, 60), 0, nothing)
    assert found == ([7, 8, 9], False, None)


def test_text_that_becomes_more_tokens_than_allowed_has_not_ended():
    form = {"choices": [{"text": "abc", "finish_reason": "stop"}]}
    with served(Server(chat_tokenizer(), form=form)) as url:
        (found,) = ServerCompleter(url, "tiny", chat_tokenizer())([[5]], Sampling(0.0, 3), 0, nothing)
    assert found == ([8, 9, 10], False, None)


def test_requests_are_repeated_after_server_errors():
    answer = Server(chat_tokenizer(), statuses=[503, 200, 500, 502])
    with served(answer) as url:
        found = ServerCompleter(url, "tiny", answer.tokenizer, parallel=1)([[5], [6]], Sampling(0.0, 3), 0, nothing)
    assert [done.tokens for done in found] == [[5, EOS], [6, EOS]]
    assert len(answer.requests) == 5


@pytest.mark.parametrize(
    ("answer", "problem", "requests"),
    [
        ({"statuses": [404]}, "HTTP 404.*no such model", 1),
        ({"statuses": [500] * 3}, "HTTP 500", 3),
        ({"form": {"object": "list"}}, "KeyError: 'choices'", 1),
        ({"form": {"choices": []}}, "ValueError", 1),
        ({"form": b"<html>"}, "JSONDecodeError", 1),
        ({"form": [1]}, "TypeError", 1),
    ],
)
def test_unusable_answers_are_errors_that_say_how_to_go_on(answer, problem, requests):
    server = Server(chat_tokenizer(), **answer)
    with served(server) as url, pytest.raises(ConnectionError, match=problem) as error:
        ServerCompleter(url, "tiny", server.tokenizer, retries=2)([[5]], Sampling(0.0, 3), 0, nothing)
    assert url in str(error.value)
    assert "'tiny'" in str(error.value)
    assert "run the same command again" in str(error.value)
    assert len(server.requests) == requests


def test_an_error_names_a_server_that_does_not_answer():
    with served(Server(chat_tokenizer())) as url:
        pass
    for address in (url, "not a url"):
        with pytest.raises(ConnectionError, match=f"{address} does not answer"):
            ServerCompleter(address, "tiny", chat_tokenizer())([[5]], Sampling(0.0, 3), 0, nothing)


def test_an_error_drops_the_remaining_requests():
    server = Server(chat_tokenizer(), statuses=[400])
    with served(server) as url, pytest.raises(ConnectionError, match="HTTP 400"):
        ServerCompleter(url, "tiny", server.tokenizer, parallel=1)([[5]] * 500, Sampling(0.0, 3), 0, nothing)
    assert len(server.requests) < 100


def test_a_tokenizer_without_a_stop_token_is_an_error():
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"set tokenizer.eos_token"):
        ServerCompleter("http://localhost", "tiny", tokenizer)
