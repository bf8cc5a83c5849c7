"""Puts prepacked modules into a view of a model.

Recognised decoder layers become one kernel call for all of them together. In other layers, linears, norms and gated
MLPs are replaced one by one. Only our view of the model changes; the model itself keeps its own modules.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from arbordraft.kernels import native
from arbordraft.kernels.decoder_layers import LayerWeights, Matrix
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import AttentionCall
from arbordraft.target.observation import LayerCall, Observation
from arbordraft.target.prepacked.adapters import has_adapters
from arbordraft.target.prepacked.memory import copy_bytes, drop_originals, in_file, move_to_file
from arbordraft.target.prepacked.mlps import single
from arbordraft.target.prepacked.prepacked_modules import PrepackedGatedMLP, PrepackedLayers, PrepackedNorm
from arbordraft.target.prepacked.probing import Unrecognised, is_linear
from arbordraft.target.prepacked.recognition import layers_of, same_layer, same_mlp, settings
from arbordraft.target.prepacked.rotation import RotaryTables, rotary_tables, rotations, side_by_side
from arbordraft.target.prepacked.row_wise import is_rotary
from arbordraft.target.prepacked.weight_collector import WeightCollector
from arbordraft.utils.pages import LargePages

_PADDING = 1 << 20  # bytes for the alignment of matrices
# Kinds that treat every row by itself, besides prepacked modules.
_ROWWISE = (nn.Embedding, nn.Dropout, nn.Identity)

Place = tuple[nn.Module, str, nn.Module]  # owner, name, prepacked module


class Prepacking:
    """All prepacked modules of one model.

    Args:
        model: a view of the model whose layers call our attention.
        seen: record of one of its forwards.
        weights: bits of the copies, see :class:`~arbordraft.RaggedModel`; ``"file"`` for a file's own blocks.
        head: the model's head if it is prepacked already; it is shared.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Observation,
        *,
        weights: str | None = None,
        head: PrepackedLinear | None = None,
    ) -> None:
        self.weights = weights
        self._shared = head
        self.left: list[str] = []  # linears that stay as they are, with the reason
        self._collector = WeightCollector(weights)
        self._pages = LargePages(copy_bytes(model, weights) * 9 // 8 + _PADDING)
        self._called = seen.called
        self._head = model.get_output_embeddings()  # type: ignore[operator]
        self._proven: dict[Any, bool] = {}
        self._layers: list[list[LayerWeights]] = [  # none of a layer that stays as it is
            self._recognise(index, call, seen.attention.get(index), seen.batch)
            for index, call in enumerate(seen.layers)
        ]
        self.fused = sum(map(bool, self._layers))
        self._originals, self._rest = [call.layer for call in seen.layers], [call.rest for call in seen.layers]
        self._place = seen.place
        # One call for neighbouring layers to which the model hands the same tables.
        self._tables = [call.kwargs.get("position_embeddings") for call in seen.layers]
        given = enumerate(zip(map(id, self._tables), self._layers, strict=True))
        alike = [table if layers else -1 - n for n, (table, layers) in given]
        self._runs = [list(run) for _, run in itertools.groupby(range(len(alike)), alike.__getitem__)]
        self._together = self.fused > 0 and len(self._runs) == 1
        self._positions = seen.batch.positions
        self._prepacked_modules: dict[nn.Module, nn.Module | None] = {
            call.layer: None for call, layers in zip(seen.layers, self._layers, strict=True) if layers
        }
        self.places = list(self._replace_below(model, ""))
        self.row_invariant = 0 < self.fused == len(seen.layers) and not list(self._odd(model))
        if self._place is not None and self.fused:
            self.places.append((*self._place, nn.ModuleList(self._stack())))

    @property
    def copied(self) -> set[int]:
        """Ids of the weights whose copies a running decode keeps; a prepacked linear follows its weights."""
        followed = {id(tensor) for module in self._linears() for tensor in (module.weight, module.bias)}
        return {id(tensor) for tensor in self._collector.sources} - followed

    @property
    def stack(self) -> list[LayerWeights] | None:
        """All of the model's layers, if they run in one call."""
        return list(itertools.chain(*self._layers)) if self._together else None

    def layers(self) -> tuple[list[LayerWeights], list[RotaryTables]] | None:
        """Returns all layers and their rotary tables; ``None`` unless all are fused and know the positions of rows.

        Those with attention know them by rotation; without it, only if there are recurrent layers, too.
        """
        given = {id(table): table for table in self._tables if table is not None}
        places = {table: place for place, table in enumerate(given)}
        layers = [
            replace(layer, table=places.get(id(table), 0))
            for own, table in zip(self._layers, self._tables, strict=True)
            for layer in own
        ]
        recurrent = any(layer.recurrence is not None for layer in layers)
        if self.fused < len(self._layers) or not (recurrent or all(table is not None for table in self._tables)):
            return None
        return layers, [rotary_tables(self._positions, table) for table in given.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the prepacked matrices, without a shared head."""
        return sum(tensor.nbytes for m in self._matrices() for tensor in (m.weight, m.scale) if tensor is not None)

    def drop_originals(self) -> None:
        """Takes original weights that lie unchanged in mapped files out of memory."""
        drop_originals(self._collector.sources)

    def move_originals(self) -> None:
        """Moves original weights that do not lie in a file already to a memory-mapped one; see `move_to_file`.

        Raises:
            WriteError: if there is no room for the file.
        """
        sources = [tensor for tensor in self._collector.sources if not in_file(tensor)]
        if large := {id(tensor): tensor for tensor in sources if tensor.ndim > 1}:
            move_to_file(list(large.values()))

    def __str__(self) -> str:
        """Returns a short summary of the prepacked modules."""
        prepacked = f"{len(list(self._linears()))} linears prepacked"
        adapted = (
            f", adapters merged into copies of {self._collector.adapted} linears" if self._collector.adapted else ""
        )
        left = f", {len(self.left)} linears left to the model, such as {self.left[0]}" if self.left else ""
        layers = f"{self.fused} of {len(self._layers)} layers fused"
        others = f", {prepacked}" if self.fused < len(self._layers) else ""
        return f"{layers}{others}{adapted}{left}, {native.isa()}{f', {self.weights}' if self.weights else ''}"

    def _matrices(self) -> Iterator[Matrix]:
        """Yields the prepacked matrices in the order in which a forward reads them."""
        for layer in itertools.chain(*self._layers):
            yield from layer.matrices
        for prepacked_module in self._prepacked_modules.values():
            if prepacked_module is self._shared:
                continue
            yield from _matrices_of(prepacked_module)

    def _linears(self) -> Iterator[PrepackedLinear]:
        for module in self._prepacked_modules.values():
            if isinstance(module, PrepackedLinear):
                yield module

    def _stack(self) -> Iterator[nn.Module]:
        """Yields the new layers: a call per fused run, then empty layers unless one call runs all; others stay."""
        for run in self._runs:
            layers = list(itertools.chain(*self._layers[run[0] : run[-1] + 1]))
            if layers:
                beside = side_by_side(self._tables[run[0]])
                yield PrepackedLayers(layers, run[0], beside, self._rest[run[0]], _plain(self._originals[run[0]]))
            else:
                yield self._originals[run[0]]
            if not self._together:
                yield from (
                    PrepackedLayers((), index, rest=self._rest[index], settings=_plain(self._originals[index]))
                    for index in run[1:]
                )

    def _recognise(
        self, index: int, call: LayerCall, attention: AttentionCall | None, batch: RaggedBatch
    ) -> list[LayerWeights]:
        if any(value is not None for value in call.rest or ()):
            return []
        kind = (settings(call.layer), attention and attention[:-1])
        tables = None if attention is None else call.kwargs.get("position_embeddings")
        try:
            for rotation in rotations(tables):
                if (kind, rotation) not in self._proven:
                    self._proven[kind, rotation] = same_layer(index, call, attention, batch, rotation)
                if self._proven[kind, rotation]:
                    collector = WeightCollector(self.weights, self._pages.empty)
                    with self._pages.given_back():
                        weights = layers_of(collector, call.layer, attention, rotation)
                    self._done(collector)
                    return weights
        except Exception:  # modules of users may fail in any way when inspected: this one runs as it is
            pass
        return []

    def _done(self, collector: WeightCollector) -> None:
        """Records the weights of a packed module and takes mapped originals out of memory."""
        self._collector.take(collector)
        drop_originals(collector.sources)

    def _replace_below(self, module: nn.Module, path: str) -> Iterator[Place]:
        for name, child in module._modules.items():
            where = f"{path}.{name}" if path else name
            if child is None:
                continue
            if child not in self._prepacked_modules and (
                prepacked_module := self._prepacked_module(module, name, child, where)
            ):
                self._prepacked_modules[child] = prepacked_module
            if child not in self._prepacked_modules:
                yield from self._replace_below(child, where)
            elif replacement := self._prepacked_modules[child]:  # a module may have several places
                yield module, name, replacement

    def _prepacked_module(self, owner: nn.Module, name: str, module: nn.Module, path: str) -> nn.Module | None:
        if module not in self._called:
            return None
        if module is self._head and self._shared is not None:
            return self._shared
        # In 4 bits, the head alone would lose ten times as much as all other weights together.
        weights = "int8" if self.weights == "int4" and module is self._head else self.weights
        collector = WeightCollector(weights, self._pages.empty)
        prepacked_module: nn.Module | None = None
        try:
            if is_linear(module):
                linear = collector.linear(owner, name)
                packed, transposed = collector.rows([linear.weight]), linear.weight is not linear.module.weight
                prepacked_module = PrepackedLinear(
                    linear.module, weights=weights, packed=(packed.weight, packed.scale), transposed=transposed
                )
            elif hasattr(module, "down_proj"):
                mlp = single(collector, module)
                same = mlp.gated and same_mlp(module, PrepackedGatedMLP)
                prepacked_module = PrepackedGatedMLP(mlp.gate_up, mlp.down, mlp.activation) if same else None
            elif hasattr(module, "weight"):
                prepacked_module = PrepackedNorm(*collector.norm(owner, name), module._parameters["weight"])
        except Exception as reason:  # as above
            if is_linear(module):
                self.left.append(f"{path} ({reason if isinstance(reason, Unrecognised) else repr(reason)})")
            return None
        if prepacked_module:
            self._done(collector)
        return prepacked_module

    def _odd(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yields modules that ran, are still the model's own and are not known to treat every row by itself."""
        prepacked = {part for module in self._prepacked_modules for part in module.modules()}
        for module in model.modules():
            calls = not self._called.isdisjoint(module.children())  # a module that calls no child may read its tensors
            inner = module in prepacked or (calls and not has_adapters(module))
            inner = inner or isinstance(module, _ROWWISE) or is_rotary(module)
            if module in self._called and not inner:
                yield module


def _plain(layer: nn.Module) -> dict[str, Any]:
    """Returns a layer's plain attributes."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, (str, int, float))}


def _matrices_of(module: nn.Module | None) -> Iterator[Matrix]:
    """Yields the matrices of a prepacked module other than a layer."""
    if isinstance(module, PrepackedLinear):
        yield Matrix(*module.prepacked)
    elif isinstance(module, PrepackedGatedMLP):
        yield from (module.gate_up, module.down)


__all__ = ["Prepacking"]
