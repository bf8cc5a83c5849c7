"""What the networks behind drafters share: a trimmed vocabulary, and the fingerprint of the target they belong to.

Shapes: V vocabulary, D draft vocabulary, R rows, H hidden size.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from arbordraft.kernels.decoder_layers import rms_norm


class CompanionConfig(PreTrainedConfig):
    """Settings that all companions have.

    Args:
        vocab_size: token ids of the target (V).
        target_hidden_size: hidden size of the target.
        hidden_layers: the target's hidden states that it reads, as transformers numbers them.
        target_fingerprint: of the target it was trained for, see :func:`fingerprint`.
        target_name: its name, for people.
    """

    vocab_size: int = 32000
    target_hidden_size: int = 4096
    hidden_layers: list[int] | None = None
    target_fingerprint: str | None = None
    target_name: str | None = None


class Companion(PreTrainedModel):
    """A trained network that works beside one target."""

    config: CompanionConfig
    config_class = CompanionConfig
    main_input_name = "inputs"

    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError if it cannot draft for this model, or was trained for another one."""
        config = model.config.get_text_config()
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if self.config.vocab_size != vocabulary:
            raise ValueError(
                f"the drafter was made for a vocabulary of {self.config.vocab_size} tokens, the target has {vocabulary}"
            )
        if self.config.target_hidden_size != config.hidden_size:
            raise ValueError(
                f"the drafter reads hidden states of size {self.config.target_hidden_size}, the target's have "
                f"{config.hidden_size}"
            )
        known = self.config.target_fingerprint
        if known is not None and known != (found := fingerprint(model)):
            raise ValueError(
                f"the drafter was trained for another target ({self.config.target_name or 'unnamed'}, fingerprint "
                f"{known}, this one has {found}). It would still be lossless but rarely right. Train one for this "
                "target, or set config.target_fingerprint = None on the drafter to use it all the same"
            )


class HeadConfig(CompanionConfig):
    """Settings that all heads have; see also :class:`CompanionConfig`.

    Args:
        draft_vocab_size: tokens that can be drafted (D).
        acceptance: how often, on held-out text that the target wrote greedily, the next token was the drafter's most
            probable one, its second, and so on: what trees are fitted to.
    """

    draft_vocab_size: int = 32000
    acceptance: list[float] | None = None


class DraftHead(Companion):
    """A companion that predicts tokens by itself.

    The draft vocabulary is stored as EAGLE-3 does: ``d2t[i] + i`` is the target's id of draft token i, and ``t2d``
    marks the tokens that can be drafted.
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
        """``[R, D]`` draft logits as ``[R, V]``: a token that cannot be drafted has probability 0."""
        if logits.shape[-1] == len(self.t2d):
            return logits
        wide = logits.new_full((*logits.shape[:-1], len(self.t2d)), -torch.inf)
        return wide.index_copy_(-1, self.tokens, logits)


class RMSNorm(nn.Module):
    """A norm as Llama's, under its name of the weight.

    Args:
        size: H.
        epsilon: added to the mean square.
    """

    native = False  # use the C++ kernel, which has no gradient

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def run_natively(self) -> None:
        """From now on uses the C++ kernel, with a weight in float32."""
        self.float()
        self.native = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``, computed in float32."""
        if self.native:
            return rms_norm(x, self.weight, self.epsilon)
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.epsilon).to(x.dtype)


class GatedMLP(nn.Module):
    """A gated MLP as Llama's.

    Args:
        size: H.
        inner: its inner size.
    """

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def fingerprint(model: PreTrainedModel) -> str:
    """A short name for a model's weights that survives quantisation and a change of dtype.

    It is made of shapes and of the norms' weights in bfloat16, which quantisers leave as they are and training moves.
    """
    config: Any = model.config.get_text_config()
    found = hashlib.sha256(f"{config.model_type} {config.num_hidden_layers} {config.hidden_size}".encode())
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and name.endswith(".weight"):
            found.update(parameter.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]
