"""A static step is a graph: nothing in it depends on data, nothing in it leaves the device."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.companions import drafter as trained_drafter
from support.companions import target as trained_target
from support.models import ARCHITECTURES, PROMPTS, VOCAB, left_padded, ragged
from support.watching import Watch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import logits_process as hf

from arbordraft import (
    IID,
    Coupling,
    EarlyExitDrafter,
    Fixed,
    Lifted,
    RaggedModel,
    RecursiveRejection,
    SpeculativeDecoder,
    TopTail,
    TreeTopology,
)
from arbordraft.decoding.static import step
from arbordraft.decoding.static.bucket import Bucket, bucket_for
from arbordraft.decoding.static.cache import Memory, MemoryLayout
from arbordraft.decoding.static.step import StaticStep, StepKind
from arbordraft.kernels.verify import take_tops
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.verifiers.packed import verify_packed

TREE = TreeTopology.from_k_config((3, 2, 1))
PROCESSORS = [
    hf.TemperatureLogitsWarper(0.7),
    hf.TopKLogitsWarper(20),
    hf.TopPLogitsWarper(0.9),
    hf.MinPLogitsWarper(0.01),
    hf.TypicalLogitsWarper(0.9),
    hf.EpsilonLogitsWarper(0.001),
    hf.InfNanRemoveLogitsProcessor(),
    hf.LogitNormalization(),
]
KINDS = {
    "greedy": StepKind(sampled=False),
    "greedy, processed": StepKind(sampled=False, processors="of a request"),
    "shared": StepKind(sampled=False, shared=True),
    "shared, truncated": StepKind(sampled=False, shared=True, processors="of a request"),
    "top-down": StepKind(sampled=True, replacement=True),
    "lifted": StepKind(sampled=True, lifted=True, most_tops=2),
}


def decoder(coupling, drafter=None, **options):
    drafter = drafter or EarlyExitDrafter(ragged(), layers=1)
    return SpeculativeDecoder(
        options.pop("target", ragged()), drafter, TREE, coupling, **{"buckets": (16, 32, 64), **options}
    )


LIFTED = Coupling(TopTail(2, 1), Lifted(RecursiveRejection()))
SHARED = Coupling.shared(3)
# Not top_p: its `mask[..., -1:] = 0` is a fill on a GPU, but on a CPU it looks like a tensor made of numbers.
REQUESTS = [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "min_p": 0.01}]
TEMPERATURE = {"do_sample": True, "temperature": 0.7, "top_k": 0}


def tokens(decoder, request):
    return decoder.generate(**left_padded(PROMPTS), max_new_tokens=12, seeds=[1, 2, 3], **request).tolist()


INTRUDERS = {
    "item": lambda path: path.max().item(),
    "int": lambda path: [0] * int(path[0, 0]),
    "if": lambda path: 1 if path.any() else 0,
    "nonzero": lambda path: path.nonzero(),
    "mask": lambda path: path[path >= 0],
    "assignment": lambda path: path.clone().__setitem__(path >= 0, torch.zeros_like(path[0, 0])),
    "unique": lambda path: path.unique(),
    "tolist": lambda path: path.tolist(),  # on a CPU this is no operator
    "upload": lambda path: torch.tensor([1, 2], device=path.device),
    "elsewhere": lambda path: torch.arange(2, device="cpu"),
}


@pytest.fixture(params=INTRUDERS)
def intruder(request, monkeypatch):
    """Makes every step do something forbidden."""
    ordinary = step.accepted_paths

    def spoiled(*given):
        found = ordinary(*given)
        INTRUDERS[request.param](found[0])
        return found

    monkeypatch.setattr(step, "accepted_paths", spoiled)
    return request.param


def run_without_numbers(architecture, kind, device):
    """Runs a step of a model that has shapes but no numbers; returns the operators that are noticed."""
    with torch.device(device):
        config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # experts support no other dtype
        bucket = Bucket.of(TREE, 32, 2)
        pipeline = LogitsPipeline(PROCESSORS if device == "meta" else PROCESSORS[:2])
        target = RaggedModel(model, self_test=False, kernels="torch")
        one = StaticStep(target, bucket, kind, pipeline, MemoryLayout((0, 1)), TREE.num_nodes)
        table = torch.zeros(bucket.size, dtype=torch.int64)
        draft = torch.zeros(bucket.nodes, VOCAB)
        heads = getattr(config, "num_key_value_heads", 4)
        pools = [torch.zeros(50, heads, 8, dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad(), Watch(device) as seen:
        result, hidden = one(table, draft, Memory(pools))
    assert (result.shape, hidden.shape) == ((3, 3), (3, 4, 0))
    return seen.found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_tensor_of_a_step_lies_on_its_device(kind):
    """The meta device computes nothing, so tensors made elsewhere stand out."""
    assert run_without_numbers("llama", kind, "meta") == []


def test_a_step_that_asks_the_host_or_leaves_its_device_is_noticed(intruder):
    """Negative control: the operator stands out, or raises because it needs numbers."""

    def noticed(device, mode):
        try:
            with mode:
                return bool(run_without_numbers("llama", KINDS["greedy"], device))
        except RuntimeError:
            return True

    # On the meta device an upload leaves no trace; fake tensors are on the CPU.
    found = [noticed("meta", nullcontext()), noticed("cpu", FakeTensorMode())]
    assert found == [intruder != "upload", intruder != "elsewhere"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2", "opt", "gpt_oss", "qwen3_moe", "phi3"])
def test_steps_of_many_architectures_have_shapes_without_numbers(architecture):
    """Fake tensors raise wherever a number is asked for."""
    with FakeTensorMode():
        for kind in KINDS.values():
            assert run_without_numbers(architecture, kind, "cpu") == []


# Compiled


@pytest.mark.parametrize(
    ("coupling", "backend", "requests"),
    [
        (LIFTED, "eager", REQUESTS),
        pytest.param(LIFTED, "aot_eager", REQUESTS, marks=pytest.mark.soak),
        (SHARED, "aot_eager", [REQUESTS[1], TEMPERATURE]),
    ],
    ids=["eager", "aot_eager", "shared noise"],
)
def test_a_step_is_one_graph(coupling, backend, requests):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = decoder(coupling, buckets=None), decoder(coupling, buckets=(64,), compile_backend=backend)
    for request in requests:
        assert tokens(compiled, request) == tokens(plain, request)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one per request, however many steps


@pytest.mark.soak
def test_a_compiled_step_shows_hidden_states():
    torch._dynamo.reset()
    coupling = Coupling(TopTail(1, 2), Lifted(RecursiveRejection()))
    parts = {"drafter": trained_drafter("eagle"), "target": trained_target()}
    plain = decoder(coupling, **parts, buckets=None)
    compiled = decoder(coupling, **parts, buckets=(64,), compile_backend="eager")
    assert tokens(compiled, REQUESTS[0]) == tokens(plain, REQUESTS[0])


def test_a_step_that_asks_the_host_does_not_compile(monkeypatch):
    """Negative control: the step asks for a number."""
    torch._dynamo.reset()
    ordinary = step.accepted_paths

    def spoiled(end, *others):
        path, *moves = ordinary(end, *others)
        return path * (2 if end.max().item() > 1000 else 1), *moves

    monkeypatch.setattr(step, "accepted_paths", spoiled)
    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        tokens(decoder(LIFTED, buckets=(64,), compile_backend="eager"), REQUESTS[0])


# Tables


@st.composite
def batches(draw):
    """Draws a topology and some of its subtrees."""
    parents = [-1]
    for _ in range(draw(st.integers(0, 14))):
        parents.append(draw(st.integers(max(0, parents[-1]), len(parents) - 1)))
    topology = TreeTopology(parents)
    samples = []
    for _ in range(draw(st.integers(1, 4))):
        alive = {0: 5}
        for node in range(1, len(parents)):
            if parents[node] in alive and draw(st.booleans()):
                alive[node] = node
        samples.append(draw(st.sampled_from([None, alive])))
    return topology, DraftTree.of(topology, Fixed(20), samples)


@given(batches())
def test_any_trees_fit_into_their_bucket(case):
    """Tables have room for any spread of a batch over the levels, and hold the values of the trees."""
    topology, tree = case
    samples, count = len(tree), tree.rows
    bucket = Bucket.of(topology, rows := bucket_for((1, 2, 4, 8), count), samples)
    cache = RaggedKVCache()
    handles = [cache.open(20) for _ in tree.living]
    batch = cache.lay_out(handles, [tree.depth[tree.owner == sample] for sample in tree.living])
    noise = Noise.draw([Noise.source(i) for i in range(samples)], topology.num_nodes)
    table = torch.full((bucket.size,), -77)
    assert bucket.fill(table, tree, batch, noise, dummy=1000) == []

    part = bucket.read(table)
    assert not part["seeds"].any()
    seeds = [2**64 - 1 - sample for sample in range(samples)]
    shared = GumbelNoise([SharedSource(seed) for seed in seeds], [9] * samples)
    bucket.fill(other := torch.full((bucket.size,), -77), tree, batch, shared, 1000)
    drawing = [seeds[sample] - 2**64 for sample in tree.owner]
    assert bucket.read(other)["seeds"].tolist() == drawing + [0] * (rows - count)
    assert part["tokens"][:count].tolist() == tree.token.tolist()
    places = list(zip(tree.owner, tree.node, strict=True))
    assert part["accept"][:count].tolist() == [noise.accept[sample, node] for sample, node in places]
    assert part["slots"].unique().numel() == rows
    assert (part["slots"][count:] > 1000).all()
    inner = [row for row in part["inner"].tolist() if row >= 0]
    assert sorted(inner) == [row for row in range(count) if tree.children[row]]
    begin = 0
    for depth, size in enumerate(bucket.levels):
        level = part["inner"][begin : begin + size]
        assert (part["depth"][level[level >= 0]] == depth).all()
        begin += size
    for place, row in enumerate(part["inner"].tolist()):
        children = part["children"][place]
        assert children[children >= 0].tolist() == (tree.children[row] if row >= 0 else [])
        expected = [tree.token[child] if child >= 0 else -1 for child in children.tolist()]
        assert part["child_tokens"][place].tolist() == expected
    for row, above in enumerate(part["parent"].tolist()):
        assert (above < 0) == (part["depth"][row] == 0)
        assert above < 0 or part["depth"][above] == part["depth"][row] - 1


def test_tops_are_those_of_the_law():
    generator = torch.Generator().manual_seed(0)
    laws = [TopTail(2, 1), TopTail(1, 2), TopTail(3, 1), AdaptiveTopTail(4, 0.15), AdaptiveTopTail(3, 0.0), IID(2)]
    for _ in range(20):
        rows = (torch.randn(len(laws), 12, generator=generator).round() * 1.5).softmax(dim=-1)  # many equal ones
        rows[torch.rand(rows.shape, generator=generator) < 0.4] = 0
        rows /= rows.sum(dim=-1, keepdim=True)
        left = rows.clone()
        most, threshold = (
            torch.tensor(values) for values in zip(*((law.most_tops, law.threshold) for law in laws), strict=True)
        )
        tops = take_tops(left, most, threshold, 3)
        for law, row, found, rest in zip(laws, rows, tops.tolist(), left, strict=True):
            expected = law.top_tokens(row)
            assert [token for token in found if token >= 0] == expected
            row[expected] = 0
            assert torch.equal(rest, row)


@pytest.mark.parametrize("lifted", [False, True])
def test_a_batch_without_drafts(lifted):
    """Tokens are drawn from the target's rows, all at once as on the device."""
    tree = DraftTree.of(TREE, IID(3), [{0: 1}, {0: 1}])
    scores = torch.randn(2, 9)
    noise = Noise.draw([Noise.source(i) for i in range(2)], TREE.num_nodes)
    cumulative = scores.softmax(dim=-1).double().cumsum(dim=-1)
    tokens = [int((row <= level).sum()) for row, level in zip(cumulative, noise.final[:, 0], strict=True)]
    assert verify_packed(tree, scores, noise, lifted=lifted) == {0: (0, tokens[0]), 1: (1, tokens[1])}
    assert verify_packed(tree, scores, noise, lifted=lifted, samples=[1]) == {1: (1, tokens[1])}
