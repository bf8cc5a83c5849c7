"""``arbordraft generate``: options reach the decoder; the output suits JSON readers, pipes and terminals."""

import io
import json
import re

import pytest
import torch
from rich.console import Console
from support.models import tiny_checkpoint, tiny_tokenizer
from support.spellers import speller, speller_tokenizer
from typer.testing import CliRunner

import arbordraft as ad
from arbordraft.cli import main as cli
from arbordraft.cli.display import AnswerStreamer, show_answers, verdict
from arbordraft.decoding.detokenizing import IncrementalDetokenizer
from arbordraft.decoding.metrics import DecodeStats

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    template = "{% for message in messages %}{{ message.content }}x{% endfor %}"
    tokenizer = tiny_tokenizer(eos_token="c", chat_template=template)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer))


@pytest.fixture(scope="module")
def decoder(folder):
    return ad.load(folder, "none", dtype="float32", kernels="torch", device="cpu")


def generate(folder, *arguments):
    command = ["generate", *arguments, "--model", folder, "--max-new-tokens", str(TOKENS), "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, [*command, "--drafter", "none", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return result.stdout


def answers(folder, *arguments):
    return [answer["text"] for answer in json.loads(generate(folder, *arguments, "--json"))["answers"]]


def test_json_holds_the_answers_and_counts(folder, decoder):
    found = json.loads(generate(folder, "abc", "[/b]", "--raw", "--json"))
    assert [answer["text"] for answer in found["answers"]] == decoder.complete(
        ["abc", "[/b]"], max_new_tokens=TOKENS, raw=True
    )
    assert [answer["prompt"] for answer in found["answers"]] == ["abc", "[/b]"]
    assert found["tau"] == 1
    assert found["drafted"] == 0
    assert found["tokens_per_second"] > 0
    assert found["verdict"] is None


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], {}),
        (["--temperature", "2", "--seed", "7"], {"temperature": 2.0, "seed": 7}),
        (["--temperature", "2", "--seed", "7", "--top-k", "2"], {"temperature": 2.0, "seed": 7, "top_k": 2}),
        (["--temperature", "2", "--seed", "7", "--top-p", ".3"], {"temperature": 2.0, "seed": 7, "top_p": 0.3}),
        (["--system", "xyz"], {"system": "xyz"}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_options_reach_the_decoder(folder, decoder, arguments, settings):
    expected = decoder.complete("abc", max_new_tokens=TOKENS, **settings)
    assert answers(folder, "abc", *arguments) == [expected]
    less = dict(list(settings.items())[:-1])
    assert not settings or decoder.complete("abc", max_new_tokens=TOKENS, **less) != expected, (
        "the last option changes nothing"
    )


def test_answers_follow_a_schema_or_regex(tmp_path):
    speller().model.save_pretrained(tmp_path)
    speller_tokenizer().save_pretrained(tmp_path)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert answers(str(tmp_path), "abc", "--raw", "--json-schema", str(schema))[0] in ('"yes"', '"no"')
    assert re.fullmatch("[ab]{3}", answers(str(tmp_path), "abc", "--raw", "--regex", "[ab]{3}")[0])


def test_answers_end_before_a_stop(folder, decoder):
    whole = decoder.complete("abc", max_new_tokens=TOKENS, raw=True)
    stop = whole[4:6]
    (found,) = answers(folder, "abc", "--raw", "--stop", "no such text", "--stop", stop)
    assert found == whole[: whole.index(stop)]
    assert stop not in generate(folder, "abc", "--raw", "--stop", stop).partition("output law")[0]


def test_int8_weights_without_kernels_are_refused(folder, monkeypatch):
    monkeypatch.setattr("arbordraft.kernels.native.problem", lambda: "no compiler here")
    result = CliRunner().invoke(cli.app, ["generate", "a", "--raw", "--model", folder, "--weights", "int8"])
    assert isinstance(result.exception, ValueError)
    assert "int8" in str(result.exception)


class Pipe(io.StringIO):
    """Records its contents at every flush."""

    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        self.flushed.append(self.getvalue())


def test_work_before_the_first_tokens_is_reported(folder, caplog):
    caplog.set_level("INFO", "arbordraft")
    generate(folder, "abc", "--raw", "--kernels", "torch")
    lines = [record.getMessage() for record in caplog.records]
    begun = [line.removesuffix(" ...") for line in lines if line.endswith(" ...")]
    assert [*dict.fromkeys(begun)] == [  # the package's first name may be imported here, too
        "importing torch and transformers",
        f"loading {folder}",
        f"reading {folder}",
        "preparing the model",
        "comparing packed logits with the model's own",
        "preparing the drafter none",
        "reading the prompts",
    ]
    assert len([line for line in lines if re.search(r": \d+\.\d s$", line)]) == len(begun)


def test_the_first_piece_ends_the_reading_of_prompts():
    seen, tokenizer = [], tiny_tokenizer()
    streamer = AnswerStreamer(IncrementalDetokenizer(tokenizer), show=seen.append, begun=lambda: seen.append("begun"))
    streamer.put(torch.tensor([1, 2, 3]))
    assert seen == []
    for token in tokenizer("xy")["input_ids"]:
        streamer.put(torch.tensor([token]))
    assert seen == ["begun", "x", "y"]


def test_answers_stream_into_a_pipe():
    """Every piece is written as soon as it is certain, not at the end."""
    pipe, tokenizer = Pipe(), tiny_tokenizer()
    streamers = [AnswerStreamer(IncrementalDetokenizer(tokenizer)) for _ in range(2)]
    with show_answers(Console(file=pipe), ["first", "second"], streamers):
        for streamer in streamers:
            streamer.put(torch.tensor([1, 2, 3]))
        for token in tokenizer("xyz")["input_ids"]:
            streamers[0].put(torch.tensor([token]))
            streamers[1].put(torch.tensor([token]))
        during = list(pipe.flushed)
        for streamer in streamers:
            streamer.end()
    assert during[-3:] == ["> first\nx", "> first\nxy", "> first\nxyz"]
    assert pipe.getvalue() == "> first\nxyz\n\n> second\nxyz\n\n"


@pytest.mark.parametrize(
    ("drafted", "draft", "said"), [(9, 14.2, "20.70 s instead of at most 13.00 s"), (9, 6.4, None), (0, 14.2, None)]
)
def test_drafting_slower_than_plain_decoding_is_reported(drafted, draft, said):
    """Plain decoding takes one forward per token, here at most twice as many forwards."""
    stats = DecodeStats("exact", [8, 20], [6, 10], drafted=drafted)
    stats.seconds = {"prefill": 3.0, "draft": draft, "target": 6.5}
    assert verdict(stats) is None if said is None else said in verdict(stats)
