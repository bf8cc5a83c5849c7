"""Exported networks as drafters, run by onnxruntime.

Shapes: T packed rows, R frontier nodes, F hidden states side by side, H hidden size, D draft vocabulary, V vocabulary.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from arbordraft.drafters.base import Drafter, Garden, check_ragged, grow, plan_level
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.laws import DraftLaw
from arbordraft.onnx_graph import MODEL, Graph, RaggedGraph
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.types import DraftContext, DraftTree, Verdict
from arbordraft.vocabulary import fit_logits, fit_tokens, tokenizer_hashes

FUSE = "fuse.onnx"
_CHUNK = 512  # rows of one sample and run, which bounds the memory of masks and logits


class OnnxDrafter(Drafter):
    """Drafts with an exported network: a language model, an early exit, an EAGLE head or Medusa heads.

    What the folder holds decides which one :meth:`from_pretrained` gives. The weights are in float32 or quantised,
    whatever the target's dtype; keys and values are the graph's own.

    Args:
        graph: the graph.
        target: the model that it drafts for.

    Raises:
        TypeError: if the target is no RaggedModel.
        ValueError: if the graph is damaged, or was made for another target, vocabulary or tokenizer.
    """

    def __init__(self, graph: Graph, target: RaggedModel) -> None:
        super().__init__()
        check_ragged(target)
        self.graph, self.target = graph, target
        about = graph.about
        _check_target(graph, target)
        self.max_positions = about.get("max_positions")
        self._tokens: Tensor | None = None
        if (offsets := about.get("d2t")) is not None:
            self._tokens = torch.tensor(offsets) + torch.arange(len(offsets))
            ids = self._tokens.tolist()
            if len(set(ids)) != len(ids) or not 0 <= min(ids) <= max(ids) < target.vocab_size:
                raise ValueError(f"{graph.path}: its draft vocabulary is damaged; export it again")
        if (table := about.get("acceptance")) is not None:
            from arbordraft.heads.base import check_acceptance

            check_acceptance(table, target.vocab_size if self._tokens is None else len(self._tokens))
            self.acceptance = tuple(table)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], target: RaggedModel, threads: int | None = None
    ) -> "OnnxDrafter":
        """Loads what ``arbordraft export onnx`` wrote.

        Args:
            path: the folder.
            target: the model that it drafts for.
            threads: that the graph runs on; by default as many as torch uses.

        Raises:
            ImportError: if onnxruntime is not installed.
            ValueError: if the folder holds no drafter, or one for another target.
        """
        graph = Graph(Path(path) / MODEL, threads)
        match graph.kind:
            case "causal-lm" | "early-exit":
                return OnnxLayers(graph, target)
            case "eagle":
                return OnnxLayers(graph, target, Graph(Path(path) / FUSE, threads))
            case "medusa":
                return OnnxHeads(graph, target)
        raise ValueError(f"{path} holds a graph of the kind {graph.kind!r}, which is no drafter")

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.target:
            raise ValueError(f"{type(self).__name__} must be built for the target that it drafts for")

    def widen(self, logits: Tensor) -> Tensor:
        """``[R, D]`` as ``[R, V]``: a token that cannot be drafted has probability 0."""
        if self._tokens is not None:
            wide = logits.new_full((len(logits), self.target.vocab_size), -torch.inf)
            logits = wide.index_copy_(1, self._tokens, logits)
        return fit_logits(logits, self.target.vocab_size).to(self.target.device)

    def check_logits(self, logits: Tensor) -> None:
        """Raises ValueError unless logits of a first run are sound and of the size that the file speaks of.

        Args:
            logits: ``[..., D]``.
        """
        if self._tokens is not None and logits.shape[-1] != len(self._tokens):
            raise ValueError(
                f"{self.graph.path} predicts {logits.shape[-1]} tokens, its draft vocabulary has {len(self._tokens)}; "
                "export it again"
            )
        if not logits.isfinite().all():
            raise ValueError(f"{self.graph.path} predicts NaN or infinity: its weights are damaged; export it again")

    def extra_repr(self) -> str:
        return f"{self.graph.kind}, quantization={self.graph.about.get('quantization')}"


@dataclass
class _State:
    cache: RaggedKVCache
    handles: list[int]
    pending: dict[int, list[Tensor]]  # target states whose slots the cache lacks
    fed: dict[int, list[int]] = field(default_factory=dict)  # nodes behind the committed rows, in cache order
    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # the layer's output by sample and node


class OnnxLayers(OnnxDrafter):
    """A graph with keys and values: of a language model, of the target's first layers, or an EAGLE head.

    An EAGLE head has a second graph, which makes its input from the target's hidden states; its own outputs stand for
    them in the tree, whose rows are given up after every step. The others keep the accepted path.
    """

    takes_candidates = True

    def __init__(self, graph: Graph, target: RaggedModel, fuse: Graph | None = None) -> None:
        super().__init__(graph, target)
        self._run = RaggedGraph(graph)
        self._fuse = fuse
        if fuse is not None:
            self.hidden_layers = tuple(graph.about["hidden_layers"])
        self._size = target.vocab_size if fuse is not None else self._try()

    def _try(self) -> int:
        """Runs one row; how many ids the graph knows, which padding may make more or fewer than the target's."""
        probe = RaggedKVCache()
        batch = probe.plan([probe.open(1)], [[0]])
        logits = self._run({"input_ids": torch.zeros(1, dtype=torch.int64)}, batch, probe)["logits"]
        self.check_logits(logits)
        return logits.shape[-1]

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> _State:
        cache = RaggedKVCache(target_cache.max_tokens)
        ours = [cache.open(target_cache.capacity(handle)) for handle in handles]
        state = _State(cache, ours, {sample: [] for sample in range(len(tokens))})
        if self._fuse is None:
            self._append(state, {sample: prompt[:-1] for sample, prompt in enumerate(tokens)})
        return state

    def observe(self, state: _State, hidden: Mapping[int, Tensor]) -> None:
        for sample, states in hidden.items():
            if sample in state.pending:
                state.pending[sample].append(states.cpu().float())

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        state.fed, state.hidden = {}, {}
        if self._fuse is not None:  # a text of one token has no state to start from: the target goes first
            room = [
                limit if limit is None or len(tokens) > 1 else 0
                for limit, tokens in zip(context.room, context.tokens, strict=True)
            ]
            context = replace(context, room=room)
        return grow(context, lambda garden, frontier: self._level(state, garden, frontier))

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        kept: dict[int, list[int]] = {}
        for sample, (handle, judged) in enumerate(zip(state.handles, verdict.samples, strict=True)):
            if judged is None and handle in state.cache:
                state.cache.close(handle)
                del state.pending[sample]
            elif judged is not None:
                fed = state.fed.get(sample, []) if self._fuse is None else []
                # A leaf was never fed: the next catch-up brings it.
                kept[handle] = [fed.index(node) for node in judged.path if node in fed]
        state.cache.commit(kept)

    def _level(self, state: _State, garden: Garden, frontier: dict[int, list[int]]) -> Tensor:
        if not state.fed:
            found = self._catch_up(state, garden.context, list(frontier))
        else:
            tokens, batch = plan_level(garden, frontier, state.cache, state.handles, state.fed)
            parents = garden.context.topology.parent_list
            above = [state.hidden.get((s, parents[node])) for s, nodes in frontier.items() for node in nodes]
            found = self._forward(state, tokens, batch, None if self._fuse is None else torch.stack(above))  # type: ignore[arg-type]
        if self._fuse is not None:
            places = [(sample, node) for sample, nodes in frontier.items() for node in nodes]
            garden.hidden |= zip(places, found["last_hidden_state"], strict=True)
            state.hidden |= zip(places, found["hidden_states_out"], strict=True)
        return self.widen(found["logits"])

    def _catch_up(self, state: _State, context: DraftContext, samples: list[int]) -> dict[str, Tensor]:
        """Feeds the committed tokens that the cache lacks; the last row of every sample."""
        skipped = 0 if self._fuse is None else 1  # slot j of an EAGLE head holds token j + 1
        missing = {
            sample: context.tokens[sample][state.cache.length(state.handles[sample]) + skipped :] for sample in samples
        }
        state.fed = {sample: [] for sample in samples}
        if self._fuse is None:
            return self._append(state, missing)
        states = torch.cat([part for sample in samples for part in state.pending[sample]])
        fused = self._fuse(hidden_states=states[None])["fused"][0]
        for sample in samples:
            state.pending[sample] = []
        shares = fused.split([len(missing[sample]) for sample in samples])
        return self._append(state, missing, dict(zip(samples, shares, strict=True)))

    def _append(
        self, state: _State, tokens: Mapping[int, Sequence[int]], hidden: Mapping[int, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Runs and commits tokens of several samples; returns the outputs of each one's last."""
        last: dict[str, dict[int, Tensor]] = {}
        for start in range(0, max(map(len, tokens.values()), default=0), _CHUNK):
            part = {sample: row[start : start + _CHUNK] for sample, row in tokens.items() if len(row) > start}
            handles = [state.handles[sample] for sample in part]
            batch = state.cache.plan(handles, [range(len(row)) for row in part.values()])
            states = None if hidden is None else torch.cat([hidden[s][start : start + _CHUNK] for s in part])
            packed = torch.tensor([token for row in part.values() for token in row])
            found = self._forward(state, packed, batch, states)
            state.cache.commit({handle: range(len(row)) for handle, row in zip(handles, part.values(), strict=True)})
            ends = torch.tensor([len(row) for row in part.values()]).cumsum(0) - 1
            for name, rows in found.items():
                last.setdefault(name, {}).update(zip(part, rows[ends], strict=True))
        return {name: torch.stack([rows[sample] for sample in tokens if sample in rows]) for name, rows in last.items()}

    def _forward(self, state: _State, tokens: Tensor, batch: RaggedBatch, hidden: Tensor | None) -> dict[str, Tensor]:
        inputs = {"input_ids": fit_tokens(tokens, self._size)} | ({} if hidden is None else {"hidden_states": hidden})
        return self._run(inputs, batch, state.cache)


@dataclass
class _Ahead:
    seen: dict[int, Tensor] = field(default_factory=dict)  # ``[F]`` of every sample's last observed token
    rows: dict[int, Tensor] = field(default_factory=dict)  # ``[heads, D]`` of this step


class OnnxHeads(OnnxDrafter):
    """A graph of Medusa heads: all of them at once, from the hidden state of the token before the root."""

    def __init__(self, graph: Graph, target: RaggedModel) -> None:
        super().__init__(graph, target)
        self.hidden_layers = tuple(graph.about["hidden_layers"])
        self._heads = int(graph.about["num_heads"])
        size = target.model.config.get_text_config().hidden_size * len(self.hidden_layers)
        self.check_logits(graph(hidden_states=torch.ones(1, size))["logits"])

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> _Ahead:
        return _Ahead()

    def observe(self, state: _Ahead, hidden: Mapping[int, Tensor]) -> None:
        state.seen |= {sample: states[-1].cpu().float() for sample, states in hidden.items()}

    def propose(self, state: _Ahead, context: DraftContext) -> DraftTree:
        state.rows = {}
        # A text of one token has no state to look ahead from: the target goes first.
        room = [
            limit if limit is None else min(limit, self._heads) if sample in state.seen else 0
            for sample, limit in enumerate(context.room)
        ]
        return grow(replace(context, room=room), lambda garden, frontier: self._level(state, garden, frontier))

    def _level(self, state: _Ahead, garden: Garden, frontier: dict[int, list[int]]) -> Tensor:
        if not state.rows:
            found = self.graph(hidden_states=torch.stack([state.seen[sample] for sample in frontier]))["logits"]
            state.rows = dict(zip(frontier, found, strict=True))
        depth = garden.context.topology.depth_list[next(iter(frontier.values()))[0]]
        rows = self.widen(torch.stack([state.rows[sample][depth] for sample in frontier]))
        return rows.repeat_interleave(torch.tensor([len(nodes) for nodes in frontier.values()]), dim=0)


def _check_target(graph: Graph, target: RaggedModel) -> None:
    """Raises ValueError if a graph was made for another target."""
    about, tokenizer = graph.about, target.tokenizer
    hashes = {} if tokenizer is None else tokenizer_hashes(tokenizer)
    agree = [about[name] == value for name, value in hashes.items() if about.get(name) is not None]
    if tokenizer is not None and not all(agree):
        raise ValueError(
            f"{graph.path} was made for a tokenizer that gives other ids to some tokens than the target's: that of "
            f"{about.get('target_name') or 'an unnamed target'}, not that of {tokenizer.name_or_path or 'this one'}; "
            "export a drafter with the target's tokenizer"
        )
    padded = graph.kind == "causal-lm" and bool(agree)  # the same tokens: sizes differ by padding
    if about.get("vocab_size") != target.vocab_size and not padded:
        raise ValueError(
            f"the graph was made for a vocabulary of {about.get('vocab_size')} tokens, the target has "
            f"{target.vocab_size}"
        )
    known = about.get("target_fingerprint")
    if known is None:
        return
    from arbordraft.heads.base import fingerprint

    if known != (found := fingerprint(target.model)):
        raise ValueError(
            f"the graph was made for another target ({about.get('target_name') or 'unnamed'}, fingerprint {known}, "
            f"this one has {found}): export the drafter again for this one"
        )


__all__ = ["FUSE", "OnnxDrafter", "OnnxHeads", "OnnxLayers"]
