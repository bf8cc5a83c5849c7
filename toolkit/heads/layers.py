"""Decoder layers as in Llama and Qwen3, for heads that read the target's hidden states.

Shapes: ... any leading sizes, X input size, H hidden size, Hq/Hkv heads, C head size.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import rotate_half

from arbordraft.heads.base import DraftHead, GatedMLP, HeadConfig, mlp_settings


class LayersConfig(HeadConfig):
    """Settings of a head's layers; see also :class:`~arbordraft.heads.base.HeadConfig`.

    Args:
        hidden_size: H.
        intermediate_size: inner size of the MLP.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv.
        head_dim: C.
        rms_norm_eps: epsilon of the norms.
        rope_theta: base of the rotary embedding.
        rope_parameters: transformers' parameters of another kind of rotary embedding; ``rope_theta`` by default.
        max_position_embeddings: length of the longest text.
        num_hidden_layers: number of layers.
        qk_norm: whether every head's query and key is normed, as in Qwen3.
        attention_bias: whether queries, keys and values have a bias.
    """

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    qk_norm: bool = False
    attention_bias: bool = False


def layer_settings(config: Any, intermediate_size: int | None) -> dict[str, Any]:
    """Returns layer settings from a target's configuration, with another size of the MLP if given."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "max_position_embeddings": config.max_position_embeddings,
        **mlp_settings(config, intermediate_size),
    }


class Attention(nn.Module):
    """Projections of an attention that callers compute.

    Args:
        config: sizes.
        inputs: X.
    """

    def __init__(self, config: LayersConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(inputs, heads * dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps)


class Layer(nn.Module):
    """A layer that reads hidden states, with or without embeddings beside them.

    Args:
        config: sizes.
        embeddings: size of the embeddings; 0 for none. If there are any, ``input_layernorm`` norms them, and
            ``hidden_norm`` norms the states.
    """

    hidden_norm: nn.RMSNorm
    input_layernorm: Any

    def __init__(self, config: LayersConfig, embeddings: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(embeddings or config.hidden_size, config.rms_norm_eps)
        if embeddings:
            self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, embeddings + config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Returns its ``[..., H]`` output for its input and the attention's output ``[..., Hq * C]``."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LayeredHead(DraftHead):
    """A head of layers that compute no attention: callers pass its inputs to their own attention."""

    config: LayersConfig
    config_class = LayersConfig
    layers: Any  # its layers, from the first to the last

    def __init__(self, config: LayersConfig) -> None:
        super().__init__(config)
        self._frequencies: Tensor | None = None  # of the rotary embedding, computed at their first use
        self._factor = 1.0

    def project(self, attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Projects normed inputs ``[..., X]`` to ``[..., Hq, C]`` queries, ``[..., Hkv, C]`` keys and values.

        Args:
            attention: projections of the layer.
            x: the inputs.
            rotary: result of :meth:`rotary` for their positions.
        """
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(x).unflatten(-1, (-1, self.config.head_dim)) for project in projections)
        if self.config.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        rotated = apply_rotary(torch.cat([query, key], dim=-2), rotary)
        return *rotated.split([query.shape[-2], key.shape[-2]], dim=-2), value

    def finish(self, hidden: Tensor, attended: Tensor, layer: int = 0) -> Tensor:
        """Returns a layer's ``[..., H]`` output for its input and the attention's output ``[..., Hq * C]``."""
        out: Tensor = self.layers[layer].finish(hidden, attended)
        return out

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines ``[..., 1, C]`` of positions ``[...]``."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            frequencies, self._factor = self.frequencies(positions.device)
            self._frequencies = frequencies.repeat(2)
        angles = positions[..., None, None].float() * self._frequencies
        return (self._factor * angles.cos()).to(dtype), (self._factor * angles.sin()).to(dtype)

    def frequencies(self, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """Returns ``[C / 2]`` float32 rotary frequencies, and the factor of their cosines and sines."""
        config = self.config
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind == "default":
            theta = (config.rope_parameters or {}).get("rope_theta", config.rope_theta)
            half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
            return (theta**-half).float(), 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device(device))
        return frequencies.float(), float(factor)


@torch.no_grad()
def take_over(
    layer: nn.Module, model: PreTrainedModel, number: int, like: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Copies the weights of a model's layer that match in name and shape.

    Args:
        layer: the layer to initialise.
        model: a decoder like Llama; of another one nothing may fit.
        number: number of the model's layer.
        like: by parameter, the name of the weight that it takes instead; empty for none.
    """
    place = f".layers.{number}."
    given = {name.split(place)[1]: tensor for name, tensor in model.named_parameters() if place in name}
    for name, parameter in layer.named_parameters():
        weight = given.get(like.get(name, name))
        if weight is None:
            continue
        if weight.shape == parameter.shape:
            parameter.copy_(weight)
        elif parameter.dim() == 2 and (len(weight), 2 * weight.shape[1]) == tuple(parameter.shape):
            parameter.copy_(torch.cat([weight / 2, weight], dim=1))  # embeddings, hidden states


@torch.no_grad()
def take_over_norm(norm: nn.RMSNorm, model: PreTrainedModel) -> None:
    """Copies the weight of a model's last norm, if it fits."""
    named = model.named_parameters()
    norms = [t for n, t in named if n.endswith("norm.weight") and ".layers." not in n and t.dim() == 1]
    if norms and norms[-1].shape == norm.weight.shape:
        norm.weight.copy_(norms[-1])


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates ``[..., heads, C]`` by cosines and sines."""
    cosine, sine = rotary
    return x * cosine + rotate_half(x) * sine
