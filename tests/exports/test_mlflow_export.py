"""Logged decoders decode elsewhere as before, only better ones become champions, and failures leave nothing."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import companions
from support.models import PROMPTS, tiny_tokenizer
from typer.testing import CliRunner

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
import httpx
import mlflow
import onnx
from mlflow import MlflowClient, MlflowException

import arbordraft as ad
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.cli import main as cli
from arbordraft.deciders import AdaEDL, Bandit, FixedDepth, LearnedDecider, NodeBudget, PathSurvival
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.prompts import chat_batch
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.exports.decoder_config import DecoderConfig, describe, rebuild
from arbordraft.exports.evaluation import Evaluation, evaluate
from arbordraft.exports.mlflow import TRAINING, LoggedDecoder, judge, load_decoder, log_decoder, promote_decoder
from arbordraft.loading import load_target
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.training.tracking import MLflowTracker
from arbordraft.utils.choices import Dtype
from arbordraft.utils.mlflow_server import fetch_drafter
from arbordraft.verifiers import LongestBranch, OptimalTransport, TypicalAcceptance

GREEDY = ad.Coupling.matching()
SAMPLED = ad.Coupling(ad.TopTail(1, 1), ad.Lifted(ad.RecursiveRejection()))
TREE = ad.TreeTopology.from_k_config((2, 1))
COSTS = StepCosts(ad.CostTable((1, 2), (1.0, 1.5)), ad.CostTable((1,), (0.1,)), rest=0.2)


@pytest.fixture
def _own_server():
    """Resets MLflow's own tracking address after tests that set it."""
    yield
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folders of a target with its tokenizer, a drafter and a decider."""
    root = tmp_path_factory.mktemp("published")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "c"  # the model's own
    for place in (companions.target().model, tokenizer):
        place.save_pretrained(root / "target")
    companions.drafter("eagle").head.save_pretrained(root / "eagle")
    LearnedDecider(top_k=4, widths=(8,), threshold=0.1).save_pretrained(root / "decider")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def parts(folders):
    return load_target(folders["target"], Dtype.float32)


@pytest.fixture(scope="module")
def questions(parts):
    """Returns prompts; the drafter was trained on the target's answers to them."""
    return parts[1].batch_decode(PROMPTS)


@pytest.fixture
def options(uri, folders, questions):
    """Returns options of short exports: the store, and the prompts and tokens to measure."""
    return {"target": folders["target"], "prompts": questions, "new_tokens": 4, "uri": uri}


def lookup(target):
    return ad.SpeculativeDecoder(target, ad.NGramDrafter(), ad.TreeTopology.chain(2), GREEDY)


def eagle(target, folders, coupling=SAMPLED, decider=None):
    return ad.SpeculativeDecoder(
        target, ad.EagleDrafter.from_pretrained(folders["eagle"], target), TREE, coupling, decider
    )


@pytest.fixture(scope="module")
def logged(uri, folders, parts, questions):
    """Logs a decoder with a drafter and a decider as the first candidate of its name."""
    decider = LearnedDecider.from_pretrained(folders["decider"])
    decoder = eagle(parts[0], folders, decider=decider)
    options = {"target": folders["target"], "drafter": folders["eagle"], "prompts": questions, "new_tokens": 12}
    return decoder, log_decoder(decoder, parts[1], registered_model="whole", uri=uri, **options)


# Parts as plain data


@pytest.mark.parametrize(
    "part",
    [
        *(ad.IID(3), ad.WithoutReplacement(2), ad.TopTail(1, 2), AdaptiveTopTail(3, 0.3), ad.Fixed(4)),
        ad.TopDown(ad.SpecHub(order="paper")),
        ad.Lifted(ad.RecursiveRejection()),
        ad.TopDown(OptimalTransport("full")),
        TypicalAcceptance(0.2, 0.1),
        *(FixedDepth(), AdaEDL(), Bandit([FixedDepth(1), FixedDepth(3)])),
        ad.CostAware(COSTS, 9, PathSurvival(0.4)),
        ad.CostAware(COSTS.target, decay=0.5),
        *(NodeBudget(7), COSTS, None),
    ],
    ids=str,
)
def test_parts_are_rebuilt_as_they_were(part, tmp_path):
    description = json.loads(json.dumps(describe(part)))
    again = rebuild(description, tmp_path)
    assert type(again) is type(part)
    assert repr(again) == repr(part)
    assert describe(again) == describe(part)


class Mine(FixedDepth):
    pass


@pytest.mark.parametrize("part", [Mine(), ad.TopDown, lambda: None])
def test_parts_that_are_not_plain_data_are_refused(part):
    with pytest.raises(
        ValueError, match=r"cannot be described as plain data|does not keep the arguments it was made with"
    ):
        describe(part)


@pytest.mark.parametrize(
    "description",
    [
        {"class": "SpeculativeDecoder"},
        {"class": "os.system"},
        {"class": "builders"},
        {"class": "Fixed", "arguments": {"n": 1}},
    ],
)
def test_only_parts_of_arbordraft_are_built(description, tmp_path):
    with pytest.raises(ValueError, match=r"of arbordraft|is not made with"):
        rebuild(description, tmp_path)


def test_decoders_are_rebuilt_as_they_were(folders, parts, questions, tmp_path):
    target, tokenizer = parts
    inputs = chat_batch(tokenizer, questions)
    hybrid = ad.HybridDrafter(ad.NGramDrafter(5, 3), ad.EagleDrafter.from_pretrained(folders["eagle"], target))
    for decoder in (
        lookup(target),
        eagle(target, folders),
        ad.SpeculativeDecoder(target, hybrid, TREE, ad.Coupling.shared(2), NodeBudget(3)),
        ad.SpeculativeDecoder(
            target, ad.EarlyExitDrafter(target, 2), TREE, SAMPLED, ad.ConfidenceThreshold(0.1), max_cache_tokens=900
        ),
    ):
        DecoderConfig.of(decoder, folders["target"], folders["eagle"]).save(tmp_path / "decoder.json")
        again, _ = DecoderConfig.load(tmp_path / "decoder.json").build(tmp_path)
        assert str(again.coupling) == str(decoder.coupling)
        assert again.max_cache_tokens == decoder.max_cache_tokens
        sampled = {"do_sample": True, "seeds": [1, 2, 3], "max_new_tokens": 10, "return_dict_in_generate": True}
        ours, theirs = (each.generate(**inputs, **sampled) for each in (decoder, again))
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert (ours.stats.drafted, ours.stats.accepted) == (theirs.stats.drafted, theirs.stats.accepted)


def test_incomplete_descriptions_are_refused(folders, parts, tmp_path):
    with pytest.raises(ValueError, match="name the folder or hub name that the EagleDrafter"):
        DecoderConfig.of(eagle(parts[0], folders), folders["target"])
    other = TargetInitialisedDecoder(parts[0], ad.EarlyExitDrafter(parts[0], 2), TREE)
    with pytest.raises(ValueError, match="a TargetInitialisedDecoder cannot be described"):
        DecoderConfig.of(other, folders["target"])
    (tmp_path / "decoder.json").write_text("{}")
    with pytest.raises(ValueError, match="describes no decoder"):
        DecoderConfig.load(tmp_path / "decoder.json")


def test_the_bits_of_the_weights_are_described(folders, parts, tmp_path):
    """In a description without this setting, weights keep the model's own bits."""
    target = ad.RaggedModel(parts[0].model, parts[0].tokenizer, kernels="native", weights="int4")
    DecoderConfig.of(lookup(target), folders["target"]).save(tmp_path / "decoder.json")
    again, _ = DecoderConfig.load(tmp_path / "decoder.json").build(tmp_path)
    assert again.target.weights == "int4"
    fields = json.loads((tmp_path / "decoder.json").read_text())
    del fields["target"]["weights"]
    (tmp_path / "decoder.json").write_text(json.dumps(fields))
    again, _ = DecoderConfig.load(tmp_path / "decoder.json").build(tmp_path)
    assert again.target.weights is None


def test_another_target_is_refused(folders, parts, tmp_path):
    shutil.copytree(folders["target"], tmp_path / "target")
    config = DecoderConfig.of(lookup(parts[0]), str(tmp_path / "target"))
    config.build(tmp_path)
    companions.with_norms(companions.tiny(num_hidden_layers=4), seed=2).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="not the target that this decoder was made for"):
        config.build(tmp_path)


# Figures


def test_evaluation(parts, questions):
    found = evaluate(lookup(parts[0]), parts[1], questions, new_tokens=12, batch=2)
    assert (found.equal, found.prompts, found.parity) == (3, 3, True)
    assert found.tau >= 1
    lossy = ad.SpeculativeDecoder(parts[0], ad.NGramDrafter(), TREE, ad.Coupling(ad.Fixed(2), LongestBranch()))
    assert not evaluate(lossy, parts[1], questions, new_tokens=12).parity
    with pytest.raises(ValueError, match="without prompts"):
        evaluate(lookup(parts[0]), parts[1], [])


def test_wrong_answers_fail_parity(parts, questions, monkeypatch):
    """Negative control: a verdict in which the target's best token is 7 at every even row."""
    from arbordraft.verifiers import coupling as module

    real = module.matching_verdict

    def careless(tree, best, samples):
        def wrong(rows, at):
            return [token if row % 2 else 7 for row, token in zip(rows, best(rows, at), strict=True)]

        return real(tree, wrong, samples)

    broken = lookup(parts[0])
    generate = broken.generate

    def wrong(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(module, "matching_verdict", careless)
            return generate(*args, **kwargs)

    broken.generate = wrong
    assert not evaluate(broken, parts[1], questions, new_tokens=12).parity


# Logged decoders


@pytest.mark.usefixtures("_own_server")
def test_a_logged_decoder_is_complete(uri, client, logged):
    found = logged[1]
    run = client.get_run(found.run)
    assert run.info.status == "FINISHED"
    assert run.data.params["drafter"] == "EagleDrafter"
    assert run.data.metrics["eval/parity"] == 1
    assert run.data.metrics["eval/tau"] == pytest.approx(found.evaluation.tau)
    assert {"parity.json", "tree.png"} <= {file.path for file in client.list_artifacts(found.run)}
    version = client.get_model_version_by_alias("whole", "candidate")
    assert str(version.version) == found.version == "1"
    model = client.get_logged_model(found.model)
    mlflow.set_tracking_uri(uri)
    info = mlflow.models.get_model_info(model.artifact_location)
    assert info.signature.inputs.input_names() == ["prompt"]
    assert info.signature.outputs.input_names() == ["text", "tau", "tokens"]
    assert {param.name for param in info.signature.params} == {"max_new_tokens", "temperature", "top_p", "seed", "raw"}
    files = Path(mlflow.artifacts.download_artifacts(model.artifact_location))
    pinned = (files / "requirements.txt").read_text().split()
    assert {line.partition("==")[0] for line in pinned} >= {"arbordraft", "torch", "transformers", "mlflow"}
    assert all("==" in line and "+" not in line for line in pinned)
    assert (files / "serving_input_example.json").exists()
    names = {path.suffix for path in files.rglob("*") if path.is_file()}
    assert not names & {".pkl", ".pickle", ".pt", ".bin"}


def test_a_loaded_decoder_decodes_as_before(uri, client, logged, parts, questions):
    decoder = logged[0]
    again, tokenizer = load_decoder(client, "whole", "1")
    assert describe(again.decider) == {"class": "LearnedDecider", "folder": "decider"}
    assert again.decider.threshold == 0.1
    inputs = chat_batch(tokenizer, questions)
    options = {"do_sample": True, "seeds": [5, 6, 7], "max_new_tokens": 10, "return_dict_in_generate": True}
    ours, theirs = (each.generate(**inputs, **options) for each in (decoder, again))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.stats.drafted == theirs.stats.drafted


@pytest.fixture(scope="module")
def served(uri, logged, tmp_path_factory):
    """Yields the address of `mlflow models serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serving") / "log"
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/whole@candidate", "-p", str(port)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--env-manager", "local", "--workers", "1"],
            env=environment,
            stdout=stream,
            stderr=stream,
            process_group=0,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{address}/ping", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        else:
            raise AssertionError(log.read_text())
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


def invoke(served, prompts, **params):
    """Returns the server's answers to a client."""
    body = {"dataframe_records": [{"prompt": prompt} for prompt in prompts], "params": params}
    response = httpx.post(f"{served}/invocations", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["predictions"]


def test_served_over_http(served, logged, parts, questions):
    decoder, _ = logged
    inputs = chat_batch(parts[1], questions)
    output = decoder.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    stats, columns = output.stats, inputs["input_ids"].shape[1]
    texts = [
        parts[1].decode(row[columns : columns + count], skip_special_tokens=True)
        for row, count in zip(output.sequences, stats.emitted, strict=True)
    ]
    found = invoke(served, questions, max_new_tokens=8)
    assert [row["text"] for row in found] == texts
    assert [row["tokens"] for row in found] == stats.emitted
    assert [row["tau"] for row in found] == pytest.approx(
        [e / f for e, f in zip(stats.emitted, stats.forwards, strict=True)]
    )


def test_served_to_several_clients_at_once(served, questions):
    """MLflow answers in threads; each client gets the same answer as alone, greedy or sampled."""

    def ask(client):
        prompts = (questions * 2)[client : client + 1 + client % 3]
        return invoke(served, prompts, max_new_tokens=12, temperature=float(client % 2), seed=client)

    clients = list(range(6))
    alone = [ask(client) for client in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        assert list(pool.map(ask, clients * 4)) == alone * 4


def test_served_requests_may_sample(served, questions):
    def ask(seed):
        found = invoke(served, questions[:1] * 2, max_new_tokens=12, temperature=2.0, seed=seed)
        return [row["text"] for row in found]

    assert ask(1) == ask(1) != ask(100)
    assert len(set(ask(1))) == 2  # every prompt has a seed of its own
    refused = httpx.post(f"{served}/invocations", json={"dataframe_records": [{"question": "?"}]}, timeout=60)
    assert refused.status_code == 400
    assert "prompt" in refused.text


def test_lineage_from_training_to_export(uri, client, folders, parts, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = MLflowTracker("training", uri=uri, registered_model="trained")
    tracker.log_checkpoint(folders["eagle"], 10, {"val/tau": 2.0})
    tracker.register(folders["eagle"])
    tracker.finalize()
    fetched, run = fetch_drafter("models:/trained@candidate", tmp_path / "fetched", uri)
    assert run == tracker.version
    assert (fetched / "model.safetensors").read_bytes() == (Path(folders["eagle"]) / "model.safetensors").read_bytes()
    drafter = ad.EagleDrafter.from_pretrained(fetched, parts[0])
    decoder = ad.SpeculativeDecoder(parts[0], drafter, TREE, SAMPLED)
    options["drafter"] = fetched
    found = log_decoder(decoder, parts[1], training_run=run, registered_model="child", **options)
    export = client.get_run(found.run)
    trained = client.get_run(run).outputs.model_outputs[0].model_id
    assert [model.model_id for model in export.inputs.model_inputs] == [trained]
    assert export.data.tags[TRAINING] == run
    assert client.get_model_version("child", "1").tags[TRAINING] == run
    arguments = ["export", "mlflow", "models:/trained@candidate", "--target", folders["target"], "--uri", uri]
    commanded = CliRunner().invoke(cli.app, [*arguments, "--new-tokens", "4", "--kernels", "torch"])
    assert commanded.exit_code == 0, commanded.output
    (latest,) = client.search_runs([export.info.experiment_id], order_by=["attributes.start_time DESC"], max_results=1)
    assert latest.info.run_id != found.run
    assert latest.data.tags[TRAINING] == run
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path / "cache"))
    for name in ("models:/trained@candidate", "models:/trained/1"):
        named = drafter_named(name, parts[0])
        assert isinstance(named, ad.EagleDrafter)
        assert torch.equal(named.head.fc.weight, drafter.head.fc.weight)
    assert len([*(tmp_path / "cache" / "registered").iterdir()]) == 1
    with pytest.raises(ValueError, match="does not have it"):
        drafter_named("models:/absent@candidate", parts[0])
    with pytest.raises(ValueError, match="knows no training run"):
        log_decoder(decoder, parts[1], training_run="0" * 32, **options)
    with pytest.raises(ValueError, match="names no version"):
        fetch_drafter("models:/trained", tmp_path / "other", uri)


def test_onnx_graphs_are_logged(client, folders, parts, options, tmp_path):
    kind = onnx.TensorProto.FLOAT
    values = [onnx.helper.make_tensor_value_info(name, kind, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "drafter.onnx",
    )
    (tmp_path / "parity.json").write_text("{}")
    found = log_decoder(lookup(parts[0]), parts[1], onnx=tmp_path, **options)
    names = {}
    for output in client.get_run(found.run).outputs.model_outputs:
        model = client.get_logged_model(output.model_id)
        names[model.name] = model
    assert set(names) == {"decoder", "onnx-drafter"}
    assert mlflow.onnx.load_model(names["onnx-drafter"].artifact_location).graph.node[0].op_type == "Neg"
    assert [file.path for file in client.list_artifacts(found.run, "onnx")] == ["onnx/parity.json"]
    with pytest.raises(ValueError, match="no ONNX graph"):
        log_decoder(lookup(parts[0]), parts[1], onnx=folders["target"], **options)


# Candidates and champions


def measured(**changes):
    figures = {"exactness": "exact", "prompts": 4, "prompts_sha256": "", "equal": 4, "tau": 2.0}
    return Evaluation(**figures | {"tokens_per_second": 50.0, "plain_tokens_per_second": 40.0} | changes)


@pytest.mark.parametrize(
    ("candidate", "champion", "by", "promoted", "reason"),
    [
        ({}, None, ["tau"], True, "first champion"),
        ({"equal": 3}, None, ["tau"], False, "fails parity: 3 of 4"),
        ({"tokens_per_second": 40.5}, None, ["tau", "tokens_per_second"], False, "no faster than plain .* 40.5 .* 40$"),
        ({"tau": 2.5, "tokens_per_second": 39.0}, {}, ["tau", "tokens_per_second"], False, "no faster than plain"),
        ({"tokens_per_second": 39.0}, None, ["tau"], True, "first champion"),
        ({"exactness": "lossy", "tau": 9.0}, {}, ["tau"], False, "lossy"),
        ({"tau": 2.5}, {}, ["tau"], True, "tau 2.5 against 2"),
        ({"tau": 2.01}, {}, ["tau"], False, "no better by 2%"),
        ({"tau": 2.5}, {}, ["tokens_per_second"], False, "50 against 50"),
        ({"tau": 1.0, "tokens_per_second": 60.0}, {}, ["tau", "tokens_per_second"], True, "60 against 50"),
    ],
)
def test_the_gate_of_promotion(candidate, champion, by, promoted, reason):
    bar = None if champion is None else measured(**champion)
    verdict = judge("2", measured(**candidate), None if bar is None else "1", bar, by, 0.02)
    assert verdict.promoted is promoted
    assert re.search(reason, verdict.reason)


def test_promotion(uri, client, folders, parts, questions, options):
    options["new_tokens"] = 12
    gate = {"by": ["tau"], "new_tokens": 12, "uri": uri}

    def champion():
        return client.get_registered_model("gate").aliases.get("champion")

    log_decoder(lookup(parts[0]), parts[1], registered_model="gate", **options)
    verdict = promote_decoder("gate", questions, **gate)
    assert verdict.promoted, verdict
    assert str(champion()) == "1"
    assert not promote_decoder("gate", questions, **gate).promoted  # it is the champion already

    log_decoder(lookup(parts[0]), parts[1], registered_model="gate", **options)
    verdict = promote_decoder("gate", questions, **gate)
    assert not verdict.promoted
    assert "no better" in verdict.reason

    lossy = ad.Coupling(ad.TopTail(1, 1), TypicalAcceptance())
    log_decoder(eagle(parts[0], folders, lossy), parts[1], drafter=folders["eagle"], registered_model="gate", **options)
    verdict = promote_decoder("gate", questions, **gate)
    assert not verdict.promoted
    assert "fails parity" in verdict.reason
    assert str(champion()) == "1"

    log_decoder(eagle(parts[0], folders), parts[1], drafter=folders["eagle"], registered_model="gate", **options)
    verdict = promote_decoder("gate", questions, **gate)
    assert verdict.promoted, verdict
    assert str(champion()) == "4"
    assert client.get_model_version("gate", "4").tags["arbordraft.promotion"] == verdict.reason
    with pytest.raises(ValueError, match="not by"):
        promote_decoder("gate", questions, by=["beauty"], uri=uri)


# Failures leave nothing behind


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("set_registered_model_alias", MlflowException("the server is gone")),
        ("create_model_version", MlflowException("the server is gone")),
        ("log_model_artifacts", OSError("the disk is full")),  # MLflow has made the model by then
    ],
    ids=["alias", "version", "artifacts"],
)
def test_a_failed_log_leaves_neither_a_model_nor_a_version(client, parts, options, monkeypatch, method, error):
    options["experiment"], name = method, f"half-{method}"

    def broken(*args, **kwargs):
        raise error

    def fail():
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, method, broken)
            with pytest.raises(type(error), match=str(error)):
                log_decoder(lookup(parts[0]), parts[1], registered_model=name, **options)

    fail()
    with pytest.raises(MlflowException, match="not found"):
        client.get_registered_model(name)
    experiment = client.get_experiment_by_name(method).experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FAILED"
    assert not client.search_logged_models([experiment])

    done = log_decoder(lookup(parts[0]), parts[1], registered_model=name, **options)
    fail()
    versions = client.search_model_versions(f"name = '{name}'")
    assert [version.version for version in versions] == [client.get_model_version(name, done.version).version]
    assert client.get_model_version_by_alias(name, "candidate").version == versions[0].version


def test_a_damaged_drafter_is_not_logged(client, folders, parts, options, tmp_path):
    shutil.copytree(folders["eagle"], tmp_path / "eagle")
    decoder = eagle(parts[0], folders)
    weights = tmp_path / "eagle" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated or damaged"):
        log_decoder(decoder, parts[1], drafter=tmp_path / "eagle", experiment="damaged", **options)
    assert client.get_experiment_by_name("damaged") is None


def test_names_are_checked_first(uri, parts, folders):
    for options in ({"registered_model": "a/b"}, {"alias": "v1"}, {"alias": "latest"}):
        with pytest.raises(ValueError, match=r"registered_model may hold|an alias consists"):
            log_decoder(lookup(parts[0]), parts[1], target=folders["target"], uri=uri, **options)


@pytest.mark.usefixtures("_own_server")
def test_the_users_own_server_setting_stays_unchanged(parts, options, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_decoder(lookup(parts[0]), parts[1], **options)
    assert "MLFLOW_TRACKING_URI" not in os.environ
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    log_decoder(lookup(parts[0]), parts[1], **options)
    assert mlflow.get_tracking_uri() == os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:1"
    assert mlflow.active_run() is None


def test_mlflow_is_optional(monkeypatch, parts, folders):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[mlops\]'"):
        log_decoder(lookup(parts[0]), parts[1], target=folders["target"])
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[mlops\]'"):
        promote_decoder("anything")


# The command line


@pytest.mark.parametrize(("speed", "warned"), [(9.0, True), (10.0, True), (11.0, False)])
def test_a_decoder_slower_than_plain_is_named(speed, warned, folders, monkeypatch):
    found = measured(tokens_per_second=speed, plain_tokens_per_second=10.0)
    logged = LoggedDecoder("run", "model", "models:/m", None, found)
    monkeypatch.setattr("arbordraft.exports.mlflow.log_decoder", lambda *_, **__: logged)
    arguments = ["export", "mlflow", "ngram", "--target", folders["target"], "--kernels", "torch"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert ("slower than plain decoding here" in result.output) == warned


def test_the_commands(uri, client, folders, questions, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in questions))
    run, asked = CliRunner(), ["--prompts", str(file), "--new-tokens", "6", "--uri", uri]
    arguments = ["export", "mlflow", folders["eagle"], "--target", folders["target"], "--tree", "k:2,1"]
    arguments += ["--kernels", "torch", "--decider", folders["decider"], "--name", "commanded", *asked]
    result = run.invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "parity: True" in result.output
    assert "version 1 of commanded, candidate" in result.output
    tuned = Tuned("ngram", 0.0, COSTS, [Choice(1, Setting("lookup"), 9.0, 8.0)])
    tuned.save(tmp_path / "tuned.json")
    options = ["--target", folders["target"], "--tuned", str(tmp_path / "tuned.json"), "--kernels", "torch", *asked]
    result = run.invoke(cli.app, ["export", "mlflow", "ngram", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "parity: True" in result.output
    result = run.invoke(cli.app, ["export", "promote", "commanded", "--by", "tau", *asked], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "first champion" in result.output
    result = run.invoke(cli.app, ["export", "promote", "commanded", *asked])
    assert result.exit_code == 1
    assert "the champion already" in result.output
