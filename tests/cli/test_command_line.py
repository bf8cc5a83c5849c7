"""Bad command lines end in one line on stderr and a status: 2 for wrong input, 1 for any other error."""

import json
import os
import re
import shlex
import subprocess
import sys
import warnings

import pytest
from support.models import tiny_checkpoint
from typer.testing import CliRunner

from arbordraft.cli import bench
from arbordraft.cli import main as cli
from arbordraft.cli.failures import TRACEBACK
from arbordraft.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("no_hub")
PROMPT = json.dumps({"messages": [{"role": "user", "content": "a b"}]}) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a tiny model and files of every bad kind."""
    root = tmp_path_factory.mktemp("place")
    tiny_checkpoint(root / "model")
    (root / "folder").mkdir()
    (root / "file").write_text("a file")
    (root / "empty").write_text("")
    (root / "bytes").write_bytes(b"a\xff\xfeb\n")
    (root / "prompts.jsonl").write_text(PROMPT * 2)
    (root / "other.jsonl").write_text(PROMPT + '{"question": "x"}\n')
    (root / "turns.jsonl").write_text('{"turns": [3]}\n')
    (root / "list.json").write_text("[1]")
    return root


USAGE = {
    "no such command": ("nonsense", r"No such command 'nonsense'"),
    "no such bench": ("bench nonsense", r"No such command 'nonsense'.*see: arbordraft bench --help"),
    "no such option": ("generate a --nope", r"No such option: --nope"),
    "no prompt": ("generate", r"give at least one prompt, or --file"),
    "an empty prompt": ("generate '' --raw --model model", r"prompt 1 is empty"),
    "an empty prompt among others": ("generate a '' --raw --model model", r"prompt 2 is empty"),
    "an option without its value": ("generate a --model", r"--model.* requires an argument"),
    "tokens that are a word": ("generate a --max-new-tokens many", r"--max-new-tokens"),
    "tokens below zero": ("generate a --max-new-tokens -1", r"--max-new-tokens"),
    "temperature below zero": ("generate a --temperature -1", r"--temperature"),
    "temperature that is no number": ("generate a --temperature nan", r"--temperature"),
    "infinite temperature": ("generate a --temperature inf", r"--temperature.*not a finite number"),
    "top-p above one": ("generate a --top-p 2", r"--top-p"),
    "top-p that is no number": ("generate a --top-p nan", r"--top-p"),
    "confidence above one": ("generate a --confidence 2", r"--confidence"),
    "confidence below zero": ("generate a --confidence -1", r"--confidence"),
    "confidence that is no number": ("generate a --confidence nan", r"--confidence"),
    "seed that is a word": ("generate a --seed x", r"--seed"),
    "a system prompt without a template": ("generate a --raw --system b", r"--system is for the chat template"),
    "top-k below zero": ("generate a --top-k -1", r"--top-k"),
    "an empty stop": ("generate a --stop ''", r"stop must not hold an empty text"),
    "two forms": ("generate a --model model --json-schema list.json --regex a", r"one form"),
    "a device of no kind": ("generate a --model model --device gpu", r"no device of torch"),
    "a GPU that is not there": ("generate a --model model --device cuda:77", r"is not there: torch sees"),
    "a wrong origin, before the model": ("serve nowhere --port 0 --cors localhost:3000", r"write scheme://host:port"),
    "no such precision": ("generate a --dtype int3", r"--dtype"),
    "no such law": ("generate a --law nope", r"--law"),
    "no such verifier": ("generate a --verifier nope", r"--verifier"),
    "no such kernels": ("generate a --kernels nope", r"--kernels"),
    "no such tree": ("generate a --tree bush:3", r"unknown tree 'bush:3'; write chain:5"),
    "a tree without numbers": ("generate a --tree k:", r"tree 'k:'.*; write chain:5"),
    "prompts that are not there": ("generate --file nowhere", r"--file.*nowhere.*does not exist"),
    "prompts that are a folder": ("generate --file folder", r"--file.*folder.*is a directory"),
    "prompts that are no text": ("generate --file bytes", r"bytes is not UTF-8 text \(byte 1\); save it as UTF-8"),
    "prompts in an empty file": ("generate --file empty", r"give at least one prompt, or --file"),
    "tree of no kind": ("tree bush:3", r"unknown tree 'bush:3'; write chain:5"),
    "tree of a word": ("tree chain:x", r"tree 'chain:x'.*; write chain:5"),
    "tree without children": ("tree k:0", r"tree 'k:0'.*; write chain:5"),
    "tree upside down": ("tree parents:0,1", r"tree 'parents:0,1'.*; write chain:5"),
    "tree of rates above one": ("tree sequoia:0.9,0.9@4", r"tree 'sequoia:0.9,0.9@4'.*; write chain:5"),
    "tree without a shape": ("tree", r"Missing argument"),
    "drawing that is a folder": ("tree k:2,1 --png folder", r"folder is a folder, not a file; name another path"),
    "drawing below a file": ("tree k:2,1 --png file/x.png", r"file/x.png cannot be written: .*file is a file, not a"),
    "a chat of no tokens": ("chat --max-new-tokens 0", r"--max-new-tokens"),
    "a chat at a temperature that is no number": ("chat --temperature nan", r"--temperature"),
    "a chat of a seed below zero": ("chat --seed -1", r"--seed"),
    "a chat with a missing model": ("chat --model nowhere/at/all", r"nowhere/at/all"),
    "a chat with an exit after the last layer": ("chat --model model --drafter early-exit:99", r"99"),
    "a picture of a missing file": ("plot nowhere out.png", r"nowhere.*does not exist"),
    "a picture of other figures": ("plot list.json out.png", r"list.json holds no measurements"),
    "a picture of bytes": ("plot bytes out.png", r"bytes holds no measurements"),
    "a picture onto a folder": ("plot list.json folder", r"folder is a folder, not a file"),
    "a doctor of no model": ("doctor x", r"x holds no trained drafter and no model"),
    "a doctor of two models": ("doctor x y", r"unexpected extra argument"),
    "tuning an empty batch": ("tune --batches 0", r"expected finite numbers of at least 1, got 0"),
    "tuning batches of a word": ("tune --batches 1,x", r"expected comma-separated numbers, got '1,x'"),
    "tuning for too short answers": ("tune --new-tokens 1", r"--new-tokens"),
    "tuning with zero prompts": ("tune --limit 0", r"--limit"),
    "tuning into a folder": ("tune --output folder", r"folder is a folder, not a file"),
    "tuning below a file": ("tune --output file/t.json", r"file/t.json cannot be written"),
    "tuning costs into a folder": ("tune --costs folder", r"folder is a folder, not a file"),
    "tuning with prompts that are not there": ("tune --prompts nowhere", r"--prompts.*nowhere.*does not exist"),
    "tuning at a temperature that is no number": ("tune --temperature nan", r"--temperature"),
    "figures into a folder": ("bench compare --json folder", r"folder is a folder, not a file"),
    "figures below a file": ("bench equality --json file/x.json", r"file/x.json cannot be written"),
    "picture into a folder": ("bench policy --drafter ngram --png folder", r"folder is a folder, not a file"),
    "measuring zero repeats": ("bench compare --repeats 0", r"--repeats"),
    "measuring no tokens": ("bench equality --new-tokens 0", r"--new-tokens"),
    "measuring no batch": ("bench compare --batches 0", r"--batches.*at least 1, got 0"),
    "measuring batches of a word": ("bench equality --batches x", r"--batches.*comma-separated numbers"),
    "measuring empty batches": ("bench compare --batches=", r"--batches.*comma-separated numbers"),
    "measuring at a temperature that is no number": (
        "bench decode --temperatures nan --drafter ngram",
        r"--temperatures.*finite",
    ),
    "measuring at a negative temperature": (
        "bench decode --temperatures=-1 --drafter ngram",
        r"--temperatures.*at least 0",
    ),
    "decode without a drafter": ("bench decode", r"Missing option '--drafter'"),
    "verifiers without a drafter": ("bench verifiers", r"Missing option '--drafter'"),
    "verifiers with half a child": (
        "bench verifiers --drafter none --children 0.5",
        r"--children.*comma-separated numbers",
    ),
    "prompts without messages": ("bench equality --prompts other.jsonl", r"other\.jsonl:2 is not \{\"messages\""),
    "turns that are a number": ("bench equality --prompts turns.jsonl", r"turns\.jsonl:1 is not .*or \{\"turns\": \["),
    "prompts without a line": ("bench equality --prompts empty", r"empty holds no prompts"),
    "verifiers on one prompt": (
        "bench verifiers --drafter none --model model --limit 1 --new-tokens 2",
        r"give 2 or more",
    ),
    "prompts of bytes": ("bench compare --prompts bytes", r"bytes is not UTF-8 text"),
    "prompts of a folder": ("bench equality --prompts folder", r"--prompts.*folder.*is a directory"),
    "a seed below zero": ("bench equality --seed -1", r"--seed"),
    "a target that is not there": ("generate a --model nowhere/at/all", r"nowhere/at/all"),
    "a target that is a file": ("generate a --model file", r"file"),
    "a target that is an empty folder": ("generate a --model folder", r"folder"),
    "an exit that is a word": ("generate a --model model --drafter early-exit:x", r"early-exit:x|'x'"),
    "an exit after the last layer": ("generate a --model model --drafter early-exit:99", r"99"),
    "export onto a folder": ("export onnx model folder", r"folder exists: name another folder, or .*--force"),
    "export onto a file": ("export onnx model file --force", r"file is no folder; only folders are replaced"),
    "export below a file": ("export onnx model file/out", r"file/out cannot be written: .*file is a file"),
    "export of hidden layers that are words": ("export onnx model out --hidden 1,x", r"--hidden takes numbers"),
    "export with another opset": ("export onnx model out --opset 7", r"opset must be one of \(20, 23\), got 7"),
    "export with an acceptance above one": ("export onnx model out --least-acceptance 2", r"--least-acceptance"),
    "export at a tolerance that is no number": ("export onnx model out --tolerance nan", r"--tolerance"),
    "export at a negative tolerance": ("export onnx model out --tolerance -1", r"--tolerance"),
    "genai chains without tokens": ("export ort-genai model out --length 0", r"1 to 16 tokens, got 0"),
    "vLLM without a drafter": ("export vllm nowhere out", r"nowhere"),
    "vLLM chains without tokens": ("export vllm model out --speculative-tokens 0", r"--speculative-tokens"),
    "vLLM onto a file": ("export vllm model file --force --target model", r"file is no folder"),
    "SGLang of no drafter": ("export sglang folder out", r"folder"),
    "promoting by a margin that is no number": ("export promote x --margin nan", r"--margin"),
    "promoting in a folder": ("export promote x --uri sqlite:///folder", r"folder is a folder, not a file"),
    "promoting in a text file": (
        "export promote x --uri sqlite:///prompts.jsonl",
        r"prompts.jsonl is no database of MLflow",
    ),
    "promoting below a file": ("export promote x --uri sqlite:///file/m.db", r"file is a file, not a folder"),
    "promoting a missing model": (
        "export promote nosuch --uri sqlite:///:memory:",
        r"sqlite:///:memory: does not have it: Registered Model with name=nosuch not found",
    ),
    "fetching a missing model": (
        "export mlflow models:/nosuch@candidate --target model --uri sqlite:///:memory:",
        r"sqlite:///:memory: does not have it: Registered Model with name=nosuch not found",
    ),
    "mlflow of an empty batch": ("export mlflow ngram --batch 0", r"--batch"),
    "mlflow of an unknown tree": ("export mlflow ngram --tree bush:1", r"unknown tree"),
    "training with a missing configuration": (
        "train drafter fit --config nowhere",
        r"there is no configuration 'nowhere'.*drafter/eagle",
    ),
    "training with an unknown option": (
        "train drafter fit --nonsense 1",
        r"--nonsense 1; usage: arbordraft train drafter fit --help",
    ),
    "generating an empty share": ("train generate --of 0", r"--of"),
    "a demo of conversations that are a word": ("train demo --conversations x", r"--conversations"),
    "a demo without training time": ("train demo --training-minutes 0", r"--training-minutes"),
    "a demo of endless generation": ("train demo --generation-minutes inf", r"--generation-minutes"),
    "a demo of lookups": ("train demo --drafter ngram", r"--drafter"),
    "a demo for a missing model": ("train demo --target nowhere", r"nowhere"),
}


def run(arguments, monkeypatch, capsys):
    """Runs a command in this process; returns its status and its text on stderr."""
    monkeypatch.setattr(sys, "argv", ["arbordraft", *arguments])
    status = 0
    try:
        cli.main()
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("command", "message"), USAGE.values(), ids=USAGE.keys())
def test_wrong_input_is_one_line_and_status_2(place, monkeypatch, capsys, command, message):
    monkeypatch.chdir(place)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    status, said = run(shlex.split(command), monkeypatch, capsys)
    assert status == 2, said
    assert re.fullmatch(rf"error: .*(?:{message}).*\n", said), said
    assert "traceback" not in said.lower()
    assert sorted(path.relative_to(place) for path in place.rglob("*")) == before


@pytest.mark.parametrize(
    "command", ["promote x", "mlflow models:/x@candidate --target model", "mlflow ngram --target model"]
)
def test_an_unreachable_tracking_server_is_reported_at_once(place, monkeypatch, capsys, command):
    """The error comes before any prompt is decoded, and hides the secret in the address."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("arbordraft.exports.mlflow.evaluate", lambda *_, **__: pytest.fail("measured first"))
    status, said = run(["export", *shlex.split(command), "--uri", "http://me:secret@127.0.0.1:9"], monkeypatch, capsys)
    assert status == 1, said
    assert re.fullmatch(
        r"error: the tracking server http://127\.0\.0\.1:9 does not answer .*another with --uri.*\n", said
    )
    assert "secret" not in said


FAILURES = {
    "an error of torch": (
        RuntimeError("its own words"),
        1,
        r"error: RuntimeError: its own words \(traceback: (.*\.log), or .*",
    ),
    "a bug": (KeyError("x"), 1, r"error: KeyError: 'x' \(traceback: (.*\.log), or ARBORDRAFT_TRACEBACK=1\)"),
    "an error without words": (AssertionError(), 1, r"error: AssertionError \(traceback: (.*\.log), or .*"),
    "an error of many lines": (
        RuntimeError("a\nb\n\nc"),
        1,
        r"error: RuntimeError: a b c \(traceback: (.*\.log), or .*",
    ),
    "a wrong value": (ValueError("bad"), 2, r"error: bad"),
    "a wrong value without words": (ValueError(), 2, r"error: ValueError \(traceback: (.*\.log), or .*"),
    "an error of ours": (UserError("its own words"), 1, r"error: its own words"),
    "a number that is not finite": (FloatingPointError("NaN logits"), 1, r"error: NaN logits"),
    "too little memory": (MemoryError(), 1, r"error: MemoryError \(traceback: (.*\.log), or .*"),
    "a missing library": (ImportError("pip install x"), 1, r"error: pip install x"),
    "an error of the hub": (OSError("the hub is down"), 1, r"error: the hub is down"),
    "a missing file": (FileNotFoundError(2, "No such file", "x.json"), 2, r"error: x.json: No such file"),
    "a forbidden file": (PermissionError(13, "Permission denied", "x.json"), 2, r"error: x.json: Permission denied"),
    "a full disk": (OSError(28, "No space left on device", "x"), 1, r"error: .*No space left on device.*"),
    "a reader that is gone": (BrokenPipeError(32, "Broken pipe"), 1, r""),
}


@pytest.mark.parametrize(("error", "status", "line"), FAILURES.values(), ids=FAILURES.keys())
def test_other_errors_are_one_line_and_a_status(monkeypatch, capsys, tmp_path, error, status, line):
    """Errors that users can fix are one line; the traceback of a bug is kept in a log."""

    def fail(_):
        warnings.warn("noise before it", stacklevel=1)
        raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "parse_topology", fail)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # keeps pytest's own stdout
    found, said = run(["tree", "chain:2"], monkeypatch, capsys)
    assert found == status
    match = re.fullmatch(rf"{line}\n" if line else "", said)
    assert match, said
    logs = list(tmp_path.glob("*.log"))
    assert [str(path) for path in logs] == list(match.groups())
    for path in logs:
        assert "noise before it" in path.read_text()
        assert "Traceback" in path.read_text()


def test_a_traceback_is_shown_on_request(monkeypatch, capsys):
    monkeypatch.setenv(TRACEBACK, "1")
    monkeypatch.setattr(cli, "parse_topology", lambda _: {}["x"])
    status, said = run(["tree", "chain:2"], monkeypatch, capsys)
    assert status == 1
    assert said.startswith("Traceback")
    assert said.endswith("error: KeyError: 'x'\n")


def test_a_successful_command_writes_nothing_on_stderr(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    arguments = ["generate", "a b", "--raw", "--model", "model", "--max-new-tokens", "2"]
    assert run(arguments, monkeypatch, capsys) == (0, "")


def test_warnings_of_other_libraries_are_hidden_and_ours_are_shown(monkeypatch, capsys):
    def noisy(_):
        import logging

        logging.getLogger("another").warning("theirs")
        warnings.warn("theirs, too", stacklevel=1)
        logging.getLogger("arbordraft.drafters").warning("ours")
        raise cli.typer.Exit(0)

    monkeypatch.setattr(cli, "parse_topology", noisy)
    assert run(["tree", "chain:2"], monkeypatch, capsys) == (0, "ours\n")


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["tree", "bush:3"], 2, r"error: .*unknown tree 'bush:3'.*"),
        (
            ["tree", "chain:3", "--png", "/dev/full"],
            1,
            r"error: /dev/full cannot be written: No space left on device.*",
        ),
        (["tree", "chain:3"], 0, ""),
    ],
    ids=["tree", "disk", "good"],
)
def test_a_real_process_has_the_same_lines_and_statuses(arguments, status, line):
    done = subprocess.run(
        [sys.executable, "-c", "from arbordraft.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status
    assert re.fullmatch(f"{line}\n" if line else "", done.stderr), done.stderr


# Benchmarks share their options


SHARED = {"--model", "--dtype", "--prompts", "--limit", "--new-tokens", "--seed", "--json"}
BENCHES = {
    **dict.fromkeys(["decode", "policy", "compare"], SHARED | {"--batches", "--repeats", "--png"}),
    "equality": SHARED | {"--batches"},
    "verifiers": SHARED | {"--batches", "--png"},
    "gpu": {"--out", "--minutes", "--phases", "--device", "--seed"},
}


@pytest.mark.parametrize("name", BENCHES)
def test_benchmarks_share_their_options(name):
    known = CliRunner().invoke(cli.app, ["bench", name, "--help"], env={"COLUMNS": "300"}).output
    assert {option for option in BENCHES[name] if not re.search(rf"{option}\b", known)} == set()


def test_no_benchmark_is_left_out():
    assert {(command.name or command.callback.__name__) for command in bench.app.registered_commands} == BENCHES.keys()
