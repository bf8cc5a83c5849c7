"""Examples run as users run them; the README shows the same code."""

import argparse
import importlib
import os
import re
import runpy
import sys
import time
import venv
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.tiny_training import save_target

from arbordraft.decoding.prompts import MIXED, REPEATING

ROOT = Path(__file__).resolve().parents[1]
COMPARE = ROOT / "examples" / "compare"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script in this process, as importing torch again takes longer than most scripts."""
    monkeypatch.setenv("COLUMNS", "160")  # narrower tables would be cut off

    def run(script: str, *arguments: str) -> str:
        path = ROOT / "examples" / script
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        status = None
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code
        assert not status
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("quickstart.py", [], "The capital of France is Paris"),
        ("export_engines.py", [], "LlamaForCausalLMEagle3, the target's states [1, 14, 26]"),
        ("onnx_export.py", [], "same answers: True"),
        ("demo.py", ["--max-new-tokens", "8", "--prompts", "2"], "float32: a short run gave token for token"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_example(run, example, arguments, expected):
    assert expected in run(example, *arguments)


@pytest.mark.parametrize(
    ("example", "less", "expected"),
    [
        ("sampling.py", {"SAMPLES": 64}, "SpecHub, lifted"),
        ("ems_sd.py", {"REPEATING": REPEATING[:4], "NEW_TOKENS": 16}, "same answers: True"),
        ("dynasd.py", {"NEW_TOKENS": 6}, "lossy"),
        ("spechub.py", {"PROMPTS": MIXED[:2], "NEW_TOKENS": 3}, "SpecHub, paper's order"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_example_in_short(monkeypatch, capsys, example, less, expected):
    """Runs examples with fewer samples, prompts or tokens than they set at their top."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = runpy.run_path(str(ROOT / "examples" / example))["main"]
    assert main.__globals__.keys() >= less.keys()
    main.__globals__.update(less)
    main()
    assert expected in capsys.readouterr().out


def test_training_from_nothing(tmp_path, monkeypatch):
    """Runs a small `arbordraft train demo`: generation, drafter, decider, gain. The second run has nothing to do."""
    from arbordraft.training import decider_module, demo
    from arbordraft.training.targets import Target

    options = {
        "data.recipe.per_shard": 6,
        "data.recipe.max_new_tokens": 12,
        "data.recipe.follow_ups": 0,
        "data.validation": 4,
        "data.generation_batch": 16,
        "trainer.max_steps": 1,
        "trainer.val_check_interval": 1,
        "trainer.logger": "false",
    }
    fit, workload = demo.run, demo.Workload
    small = [f"--{name}={value}" for name, value in options.items()]
    short = {"DrafterModule": "--model.decoded_tokens=8", "DeciderModule": "--model.timed_tokens=8"}
    monkeypatch.setattr(decider_module, "_TIMED", 2)  # prompts
    monkeypatch.setattr(demo, "free_disk", lambda folder: 10**12)  # enough room for hidden states
    monkeypatch.setattr(
        demo, "run", lambda module, arguments: fit(module, [*arguments, *small, short[module.__name__]])
    )
    monkeypatch.setattr(demo, "Workload", lambda **given: workload(**given | {"prompts": ("Hi",), "new_tokens": 1}))
    target = Target(str(save_target(tmp_path / "target", max_position_embeddings=256)))
    for _ in range(2):
        shown = StringIO()
        console = Console(file=shown, width=160)
        demo.gain(console, target, demo.train_demo(console, target, tmp_path, conversations=6))
        assert "trained" in shown.getvalue()
        assert "tau" in shown.getvalue()
    assert {path.name for path in (tmp_path / "data").glob("*.safetensors")} == {
        "tokens-00000.safetensors",
        "hidden-00000.safetensors",
    }
    for kind in ("drafter", "decider"):
        assert (tmp_path / kind / "best" / "model.safetensors").exists()
        assert (tmp_path / kind / "checkpoints" / "last.ckpt").exists()


def test_every_example_is_tested():
    source = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert all(f'"{path.name}"' in source for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Creates a Python without any library."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("script", "options", "peer", "library"),
    [
        ("compare/vllm_cpu.py", ["--python"], "vLLM", "vllm"),
        ("compare/openvino_cpu.py", ["--python"], "OpenVINO GenAI", "openvino_genai"),
        ("compare/llama_cpp.py", ["--gguf", "no.gguf", "--python"], "llama.cpp", "xllamacpp"),
        ("compare/serving.py", ["--vllm-python"], "vLLM", "vllm"),
        ("serve_vllm.py", ["--vllm-python"], "vLLM", "vllm"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_comparison_says_that_the_peer_is_missing(run, bare_python, script, options, peer, library):
    shown = run(script, "--check", *options, bare_python)
    assert shown.startswith(f"{peer} is not measured: ")
    assert f"No module named '{library}'" in shown
    assert shown.count("\n") == 1


# Answers like vLLM: repeats the prompt's first token as often as requested, and prints to standard output.
FAKE_VLLM = """
import os, types
class SamplingParams:
    def __init__(self, temperature, max_tokens, detokenize):
        assert temperature == 0
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, enable_prefix_caching, **settings):
        assert not enable_prefix_caching
        os.system("echo starting")
    def generate(self, prompts, sampling, use_tqdm):
        print("decoding")
        tokens = [prompt["prompt_token_ids"][:1] * sampling.max_tokens for prompt in prompts]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=each)]) for each in tokens]
    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        counters = [types.SimpleNamespace(name=name + "drafts", value=4), types.SimpleNamespace(name="vllm:x", value=1)]
        return [*counters, types.SimpleNamespace(name=name + "accepted_tokens_per_pos", values=[3, 1])]
"""


def stops(process: int) -> bool:
    """Returns whether a signal stops a child within five seconds."""
    for _ in range(500):
        _, status = os.waitpid(process, os.WUNTRACED | os.WNOHANG)
        if status:
            return os.WIFSTOPPED(status)
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_comparison_freezes_a_peer_between_requests(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(COMPARE)
    from peers import Peer, PeerError
    from vllm_cpu import config

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tmp_path.joinpath("vllm.py").write_text(FAKE_VLLM)
    counting = config("n-gram", tmp_path, speculative={"method": "ngram"}, counted=True)
    vllm = Peer("vLLM", "vllm_cpu", Path(sys.executable), counting, tmp_path / "log")
    try:
        for _ in range(2):
            answer = vllm.generate([[7, 8], [9]], 3)
            assert answer.tokens == [[7, 7, 7], [9, 9, 9]]
            assert answer.counters == {"num_drafts": 4, "num_accepted_tokens_per_pos": [3, 1]}
            assert stops(vllm.program.process.pid)
        assert vllm.cpu_seconds() > 0
    finally:
        vllm.close()
    assert set(vllm.program.log.read_text().split()) == {"starting", "decoding"}

    tmp_path.joinpath("vllm.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(PeerError, match="broken"):
        Peer("vLLM", "vllm_cpu", Path(sys.executable), config("plain", tmp_path), tmp_path / "log")


def ways(module, tmp_path, *arguments):
    """Returns the names of a peer's configurations, in groups of which the fastest is compared."""
    peer = importlib.import_module(module)
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", default=2)
    parser.add_argument("--batches", default=[1, 8])
    parser.add_argument("--draft-model")
    peer.options(parser)
    groups = peer.configs(parser.parse_args(arguments), tmp_path, tmp_path)
    return [[config.name.split(", ", 1) for config in group] for group in groups]


@pytest.mark.parametrize(
    ("module", "arguments", "drafts"),
    [
        ("vllm_cpu", ["--reserved", "0"], [["plain"], ["n-gram 4:3:5", "n-gram 5:4:4", "n-gram 2:2:4"]]),
        (
            "vllm_cpu",
            ["--reserved", "0", "--ngrams", "--suffix", "--eagle", "head"],
            [["plain"], ["suffix"], ["EAGLE-3 2", "EAGLE-3 4"]],
        ),
    ],
    ids=["lookups", "others"],
)
def test_a_peer_is_run_in_all_its_configurations(monkeypatch, tmp_path, module, arguments, drafts):
    monkeypatch.syspath_prepend(COMPARE)
    assert [[name for name, _ in group] for group in ways(module, tmp_path, *arguments)] == drafts


def test_openvino_and_llama_run_all_their_kinds_of_drafts(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(COMPARE)
    openvino = ways("openvino_cpu", tmp_path, "--batched", "256", "--eagle", "head", "--lengths", "4")
    assert [[way for _, way in group] for group in openvino] == [
        ["plain, 256 batched"],
        [f"lookup {ngram}, 256 batched" for ngram in ("4:3", "8:3", "3:2")],
        ["itself in int4 4, 256 batched"],
        ["EAGLE-3 4, 256 batched", "EAGLE-3 16:4:5, 256 batched"],
    ]
    llama = ways(
        "llama_cpp", tmp_path, "--gguf", "m.gguf", "--draft-model", "d.gguf", "--drafts", "simple:4:8", "mod:6:8"
    )
    models = [["m", "model:4"], ["m", "model:8"]]
    assert llama == [[["m", "plain"]], [["m", "simple:4:8"]], [["m", "mod:6:8"]], models]


def test_prompts_under_load_have_the_requested_lengths(monkeypatch):
    monkeypatch.syspath_prepend(COMPARE)
    from passages import prompts

    from arbordraft.checkpoints.smollm2 import load_smollm2

    _, tokenizer = load_smollm2()
    texts = list(prompts(tokenizer, 24, seed=3))
    assert texts == list(prompts(tokenizer, 24, seed=3))
    assert set(texts).isdisjoint(prompts(tokenizer, 24, seed=4))
    turns = ([{"role": "user", "content": text}] for text in texts)
    lengths = [len(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]) for turn in turns]
    assert min(lengths) < 200 < 500 < max(lengths)
    assert all(45 <= length <= 1020 for length in lengths)


@pytest.mark.parametrize(
    ("greets", "first"), [(False, 100.0), (True, 150.0)], ids=["text at once", "a greeting before the text"]
)
def test_a_greeting_is_no_first_token(monkeypatch, greets, first):
    monkeypatch.syspath_prepend(COMPARE)
    from servers import ServerKind
    from serving import Load, measure

    class Program:
        def cpu_seconds(self):
            return 0.0

        def freeze(self):
            pass

    class Known:
        kind, program = ServerKind("known", [], greets=greets), Program()

        def wake(self):
            pass

        def run(self, *_):
            return {
                "errors": ["", "gone"],
                "ttfts": [0.1, 0],
                "itls": [[0.05, 0.2], []],
                "output_lens": [3, 0],
                "duration": 2,
            }

    cell = measure(Known(), Known(), Load(clients=1), [], tokens=3, limit=1)
    assert cell.first_token == [first] * 3
    assert cell.between[2] == pytest.approx(200, abs=3)
    assert (cell.requests, cell.failed, cell.tokens_per_second, cell.counted) == (2, 1, 1.5, 1.0)


def test_readme_shows_the_quickstart():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert shown == [quickstart.split('"""\n\n', 1)[1]]
