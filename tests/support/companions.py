"""A target with quickly trained drafters, reference rows for their drafts, and rounds without a decoder."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from arbordraft import IID, RaggedModel, TreeTopology, WithoutReplacement
from arbordraft.deciders import Decider
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.drafting import StaticDrafts
from arbordraft.drafters import Drafter
from arbordraft.heads.base import DraftHead
from arbordraft.target.cache import RaggedKVCache
from arbordraft.training.batches import Batch
from arbordraft.training.features import FreshFeatures
from arbordraft.training.shards import ANSWER, GIVEN
from arbordraft.training.students import (
    BlockStudent,
    DFlashStudent,
    EagleStudent,
    EarlyExitStudent,
    LanguageModelStudent,
    MedusaStudent,
    Student,
)
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask, stack_words
from arbordraft.trees.verdict import Verdict
from support.models import PROMPTS, VOCAB, context, greedy_reference, grown, joined, next_logits, tiny

LAYERS, EXIT = 4, 2
STUDENTS: dict[str, Callable[[], Student]] = {
    "block": lambda: BlockStudent(markov_rank=8, vocabulary=40, layers=(1, 2, 3), keep=1.0),
    "peagle": lambda: BlockStudent(markov_rank=0, mask_token_id=60, vocabulary=40, layers=(1, 2, 3), keep=1.0),
    "dflash": lambda: DFlashStudent(3, markov_rank=0, mask_token_id=60, vocabulary=40, layers=(1, 2, 3), begins=1.0),
    "dspark": lambda: DFlashStudent(4, 3, 8, mask_token_id=60, vocabulary=40, layers=(1, 2, 3), begins=1.0),
    "eagle": lambda: EagleStudent(vocabulary=40, layers=(1, 2, 3)),
    "medusa": lambda: MedusaStudent(num_heads=3, vocabulary=40),
    "exit": lambda: EarlyExitStudent(EXIT),
    "model": lambda: LanguageModelStudent([0, 3]),
}


def with_norms(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Gives the norms of a model random weights that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.copy_((0.6 + 0.8 * torch.rand(weight.shape, generator=generator)).bfloat16())
    return model


@cache
def target() -> RaggedModel:
    """Returns the target that all tests share; they must not change it."""
    return RaggedModel(with_norms(tiny(num_hidden_layers=LAYERS)).requires_grad_(False), kernels="torch")


@cache
def texts(new_tokens: int = 20) -> list[list[int]]:
    """Returns the prompts with the target's answers at temperature 0."""
    answers = greedy_reference(target().model, PROMPTS, max_new_tokens=new_tokens, eos_token_id=None)
    return [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]


def frequent(count: int) -> list[int]:
    """Returns the most frequent tokens of the texts."""
    seen = [token for text in texts() for token in text]
    return sorted(range(VOCAB), key=lambda token: -seen.count(token))[:count]


def batch_for(student: Student, of: RaggedModel | None = None) -> Batch:
    """Returns a batch of the texts with the features of a student; prompts are marked as given."""
    of = of or target()

    def side_by_side(rows: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(rows), batch_first=True)

    features = FreshFeatures(of, student.hidden_layers(of))(texts())
    roles = [[GIVEN] * len(p) + [ANSWER] * (len(t) - len(p)) for p, t in zip(PROMPTS, texts(), strict=True)]
    return Batch(
        side_by_side([torch.tensor(text) for text in texts()]),
        side_by_side([torch.tensor(row, dtype=torch.uint8) for row in roles]),
        torch.zeros(len(texts())),
        *(side_by_side(rows) for rows in zip(*features, strict=True)),
    )


def widen(student: Student, logits: Tensor) -> Tensor:
    """Widens ``[R, D]`` draft logits to ``[R, V]``."""
    return student.network.widen(logits) if isinstance(student.network, DraftHead) else logits


@cache
def trained(name: str, steps: int = 30) -> Student:
    """Returns a student that learned the texts, but not by heart."""
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        student = STUDENTS[name]()
        student.build(target(), frequent)
        batch = batch_for(student)
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
        for _ in range(steps):
            losses = []
            for found in student.unroll(batch, target(), 4):
                wanted = batch.roles[:, found.ahead :] == ANSWER
                wanted[:, : found.first] = False
                logits = functional.linear(found.hidden[:, : wanted.shape[1]][wanted], found.head, found.bias)
                losses.append(functional.cross_entropy(widen(student, logits), batch.tokens[:, found.ahead :][wanted]))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    return student.eval()


def drafter(name: str) -> Drafter:
    """Returns the drafter of a trained student."""
    return trained(name).drafter(target())


# Reference rows of drafters, computed from their definitions


def states(model: PreTrainedModel, tokens: Sequence[int], *layers: int) -> Tensor:
    """Returns ``[n, F]`` hidden states of a model, layers side by side."""
    with torch.no_grad():
        found = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in layers], dim=-1)


@torch.no_grad()
def eagle_row(head: torch.nn.Module, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row slot by slot, each slot attending to all before it.

    The first slots read the target's states, later slots the layer's own output.
    """
    text = [*prefix, *drafted]
    inputs = list(head.fuse(states(model, prefix[:-1], *head.config.hidden_layers)))
    keys, values, outputs = [], [], []
    for slot in range(len(text) - 1):
        hidden = inputs[slot] if slot < len(prefix) - 1 else outputs[-1]
        embedding = model.get_input_embeddings()(torch.tensor(text[slot + 1]))
        query, key, value = head.queries_keys_values(embedding, hidden, head.rotary(torch.tensor(slot), hidden.dtype))
        groups = len(query) // len(key)
        keys.append(key.repeat_interleave(groups, dim=0))
        values.append(value.repeat_interleave(groups, dim=0))
        scores = torch.einsum("hc,shc->hs", query, torch.stack(keys)) * query.shape[-1] ** -0.5
        attended = torch.einsum("hs,shc->hc", scores.softmax(-1), torch.stack(values)).flatten()
        outputs.append(head.finish(hidden, attended))
    return head.widen(head.lm_head(head.norm(outputs[-1])))


@torch.no_grad()
def block_row(head: torch.nn.Module, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row from the last slot, or from the mask of the depth, attending to all slots.

    The term of the parent's token comes last. In P-EAGLE's form the mask also attends to itself and the masks above it.
    """
    tokens, depth = torch.tensor([*prefix, *drafted]), len(drafted)
    embeddings = model.get_input_embeddings()(tokens)
    fused, last = head.fuse(states(model, prefix[:-1], *head.config.hidden_layers)), len(prefix) - 2
    rotary = head.rotary(torch.arange(last + 1), fused.dtype)
    _, keys, values = head.queries_keys_values(embeddings[1 : last + 2], fused, rotary)
    hidden, query = fused[last], None
    for level in range(depth + 1):
        embedding = embeddings[last + 1]
        if level and (mask := head.config.mask_token_id) is not None:
            embedding = model.get_input_embeddings().weight[mask]
        embedding, hidden = head.ask(embedding, fused[last], torch.tensor(level))
        query, *own = head.queries_keys_values(embedding, hidden, head.rotary(torch.tensor(last + level), fused.dtype))
        if level and head.config.mask_token_id is not None:
            keys, values = (torch.cat([part, new[None]]) for part, new in zip((keys, values), own, strict=True))
    keys, values = (part.repeat_interleave(len(query) // part.shape[1], dim=1) for part in (keys, values))
    shares = (torch.einsum("hc,shc->hs", query, keys) * query.shape[-1] ** -0.5).softmax(-1)
    final = head.norm(head.finish(hidden, torch.einsum("hs,shc->hc", shares, values).flatten()))
    return head.widen(
        functional.linear(torch.cat([final, head.gates(final) * head.follow(embeddings[-1])]), head.weight)
    )


@torch.no_grad()
def dflash_row(head: torch.nn.Module, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row from the block of the last token and its masks.

    Each row of the block attends to the target's states before the block, and to the whole block.
    """
    config, depth = head.config, len(drafted)
    embed = model.get_input_embeddings().weight
    fused = functional.linear(states(model, prefix[:-1], *config.hidden_layers), head.fc.weight)
    known = head.hidden_norm(fused)
    rows = torch.stack([embed[prefix[-1]], *[embed[config.mask_token_id]] * (config.block_size - 1)])
    at = torch.arange(len(known) + len(rows))
    cosine, sine = head.rotary(at, rows.dtype)
    for layer in head.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(rows)
        both = torch.cat([known, normed])
        query = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, config.head_dim)))
        key = attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, config.head_dim)))
        value = attention.v_proj(both).unflatten(-1, (-1, config.head_dim))
        query, key = (
            part * cosine[-len(part) :]
            + torch.cat([-part[..., config.head_dim // 2 :], part[..., : config.head_dim // 2]], dim=-1)
            * sine[-len(part) :]
            for part in (query, key)
        )
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        shares = (torch.einsum("rhc,shc->hrs", query, key) * config.head_dim**-0.5).softmax(-1)
        rows = rows + attention.o_proj(torch.einsum("hrs,shc->rhc", shares, value).flatten(1))
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    first = config.block_size - config.depths
    logits = functional.linear(
        final := head.norm(rows)[first:], model.lm_head.weight if head.lm_head is None else head.lm_head.weight
    )[depth]
    if (term := head.markov_head) is not None:
        memory = None
        for level, token in enumerate([prefix[-1], *drafted]):  # a recurrent term remembers all of them
            follow, memory = term.follow(final[level], torch.tensor(token), memory)
        logits = logits + functional.linear(follow, term.markov_w2.weight)
    return head.widen(logits)


@torch.no_grad()
def medusa_row(head: torch.nn.Module, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row from the token before the root; drafted tokens matter by their number only."""
    final = states(model, prefix[:-1], model.config.num_hidden_layers)[-1]
    return head.widen(head.logits(final, len(drafted)))


@torch.no_grad()
def exit_row(adapter: torch.nn.Module, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row with the first layers, the adapter, the norm and the head."""
    (layers,) = adapter.config.hidden_layers
    return model.lm_head(model.model.norm(adapter(states(model, [*prefix, *drafted], layers)[-1])))


def model_row(small: PreTrainedModel, model: PreTrainedModel, prefix: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Computes a row with the small model alone."""
    return next_logits(small, [*prefix, *drafted])


ROWS = {
    "block": block_row,
    "peagle": block_row,
    "dflash": dflash_row,
    "dspark": dflash_row,
    "eagle": eagle_row,
    "medusa": medusa_row,
    "exit": exit_row,
    "model": model_row,
}


def check_rows(name: str, network: PreTrainedModel, model: PreTrainedModel, tree: DraftTree, tokens, atol=2e-5) -> int:
    """Compares the row of every node that has one; returns the number of rows."""
    count = 0
    for row in range(tree.rows):
        if (drawn := tree.drawn_from(row)) is not None:
            sample = int(tree.owner[row])
            expected = ROWS[name](network, model, tokens[sample], tree[sample].path(row)).softmax(-1)
            torch.testing.assert_close(drawn, expected, rtol=0, atol=atol)
            count += 1
    return count


class Rounds:
    """Runs a drafter as a decoder does, with verdicts that a test chooses.

    Args:
        drafter: the drafter.
        target: target of the drafter.
        prompts: texts of the samples at the beginning.
        static: drafts whole trees in fixed shapes.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: RaggedModel,
        prompts: Sequence[Sequence[int]],
        static: StaticDrafts | None = None,
    ) -> None:
        self.drafter, self.target, self.static = drafter, target, static
        self.tokens = [list(prompt) for prompt in prompts]
        self.cache = StaticCache(None, static.spare(len(prompts))) if static else RaggedKVCache()
        self.handles = [self.cache.open(len(prompt)) for prompt in prompts]
        known = {handle: prompt[:-1] for handle, prompt in zip(self.handles, self.tokens, strict=True)}
        hidden = target.prefill(known, self.cache, hidden=drafter.hidden_layers)
        self.state = joined(drafter, self.tokens, self.cache, self.handles)
        self.take_hidden({sample: hidden[handle] for sample, handle in enumerate(self.handles) if handle in hidden})

    def take_hidden(self, hidden: dict[int, Tensor]) -> None:
        if self.drafter.hidden_layers:
            self.drafter.take_hidden(self.state, hidden)

    def propose(self, topology: TreeTopology, law, **options) -> DraftTree:
        """Returns the drafter's trees; finished samples get none."""
        max_depth = [topology.max_depth if handle in self.cache else None for handle in self.handles]
        asked = {name: options.pop(name) for name in ("decide", "plan") if name in options}
        self.step = context(self.tokens, topology, law, **{"max_depth": max_depth, **options})
        return grown(self.drafter, self.state, self.step, device=self.static, **asked)

    def commit(self, tree: DraftTree, ends: Sequence[int | None]) -> None:
        """Accepts each sample's path down to a node, and an arbitrary token; ``None`` ends the sample.

        If the node was not drafted, no draft is accepted.
        """
        nodes = tree.node.tolist()
        row_of = {(owner, node): row for row, (owner, node) in enumerate(zip(tree.owner.tolist(), nodes, strict=True))}
        last = {
            sample: row_of.get((sample, ends[sample]), tree[sample].root)
            for sample in tree.living
            if ends[sample] is not None
        }
        verdict = Verdict.of(tree, {sample: (row, 7) for sample, row in last.items()})
        parts = [nodes[rows.start : rows.stop] for rows in (tree[sample].rows for sample in tree.living)]
        batch = self.cache.lay_out(
            [self.handles[sample] for sample in tree.living],
            [[tree.topology.depth_list[node] for node in own] for own in parts],
            stack_words([SlicedCausalMask(tree.topology).select(own, own) for own in parts]),
        )
        _, hidden = self.target.run(tree.tokens(), batch, self.cache, hidden=self.drafter.hidden_layers)
        for sample in tree.living:
            if sample in last:
                self.tokens[sample] += verdict.emitted(tree, sample)
            else:
                self.cache.close(self.handles[sample])
        paths = {sample: verdict.paths[sample] for sample in last}
        self.cache.commit(
            {self.handles[sample]: [row - tree[sample].root for row in path] for sample, path in paths.items()}
        )
        self.drafter.commit(self.state, tree, verdict)
        for sample in tree.living:
            if sample not in last:
                self.drafter.remove(self.state, sample)
        self.take_hidden({sample: hidden[path] for sample, path in paths.items()})


class Dictated(IID):
    """Draws given tokens, and ignores the rows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(1)
        self.tokens = iter(tokens)

    def draw(self, draft, uniforms):
        return [next(self.tokens)]


class Chosen(Decider):
    """Lets only the marked samples draft."""

    def __init__(self, drafting: Sequence[bool]) -> None:
        super().__init__()
        self.drafting, self.numbers = drafting, itertools.count()

    def start(self) -> int:
        return next(self.numbers)

    def forward(self, view):
        return [self.drafting[number] for number in view.memory]


UNEVEN = TreeTopology([-1, 0, 0, 1, 1, 2, 3, 6])
WALK = [  # per round and sample: the end of the accepted path, and whether the sample drafts
    ((0, 3, 7), [True, True, True]),  # all rejected, a middle node, a leaf at full depth
    ((7, 0, 2), [True, True, True]),
    ((0, 0, 0), [False, False, False]),  # no sample drafts
    ((5, None, 4), [True, True, True]),  # the second sample is finished
    ((0, None, 0), [False, True, True]),  # only the third sample drafts
    ((1, None, 1), [True, True, True]),
    ((7, None, 6), [True, True, True]),
]


def walk(
    drafter: Drafter, name: str, network: torch.nn.Module | None = None, of: RaggedModel | None = None
) -> tuple[Rounds, int]:
    """Runs rounds of all kinds and checks every row; returns the rounds and the number of compared rows."""
    of, network = of or target(), network or trained(name).network
    rounds, count = Rounds(drafter, of, PROMPTS), 0
    for number, (ends, drafting) in enumerate(WALK):
        tree = rounds.propose(UNEVEN, WithoutReplacement(2), decide=Chosen(drafting), seed=10 * number)
        count += check_rows(name, network, of.model, tree, rounds.tokens)
        rounds.commit(tree, ends)
    return rounds, count
