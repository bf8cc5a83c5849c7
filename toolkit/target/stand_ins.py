"""Stand-ins for a model's modules that read weights prepacked for this processor.

Decoder layers that are recognised become one kernel call for all of them together; of other layers the linears, norms
and gated MLPs are replaced one by one. They take these places in our view of the model; the model itself keeps
its own modules.

Shapes: T packed rows, H hidden size.
"""

import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.kernels import native
from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights, Matrix, Norm, apply_norm
from arbordraft.kernels.prepacked_linear import LANES, prepacked_linear
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear, onednn_problem
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.adapters import has_adapters
from arbordraft.target.file_blocks import FileBlocks, groups_of
from arbordraft.target.hook import AttentionCall, Forward
from arbordraft.target.memory import available_memory, copy_bytes, move_to_file, move_together
from arbordraft.target.mlps import single
from arbordraft.target.observation import LayerCall, Observation
from arbordraft.target.probing import Unrecognised, rows_of
from arbordraft.target.recognition import Parts, same_layer, same_mlp, settings
from arbordraft.target.rotation import apart, rotations, side_by_side

KERNELS = ("auto", "native", "onednn", "torch")
# Besides prepacked modules, the kinds that treat every row by itself.
_ROWWISE = (nn.Embedding, nn.Dropout, nn.Identity)

_VERSION = operator.attrgetter("_version")

_SAMPLED = 16  # elements of every tensor that are compared whenever a cache is begun

Place = tuple[nn.Module, str, nn.Module]  # owner, name, stand-in


class PrepackedLayers(nn.Module):
    """Consecutive decoder layers of a model, in one kernel call.

    Args:
        layers: their weights, from the first to the last; none where an earlier call has computed this place.
        first: index of the first one.
        side_by_side: whether the model has the two cosines or sines of a pair of channels next to each other.
    """

    def __init__(self, layers: Sequence[LayerWeights], first: int = 0, side_by_side: bool = False) -> None:
        super().__init__()
        self.layers, self.side_by_side = list(layers), side_by_side
        self.indices = range(first, first + len(layers))
        self._runs = {len(layers): LayerRun(layers)}

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        ragged: Forward,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``, called as the model calls a layer of its own."""
        if any(isinstance(given, Tensor) for given in (attention_mask, *others)):
            raise ValueError("prepacked layers take their mask from the batch, but the model made one of its own")
        depth = self.indices.stop if ragged.depth is None else ragged.depth
        indices = self.indices[: max(0, depth - self.indices.start)]
        if not indices:
            return hidden_states
        run = self._runs.get(len(indices))
        if run is None:
            run = self._runs[len(indices)] = LayerRun(self.layers[: len(indices)])
        pools = [
            ragged.cache.pools(index, (layer.kv_heads, layer.dim), hidden_states)
            for index, layer in zip(indices, run.layers, strict=True)
        ]
        ragged.layers.update(dict.fromkeys(indices))
        wanted = [index for index in indices if index in ragged.hidden]
        taps = [indices.index(index) for index in wanted]
        tables = position_embeddings
        tables = apart(tables) if self.side_by_side and tables is not None else tables
        out, inputs = run(hidden_states, pools, tables, ragged.batch, taps)
        ragged.hidden.update(zip(wanted, inputs, strict=True))
        if indices.stop == ragged.depth:
            out = ragged.last = out if ragged.behind is None else ragged.behind(out)
        return out


class PrepackedNorm(nn.Module):
    """An RMS norm or LayerNorm, computed in float32.

    Args:
        norm: its numbers.
        epsilon: added to the mean square.
    """

    def __init__(self, norm: Norm, epsilon: float) -> None:
        super().__init__()
        self.norm, self.epsilon = norm, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        return apply_norm(x, self.norm, self.epsilon)


class PrepackedGatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` in two kernel calls.

    Args:
        gate_up: gates and inputs, interleaved.
        down: the matrix behind them.
        activation: of the gates.
    """

    def __init__(self, gate_up: Matrix, down: Matrix, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        for m, activation in ((self.gate_up, self.activation), (self.down, None)):
            x = prepacked_linear(x, m.weight, m.scale, m.bias, outputs=len(m.weight) * LANES, activation=activation)
        return x


class Prepacking:
    """All stand-ins of one model, and the proof that they still match its weights.

    Args:
        model: a view of the model whose layers ask for our attention.
        seen: what one of its forwards showed.
        backend: ``"native"`` or ``"onednn"``.
        weights: bits of the copies, see :class:`~arbordraft.RaggedModel`; ``"file"`` for a file's own blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Observation,
        backend: str,
        *,
        weights: str | None = None,
    ) -> None:
        self.backend, self.weights = backend, weights
        self.left: list[str] = []  # linears that stay as they are, with the reason
        self._parts = Parts(weights)
        self._called = seen.called
        self._head = model.get_output_embeddings()  # type: ignore[operator]
        self._proven: dict[Any, bool] = {}
        self._layers: list[LayerWeights | None] = [
            self._recognise(index, call, seen.attention.get(index), seen.batch)
            for index, call in enumerate(seen.layers)
        ]
        self.fused = sum(layer is not None for layer in self._layers)
        self._originals = [call.layer for call in seen.layers]
        self._place = seen.place
        # One call for neighbouring layers that the model hands the same tables.
        self._tables = [call.kwargs.get("position_embeddings") for call in seen.layers]
        given = enumerate(zip(map(id, self._tables), self._layers, strict=True))
        alike = [table if layer else -1 - n for n, (table, layer) in given]
        self._runs = [list(run) for _, run in itertools.groupby(range(len(alike)), alike.__getitem__)]
        self._together = self.fused > 0 and len(self._runs) == 1
        self._stand_ins: dict[nn.Module, nn.Module | None] = {
            call.layer: None for call, layer in zip(seen.layers, self._layers, strict=True) if layer
        }
        self.places = list(self._replace_below(model, ""))
        self.row_invariant = backend == "native" and 0 < self.fused == len(seen.layers) and not list(self._odd(model))
        if self._place is not None and self.fused:
            self.places.append((*self._place, nn.ModuleList(self._stack())))
        if backend == "native":
            move_together([matrix.weight for matrix in self._matrices()])
        self._watch()

    def _watch(self) -> None:
        """Notes what the weights are now; spelled out, as all of it is compared whenever a cache is begun."""
        sources = self._parts.sources
        self._holders = [source.module._parameters for source in sources], [source.parameter for source in sources]
        self._tensors = [source.tensor for source in sources]
        self._writable = [tensor for tensor in self._tensors if not isinstance(tensor, FileBlocks)]
        self._addresses = list(map(Tensor.data_ptr, self._writable))
        self._counting = [tensor for tensor in self._writable if not tensor.is_inference()]
        self._versions = list(map(_VERSION, self._counting))
        self._samples = list(map(_sampled, self._writable))
        self._fingerprint = self._read()

    def current(self) -> bool:
        """Whether the model still has the weights that were prepacked.

        What is written through ``.data``, through numpy or in inference mode counts no version. It is noticed if it
        reaches one of a few elements of each tensor, spread evenly.
        """
        return (
            all(map(operator.is_, map(dict.get, *self._holders), self._tensors))
            and list(map(_VERSION, self._counting)) == self._versions
            and list(map(Tensor.data_ptr, self._writable)) == self._addresses
            and torch.equal(self._read(), self._fingerprint)
        )

    @property
    def stack(self) -> list[LayerWeights] | None:
        """All of the model's layers, if they run in one call."""
        layers = [layer for layer in self._layers if layer is not None]
        return layers if self._together else None

    @property
    def nbytes(self) -> int:
        """Bytes of the prepacked matrices."""
        return sum(tensor.nbytes for m in self._matrices() for tensor in (m.weight, m.scale) if tensor is not None)

    def move_originals(self) -> None:
        """Leaves the prepacked weights to a file, from which whoever reads them reads them; see `move_to_file`.

        Raises:
            WriteError: if there is no room for the file.
        """
        large = {id(tensor): tensor for tensor in self._writable if tensor.ndim > 1}
        if large:
            move_to_file(list(large.values()))
            self._watch()

    def __str__(self) -> str:
        """What was prepacked, in a few words."""
        linears = sum(isinstance(module, PrepackedLinear) for module in self._stand_ins.values())
        prepacked = f"{linears} linears prepacked"
        adapted = f", adapters merged into copies of {self._parts.adapted} linears" if self._parts.adapted else ""
        if self.backend != "native":
            return prepacked + adapted
        layers = f"{self.fused} of {len(self._layers)} layers fused"
        others = f", {prepacked}" if self.fused < len(self._layers) else ""
        return f"{layers}{others}{adapted}, {native.isa()}{f', {self.weights}' if self.weights else ''}"

    def _matrices(self) -> Iterator[Matrix]:
        """The prepacked ones, in the order in which a forward reads them."""
        for layer in self._layers:
            yield from layer.matrices if layer else ()
        for stand_in in self._stand_ins.values():
            if isinstance(stand_in, PrepackedLinear):
                yield Matrix(*stand_in.prepacked)
            elif isinstance(stand_in, PrepackedGatedMLP):
                yield from (stand_in.gate_up, stand_in.down)

    def _read(self) -> Tensor:
        """Bits of the sampled elements, as NaN equals nothing."""
        if not self._samples:
            return torch.empty(0, dtype=torch.int32)
        return torch.cat(self._samples).float().view(torch.int32)

    def _stack(self) -> Iterator[nn.Module]:
        """What stands in the list of layers: of a call for several of them the first place, unless there is but one."""
        for run in self._runs:
            layers = [layer for layer in self._layers[run[0] : run[-1] + 1] if layer]
            if layers:
                yield PrepackedLayers(layers, run[0], side_by_side(self._tables[run[0]]))
            else:
                yield self._originals[run[0]]
            if not self._together:
                yield from (PrepackedLayers((), index) for index in run[1:])

    def _recognise(
        self, index: int, call: LayerCall, attention: AttentionCall | None, batch: RaggedBatch
    ) -> LayerWeights | None:
        if self.backend != "native" or attention is None:
            return None
        kind = (settings(call.layer), attention[:-1])
        try:
            for rotation in rotations(call.kwargs.get("position_embeddings")):
                if (kind, rotation) not in self._proven:
                    self._proven[kind, rotation] = same_layer(index, call, attention, batch, rotation)
                if self._proven[kind, rotation]:
                    parts = Parts(self.weights)
                    weights = parts.layer(call.layer, attention, rotation)
                    self._parts.take(parts)
                    return weights
        except Unrecognised:  # maybe this one alone, as somebody listens to it
            pass
        return None

    def _replace_below(self, module: nn.Module, path: str) -> Iterator[Place]:
        for name, child in module._modules.items():
            where = f"{path}.{name}" if path else name
            if child is None:
                continue
            if child not in self._stand_ins and (stand_in := self._stand_in(module, name, child, where)):
                self._stand_ins[child] = stand_in
            if child not in self._stand_ins:
                yield from self._replace_below(child, where)
            elif replacement := self._stand_ins[child]:  # a module may have several places
                yield module, name, replacement

    def _stand_in(self, owner: nn.Module, name: str, module: nn.Module, path: str) -> nn.Module | None:
        if module not in self._called:
            return None
        parts = Parts(self.weights)
        stand_in: nn.Module | None = None
        is_linear = rows_of(module) is not None or hasattr(module, "in_features")
        try:
            if is_linear:
                # In 4 bits, the head alone would lose ten times what all other weights lose together.
                weights = "int8" if parts.weights == "int4" and module is self._head else parts.weights
                linear = parts.linear(owner, name)
                options: Any = {
                    "groups": groups_of(linear.weight) if parts.as_stored else None,
                    "transposed": linear.weight is not linear.module.weight,
                }
                stand_in = PrepackedLinear(linear.module, self.backend, weights=weights, **options)
            elif self.backend == "native" and hasattr(module, "down_proj"):
                mlp = single(parts, module)
                same = mlp.gated and same_mlp(module, PrepackedGatedMLP)
                stand_in = PrepackedGatedMLP(mlp.gate_up, mlp.down, mlp.activation) if same else None
            elif self.backend == "native" and hasattr(module, "weight"):
                stand_in = PrepackedNorm(*parts.norm(owner, name))
        except Unrecognised as reason:
            if is_linear:
                self.left.append(f"{path} ({reason})")
            return None
        if stand_in:
            self._parts.take(parts)
        return stand_in

    def _odd(self, model: nn.Module) -> Iterator[nn.Module]:
        """Modules that ran, are still the model's own, and of which nobody says that they treat every row alike."""
        prepacked = {part for module in self._stand_ins for part in module.modules()}
        for module in model.modules():
            inner = module in prepacked or (any(module.children()) and not has_adapters(module))
            inner = inner or isinstance(module, _ROWWISE)
            if module in self._called and not inner and "RotaryEmbedding" not in type(module).__name__:
                yield module


def _sampled(tensor: Tensor) -> Tensor:
    """A few elements of a tensor, as a view of its storage."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)]


def prepack_linears(module: nn.Module, backend: str, leave: str = "") -> None:
    """Replaces all linears inside a module for good, by prepacked ones, and with native kernels also its RMS norms.

    Args:
        module: neither a linear or norm itself nor a model that others use.
        backend: ``"native"`` or ``"onednn"``.
        leave: name of a part that stays as it is.
    """
    for name, child in module.named_children():
        if name == leave:
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, PrepackedLinear(child, backend))
        elif isinstance(child, nn.RMSNorm) and backend == "native" and child.eps is not None:
            setattr(module, name, PrepackedNorm(Norm(child.weight.detach().float()), child.eps))
        else:
            prepack_linears(child, backend)


class Choice(NamedTuple):
    """How a model's weights are read.

    Args:
        backend: ``"torch"``, ``"native"`` or ``"onednn"``.
        reason: why it is no faster one; empty if there is none.
    """

    backend: str
    reason: str = ""


def choose(kernels: str, model: nn.Module, *, weights: str | None = None) -> Choice:
    """What ``kernels`` means for this model on this machine.

    Raises:
        ValueError: if the word is unknown, or a backend asked for by name cannot be used.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}")
    if kernels == "torch":
        return Choice("torch", "asked for")
    weight = next(model.parameters())
    unfit = None
    if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
        unfit = f"weights must be float32 or bfloat16 on the CPU, not {weight.dtype} on {weight.device}"
    elif kernels == "auto":
        unfit = _too_large(model, weights)
    problems: list[str] = []
    for backend in ("native", "onednn") if kernels == "auto" else (kernels,):
        # In this order: asking for the kernels may build them.
        problem = unfit or (native.problem() if backend == "native" else onednn_problem(weight.dtype))
        if problem is None:
            return Choice(backend, *(f"no native kernels: {reason}" for reason in problems))
        problems.append(problem)
    if kernels == "auto":
        if weight.is_cpu and unfit:
            warnings.warn(f"kernels='auto' uses the model's own linears: {unfit}", stacklevel=3)
        return Choice("torch", unfit or problems[0])
    raise ValueError(f"kernels={kernels!r} cannot be used: {problems[0]}")


def _too_large(model: nn.Module, weights: str | None) -> str | None:
    """Why no prepacked copy of a model's weights fits into memory, if it does not."""
    needed, free = copy_bytes(model, weights), available_memory()
    if free is None or needed <= 0.9 * free:  # caches need some, too
        return None
    return (
        f"a prepacked copy of the weights takes {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
        "kernels='native' takes them all the same"
    )


__all__ = [
    "KERNELS",
    "Choice",
    "PrepackedGatedMLP",
    "PrepackedLayers",
    "PrepackedNorm",
    "Prepacking",
    "choose",
    "prepack_linears",
]
