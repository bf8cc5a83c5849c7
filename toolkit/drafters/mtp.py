"""A drafter that some models include: a layer that was trained with them to predict one token more.

Shapes: T packed rows, R rows whose predictions are wanted, H hidden size, V vocabulary.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.reader import CONFIG, few, read_tensors
from arbordraft.drafters.base import Drafter, check_ragged
from arbordraft.drafters.model_drafter import ModelDrafter
from arbordraft.drafters.network import DraftNetwork, Outputs
from arbordraft.drafters.slots import SlotDrafter
from arbordraft.target.attention import ATTENTION_NAME, Attending, UnsupportedModel, unsupported
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears
from arbordraft.target.self_test import bound_of, is_outcome, perturb

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel


class MtpDrafter(SlotDrafter, ModelDrafter):
    """Drafts with the target's own layer for multi-token prediction, as in DeepSeek-V3, GLM-4-MoE and Qwen3.5.

    Slot j holds the target's last hidden state of token j together with token j + 1, as in EAGLE. The layer was trained
    to predict one token; deeper drafts read its own output in place of the target's state. If there are several such
    layers, the first one drafts.

    Args:
        target: a model whose configuration has ``num_mtp_layers``, or whose files hold ``mtp.*`` beside it.
        layers: the module that holds the layer, as transformers or :class:`LayersBeside` builds it; by default it is
            read from the target's own files.

    Raises:
        ValueError: if the target has no such layer, its files lack the weights, or transformers is older than 5.24.
        UnsupportedModel: if the layer cannot run on packed rows.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; the layer is that of transformers' ``MtpModel``.
    """

    def __init__(self, target: RaggedModel, layers: "MtpModel | LayersBeside | None" = None) -> None:
        Drafter.__init__(self)  # skips SlotDrafter, which needs a head of ours
        check_ragged(target)
        self.target = target
        self.mtp: Any = _read(target) if layers is None else layers
        config = self.mtp.config
        vars(config)["_attn_implementation_internal"] = ATTENTION_NAME
        if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}:
            raise UnsupportedModel(f"its layer for multi-token prediction is one of {', '.join(sorted(kinds))}")
        self.mtp.eval().requires_grad_(False)
        if target.backend == "native":
            prepack_linears(self.mtp.layers)
        self.hidden_layers = (target.num_layers,)
        self.max_positions = target.max_positions or 1 << 30
        self._network = MtpNetwork(self.mtp, target)
        self._check_rows()

    def _check_rows(self) -> None:
        """Raises UnsupportedModel unless the layer runs on packed rows, each of which sees those before it."""
        cache = RaggedKVCache()
        self._network.refresh()
        tokens = torch.arange(4) % self.target.vocab_size
        hidden = torch.linspace(-1, 1, 4 * self._network.states).reshape(4, -1)
        hidden = hidden.to(self.target.device, self.target.model.dtype)
        noise = torch.Generator(hidden.device).manual_seed(0)

        def logits(hidden: Tensor, *lengths: int) -> Tensor:
            sample, rows = cache.open(4), []
            for part in torch.arange(4).split(lengths):
                batch = cache.lay_out([sample], [range(len(part))])
                rows.append(self._network.run_batch(tokens[part], hidden[part], batch, cache).logits)
                cache.commit({sample: range(len(part))})
            return torch.cat(rows)

        try:
            whole, halves = logits(hidden, 4), logits(hidden, 2, 2)
            bound = bound_of(self.target.model.dtype)
            same = is_outcome(halves, [whole], lambda: logits(perturb(hidden, noise), 4), bound)
        except UnsupportedModel:
            raise
        except Exception as failure:  # third-party modules may fail in any way
            raise unsupported(self.mtp.layers[0].mtp_block, failure) from failure
        if not same:
            raise UnsupportedModel("its layer for multi-token prediction keeps more than keys and values of its rows")


class MtpNetwork(DraftNetwork):
    """A layer for multi-token prediction, with the target's head.

    Args:
        mtp: the module that holds the layer.
        target: the model that it belongs to.
    """

    def __init__(self, mtp: Any, target: RaggedModel) -> None:
        super().__init__(target.model, target.vocab_size)
        self.mtp, self.target, self.states = mtp, target, int(mtp.config.hidden_size)
        self.native_attention = target.backend == "native"
        self._head: Any = None

    def refresh(self) -> None:
        network: Any = self.target.network()
        self._head = network.get_output_embeddings()  # prepacked if the target's is

    @torch.no_grad()
    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        assert hidden is not None
        mtp, positions = self.mtp, positions[None]
        embeddings = mtp.embed_tokens(tokens[None])
        options = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
        rotary = None if mtp.rotary_emb is None else mtp.rotary_emb(embeddings, position_ids=positions, **options)
        out = mtp.layers[0](
            embeddings,
            hidden[None].to(embeddings.dtype),
            position_embeddings=rotary,
            attention_mask=None,
            position_ids=positions,
            cache=None,
            ragged=ragged,
        )
        if mtp.use_shared_post_norm:
            out = mtp.shared_post_norm(out)
        out = out[0] if rows is None else out[0, rows]
        return Outputs(self._logits(out), out, out)

    def _logits(self, out: Tensor) -> Tensor:
        """Returns ``[R, V]`` logits of the target's head, with the scaling that some models apply before it."""
        config = self.mtp.config
        if (multiplier := getattr(config, "logits_mup_width_multiplier", None)) is not None:
            out = out / multiplier
        logits: Tensor = self._head(out)
        return logits[..., : self.target.vocab_size]


class LayersBeside(nn.Module):
    """One layer for multi-token prediction that lies beside a model as ``mtp.*``, in the form of ``MtpModel``.

    Qwen3-Next and Qwen3.5 have such a layer, and transformers has no module of it. It is an attention layer of the
    model between a projection of both inputs and a norm.

    Args:
        model: the model.
        tensors: the layer's tensors by their names in the model's files.

    Raises:
        ValueError: if these are not the tensors of one such layer.
    """

    has_per_layer_rope = use_shared_post_norm = False

    def __init__(self, model: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> None:
        from transformers.modeling_layers import MtpLayer

        super().__init__()
        decoder: Any = model.get_decoder()
        attends = next(layer for layer in decoder.layers if hasattr(layer, "self_attn"))
        config: Any = copy.deepcopy(model.config.get_text_config())
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        if hasattr(config, "mlp_only_layers"):
            config.mlp_only_layers, config.decoder_sparse_step = [], 1
        with torch.device("meta"):
            layer = MtpLayer(config, type(attends), type(attends.input_layernorm), 0)
        found = dict(_renamed(tensors))
        expected = {name: part.shape for name, part in layer.state_dict().items()}
        wrong = [f"lacks {few(names)}" for names in [expected.keys() - found.keys()] if names]
        wrong += [f"also has {few(names)}" for names in [found.keys() - expected.keys()] if names]
        wrong += [
            f"has {name} of shape {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        ]
        if wrong:
            raise ValueError(f"its layer {', '.join(wrong)}")
        layer.load_state_dict({name: part.to(model.device, model.dtype) for name, part in found.items()}, assign=True)
        self.config, self.layers = config, nn.ModuleList([layer])
        self.embed_tokens, self.rotary_emb = model.get_input_embeddings(), decoder.rotary_emb


_PARTS = {
    "mtp.fc": "eh_proj",
    "mtp.layers.0": "mtp_block",
    "mtp.norm": "post_norm",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _renamed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under the names of ``MtpLayer``, experts as stacks."""
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors.items():
        for theirs, ours in _PARTS.items():
            if name.startswith(f"{theirs}."):
                name = ours + name.removeprefix(theirs)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(expert[1], {})[expert[3], int(expert[2])] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        stacks = [[parts[part, at] for at in range(len(parts) // 3)] for part in ("gate", "up", "down")]
        gates, ups, downs = map(torch.stack, stacks)
        yield f"{name}.gate_up_proj", torch.cat([gates, ups], dim=1)
        yield f"{name}.down_proj", downs


def has_mtp(target: RaggedModel) -> bool:
    """Tells whether a model may have layers for multi-token prediction: in its configuration, or beside it in files."""
    return bool(getattr(target.model.config.get_text_config(), "num_mtp_layers", None)) or _beside(target.model)


def _beside(model: Any) -> bool:
    """Tells whether files of a model may hold such a layer that transformers passes over."""
    return "^mtp.*" in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _read(target: RaggedModel) -> "MtpModel | LayersBeside":
    """Reads the layers from the target's own files."""
    name = type(target.model).__name__
    if not has_mtp(target):
        raise ValueError(
            f"{name} has no layer for multi-token prediction (num_mtp_layers in its configuration): draft with another "
            "drafter, such as 'self' or 'ngram'"
        )
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError("drafter 'mtp' needs transformers 5.24 or newer: pip install -U transformers") from error
    place = target.model.config.name_or_path or ""
    try:
        if _beside(target.model):
            return LayersBeside(target.model, read_tensors(_folder(place), "mtp."))
        found = MtpModel.from_pretrained(target.model)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{place!r} does not hold the layers for multi-token prediction of {name}: {error}") from error
    return found


def _folder(place: str) -> Path:
    """Returns the folder of a model's files, which were read already if it has the name of a hub."""
    from transformers.utils.hub import cached_file

    if not place:
        raise ValueError("the model was made in memory")
    folder = Path(place) if Path(place).is_dir() else Path(str(cached_file(place, CONFIG))).parent
    if not (folder / CONFIG).is_file():
        raise ValueError(
            "it is the folder of a GGUF file, whose layers for predictions (nextn) are not read: load the model's "
            "safetensors folder"
        )
    return folder


__all__ = ["LayersBeside", "MtpDrafter", "has_mtp"]
