"""Base classes of the networks of drafters, with a trimmed vocabulary and the fingerprint of their target.

Shapes: V vocabulary, D draft vocabulary, R rows, H hidden size.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from arbordraft.checkpoints.reader import load_network, read_config
from arbordraft.target.prepacked.probing import vocabulary
from arbordraft.utils.checks import check_float


class CompanionConfig(PreTrainedConfig):
    """Settings of all companions.

    Args:
        vocab_size: token ids of the target (V).
        target_hidden_size: hidden size of the target.
        hidden_layers: the target's hidden states that it reads, as transformers numbers them.
        target_fingerprint: fingerprint of the target that it was trained for, see :func:`fingerprint`.
        target_name: name of that target, for display.
    """

    vocab_size: int = 32000
    target_hidden_size: int = 4096
    hidden_layers: list[int] | None = None
    target_fingerprint: str | None = None
    target_name: str | None = None

    @classmethod
    def for_target(cls, model: PreTrainedModel, name: str | None, **own: Any) -> Self:
        """Builds the settings of a companion of this model; ``name`` is for display, ``own`` are further settings."""
        config: Any = model.config.get_text_config()
        return cls(
            vocab_size=vocabulary(model),
            target_hidden_size=config.hidden_size,
            target_fingerprint=fingerprint(model),
            target_name=name,
            **own,
        )


class Companion(PreTrainedModel):
    """A trained network that works beside one target."""

    config: CompanionConfig
    config_class = CompanionConfig
    main_input_name = "inputs"

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **options: Any) -> Self:  # type: ignore[override]
        """Loads a network as transformers does, but strictly: the files must hold all its weights and no others.

        Args:
            source: a folder or a hub name.
            **options: for transformers; ``dtype`` is that of the weights.

        Raises:
            ValueError: if the checkpoint is damaged, incomplete, or that of another kind of network.
        """
        if Path(source).is_dir() and (kind := read_config(source).get("model_type")) != cls.config_class.model_type:
            raise ValueError(f"{source} holds a model of type {kind!r}, not {cls.config_class.model_type!r}")
        network: Self = load_network(super().from_pretrained, source, **options)
        try:
            network.check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source} is damaged: {error}; copy it again, or train anew") from error
        return network

    def check(self) -> None:
        """Raises ValueError if settings or buffers contradict each other."""

    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError if it cannot draft for this model, or was trained for another one."""
        config = model.config.get_text_config()
        size = vocabulary(model)
        if self.config.vocab_size != size:
            raise ValueError(
                f"the drafter was made for a vocabulary of {self.config.vocab_size} tokens, the target has {size}"
            )
        if self.config.target_hidden_size != config.hidden_size:
            raise ValueError(
                f"the drafter reads hidden states of size {self.config.target_hidden_size}, the target's have "
                f"{config.hidden_size}"
            )
        last = config.num_hidden_layers
        if out_of_range := [layer for layer in self.config.hidden_layers or () if not 0 <= layer <= last]:
            raise ValueError(f"the drafter reads hidden states {out_of_range}, the target's are 0..{last}")
        known = self.config.target_fingerprint
        if known is not None and known != (digest := fingerprint(model)):
            raise ValueError(
                f"the drafter was trained for another target ({self.config.target_name or 'unnamed'}, fingerprint "
                f"{known}, this one has {digest}). It would still be lossless but rarely right. Train one for this "
                "target, or set config.target_fingerprint = None on the drafter to use it all the same"
            )


class HeadConfig(CompanionConfig):
    """Settings of all heads; see also :class:`CompanionConfig`.

    Args:
        draft_vocab_size: tokens that can be drafted (D).
        acceptance: how often the next token was the drafter's most probable one, its second, and so on. These rates are
            measured on held-out text that the target wrote greedily, and trees are fitted to them.
    """

    draft_vocab_size: int = 32000
    acceptance: list[float] | None = None


class DraftHead(Companion):
    """A companion that predicts tokens by itself.

    The draft vocabulary is stored as in EAGLE-3. ``d2t[i] + i`` is the target's id of draft token i, and ``t2d`` marks
    the tokens that can be drafted.
    """

    config: HeadConfig
    config_class = HeadConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def tokens(self) -> Tensor:
        """``[D]`` target ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def check(self) -> None:
        if problems := vocabulary_problems(self.d2t, self.t2d):
            raise ValueError(f"its draft vocabulary is damaged: {'; '.join(problems)}")
        if self.config.acceptance is not None:
            check_acceptance(self.config.acceptance, self.config.draft_vocab_size)

    def set_vocabulary(self, tokens: Sequence[int]) -> None:
        """Chooses the tokens that can be drafted.

        Raises:
            ValueError: if they are not D different ids of the target.
        """
        chosen = torch.tensor(sorted(set(tokens)))
        if len(chosen) != len(self.d2t) or chosen[0] < 0 or chosen[-1] >= len(self.t2d):
            raise ValueError(
                f"the draft vocabulary must be {len(self.d2t)} different ids below {len(self.t2d)}, got {len(chosen)}"
            )
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()
        self.t2d[chosen] = True

    def widen(self, logits: Tensor) -> Tensor:
        """Widens ``[R, D]`` draft logits to ``[R, V]``; tokens that cannot be drafted get probability 0."""
        if logits.shape[-1] == len(self.t2d):
            return logits
        wide = logits.new_full((*logits.shape[:-1], len(self.t2d)), -torch.inf)
        return wide.index_copy_(-1, self.tokens, logits)


class GatedMLP(nn.Module):
    """A gated MLP as in Llama, of hidden size H and an inner size."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., H]`` to ``[..., H]``."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp_settings(config: Any, intermediate_size: int | None) -> dict[str, Any]:
    """Returns MLP settings from a target's configuration, in which a given ``intermediate_size`` replaces its size."""
    size = intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {"intermediate_size": size, "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5)}


def vocabulary_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    """Lists the faults of a draft vocabulary: offsets ``[D]`` to the target's ids, and marks ``[V]`` of these ids."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t must be int64 and t2d bool, got {d2t.dtype} and {t2d.dtype}"]
    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(t2d):
        return [f"d2t leads to ids {int(tokens.min())}..{int(tokens.max())}, the target has {len(t2d)}"]
    if len(tokens.unique()) != len(tokens):
        return ["d2t leads two draft tokens to the same id; it holds offsets, id = index + d2t[index]"]
    if not torch.equal(t2d.nonzero().flatten(), tokens.sort().values):
        return [f"t2d marks {int(t2d.sum())} ids, which are not the {len(tokens)} that d2t leads to"]
    return []


def check_acceptance(table: Sequence[float], most: int) -> None:
    """Raises ValueError unless an acceptance table has 1 to ``most`` rates that sum to at most 1."""
    if not 1 <= len(table) <= most:
        raise ValueError(f"its acceptance table must have 1 to {most} entries, one per rank, got {len(table)}")
    rates = [check_float(f"its acceptance of rank {rank}", rate, 0, 1) for rank, rate in enumerate(table)]
    if sum(rates) > 1 + 1e-9:
        raise ValueError(f"its acceptance table sums to {sum(rates):.3f}: ranks exclude each other, so 1 is the most")


def fingerprint(model: PreTrainedModel) -> str:
    """Returns a short hash of a model's weights that survives quantisation and a change of dtype.

    It covers the model's sizes and the norms' weights in bfloat16. Quantisers keep these weights, training moves them.
    """
    config: Any = model.config.get_text_config()
    hasher = hashlib.sha256(f"{config.model_type} {config.num_hidden_layers} {config.hidden_size}".encode())
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and name.endswith(".weight"):
            hasher.update(parameter.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return hasher.hexdigest()[:16]
