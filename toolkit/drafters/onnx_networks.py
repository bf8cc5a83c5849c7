"""Exported networks of drafters, run by onnxruntime instead of torch.

Each has the inputs and outputs of the torch network that it replaces, so that drafters need not know which one they
have. The weights are in float32 or quantised, for any dtype of the target. Graphs run on the CPU.

Shapes: T packed rows, R rows with predictions, F hidden states side by side, H hidden size, D draft
vocabulary, V vocabulary, N draft heads.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.vocabulary import fit_tokens, tokenizer_hashes
from arbordraft.drafters.network import DraftNetwork, Outputs
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.onnx.graph import Graph, RaggedGraph
from arbordraft.target.attention import Attending, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel


class OnnxNetwork(nn.Module):
    """Base of the exported networks of all drafters; checks their target and maps their vocabulary.

    Args:
        graph: exported graph.
        target: model that the drafter drafts for.

    Raises:
        ValueError: if the graph is damaged, or was made for another target, vocabulary or tokenizer.
    """

    chunk = 512  # rows per run: bounds the memory of its mask and its logits
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, graph: Graph, target: RaggedModel) -> None:
        super().__init__()
        self.graph = graph
        self.check_target(target)
        self.vocab_size = target.vocab_size
        self._target_device = target.device
        self._tokens: Tensor | None = None
        if (offsets := graph.about.get("d2t")) is not None:
            self._tokens = torch.tensor(offsets) + torch.arange(len(offsets))
            ids = self._tokens.tolist()
            if len(set(ids)) != len(ids) or not 0 <= min(ids) <= max(ids) < target.vocab_size:
                raise ValueError(f"{graph.path}: its draft vocabulary is damaged; export it again")

    @property
    def acceptance(self) -> list[float] | None:
        """Rates at which the next token was the most probable one, the second, and so on; ``None`` if unknown."""
        from arbordraft.heads.base import check_acceptance

        table: list[float] | None = self.graph.about.get("acceptance")
        if table is not None:
            check_acceptance(table, self.vocab_size if self._tokens is None else len(self._tokens))
        return table

    def widen(self, logits: Tensor) -> Tensor:
        """Widens ``[..., D]`` logits to ``[..., V]`` on the target's device; other tokens get probability 0."""
        if self._tokens is not None:
            wide = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
            logits = wide.index_copy_(-1, self._tokens, logits)
        return logits.to(self._target_device)

    def check_logits(self, logits: Tensor) -> None:
        """Raises ValueError unless logits ``[..., D]`` of a first run are finite and D is that of the file."""
        if self._tokens is not None and logits.shape[-1] != len(self._tokens):
            raise ValueError(
                f"{self.graph.path} predicts {logits.shape[-1]} tokens, its draft vocabulary has {len(self._tokens)}; "
                "export it again"
            )
        if not logits.isfinite().all():
            raise ValueError(f"{self.graph.path} predicts NaN or infinity: its weights are damaged; export it again")

    def check_target(self, target: RaggedModel) -> None:
        """Raises ValueError if the graph was made for another target."""
        from arbordraft.heads.base import fingerprint

        about, tokenizer = self.graph.about, target.tokenizer
        hashes = {} if tokenizer is None else tokenizer_hashes(tokenizer)
        agree = [about[name] == value for name, value in hashes.items() if about.get(name) is not None]
        if tokenizer is not None and not all(agree):
            raise ValueError(
                f"{self.graph.path} was made for a tokenizer that gives other ids to some tokens than the target's: "
                f"that of {about.get('target_name') or 'an unnamed target'}, not that of "
                f"{tokenizer.name_or_path or 'this one'}; export a drafter with the target's tokenizer"
            )
        padded = self.graph.kind == "causal-lm" and bool(agree)  # the same tokens: sizes differ by padding
        if about.get("vocab_size") != target.vocab_size and not padded:
            raise ValueError(
                f"the graph was made for a vocabulary of {about.get('vocab_size')} tokens, the target has "
                f"{target.vocab_size}"
            )
        known = about.get("target_fingerprint")
        if known is not None and known != (actual := fingerprint(target.model)):
            raise ValueError(
                f"the graph was made for another target ({about.get('target_name') or 'unnamed'}, fingerprint {known}, "
                f"this one has {actual}): export the drafter again for this one"
            )

    def extra_repr(self) -> str:
        return f"{self.graph.kind}, quantization={self.graph.about.get('quantization')}"


class OnnxModel(OnnxNetwork, DraftNetwork):
    """Exported causal LM, or the target's first layers; replaces a drafter's :class:`RaggedModel`."""

    def __init__(self, graph: Graph, target: RaggedModel) -> None:
        super().__init__(graph, target)
        self.max_positions: int | None = graph.about.get("max_positions")
        self._run = RaggedGraph(graph)
        probe = RaggedKVCache()
        first = self._run(
            {"input_ids": torch.zeros(1, dtype=torch.int64)}, probe.lay_out([probe.open(1)], [[0]]), probe
        )
        self.check_logits(first["logits"])
        self.vocab_size = first["logits"].shape[-1]  # padding may make it more or less than the target's

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        """Returns ``[R, V']`` logits of its own V' tokens; ``hidden`` is ignored."""
        assert isinstance(ragged, Forward)
        inputs = {"input_ids": fit_tokens(tokens, self.vocab_size)}
        logits = self._run(inputs, ragged.batch, ragged.cache)["logits"]
        return Outputs(logits if rows is None else logits[rows])

    def prefill(self, prompts: Mapping[int, Sequence[int]], cache: RaggedKVCache) -> None:
        """Runs and commits tokens of several samples."""
        for _, tokens, batch in cache.portions(prompts, self.chunk):
            self._run({"input_ids": tokens}, batch, cache)


class _OnnxHead(OnnxNetwork):
    """Head on hidden states of the target; a second graph, ``fuse``, makes its input from them."""

    def __init__(self, graph: Graph, fuse: Graph, target: RaggedModel, **settings: Any) -> None:
        super().__init__(graph, target)
        self.config = SimpleNamespace(
            hidden_layers=graph.about["hidden_layers"],
            acceptance=self.acceptance,
            max_position_embeddings=graph.about["max_positions"],
            **settings,
        )
        self._run, self._fuse = RaggedGraph(graph), fuse

    def fuse(self, states: Tensor) -> Tensor:
        """Maps hidden states ``[T, F]`` of the target to ``[T, H]``."""
        return self._fuse.run({"hidden_states": states[None].float()})["fused"][0]


class OnnxEagle(_OnnxHead, DraftNetwork):
    """Exported EAGLE head; replaces a drafter's :class:`~arbordraft.heads.eagle.EagleHead`."""

    def normed(self, states: Tensor) -> Tensor:
        """Returns ``[T, F]`` states unchanged, as :meth:`fuse` norms them."""
        return states

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        """Runs packed rows, see :class:`~arbordraft.drafters.network.DraftNetwork`."""
        assert isinstance(ragged, Forward)
        assert hidden is not None
        inputs = {"input_ids": fit_tokens(tokens, self.vocab_size), "hidden_states": hidden}
        outputs = self._run(inputs, ragged.batch, ragged.cache)
        names = "logits", "last_hidden_state", "hidden_states_out"
        return Outputs(*(outputs[name] if rows is None else outputs[name][rows] for name in names))


class OnnxMedusa(OnnxNetwork):
    """Exported Medusa heads; replace a drafter's :class:`~arbordraft.heads.medusa.MedusaHead`."""

    def __init__(self, graph: Graph, target: RaggedModel) -> None:
        super().__init__(graph, target)
        self.config = SimpleNamespace(acceptance=self.acceptance, num_heads=int(graph.about["num_heads"]))
        self.check_logits(self.prepare(torch.ones(1, target.model.config.get_text_config().hidden_size)))

    def prepare(self, hidden: Tensor) -> Tensor:
        """Returns ``[R, N, D]`` logits; the graph runs all heads at once."""
        return self.graph.run({"hidden_states": hidden.float()})["logits"]

    def logits(self, prepared: Tensor, head: int) -> Tensor:
        """Returns ``[R, D]`` logits of one head."""
        return prepared[:, head]


class OnnxBlock(_OnnxHead):
    """Exported block head; replaces a drafter's :class:`~arbordraft.heads.block.BlockHead`.

    ``markov`` is the graph of the Markov term; ``None`` if the head has none.
    """

    grows_trees = False

    def __init__(self, graph: Graph, fuse: Graph, markov: Graph | None, target: RaggedModel) -> None:
        names = ("block_size", "markov_rank", "mask_token_id")
        super().__init__(graph, fuse, target, **{name: graph.about[name] for name in names})
        self._markov = markov

    def refresh(self) -> None:
        """Does nothing: a graph's weights are never written to."""

    def store(self, tokens: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> None:
        """Writes the keys and values of the batch's slots."""
        self.look_ahead(tokens, hidden, torch.zeros_like(tokens), batch, cache, tokens[:0])

    def look_ahead(
        self,
        tokens: Tensor,
        hidden: Tensor,
        depths: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[R, D]`` logits without Markov term, their ``[R, H]`` states and the term's ``[R, r]`` gates."""
        inputs = {"input_ids": fit_tokens(tokens, self.vocab_size), "hidden_states": hidden, "depths": depths}
        outputs = self._run(inputs, batch, cache)
        final = outputs["last_hidden_state"][rows]
        return outputs["logits"][rows], final, outputs["gates"][rows] if "gates" in outputs else final[:, :0]

    def condition(self, logits: Tensor, gates: Tensor, tokens: Tensor) -> Tensor:
        """Adds the Markov term of nodes with these tokens to ``[R, D]`` logits."""
        if self._markov is None:
            return logits
        return logits + self._markov.run({"input_ids": fit_tokens(tokens, self.vocab_size), "gates": gates})["logits"]
