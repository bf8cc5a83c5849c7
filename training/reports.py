"""Draws pictures and writes model cards of trained networks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arbordraft.trees.drawing import new_figure

if TYPE_CHECKING:
    from arbordraft.training.data import SelfDistillationDataModule


def acceptance_figure(curve: Sequence[Mapping[str, float]]) -> Any:
    """Draws acceptance by drafting step, one line per validation."""
    figure, axes = _figure("drafting step", "acceptance on held-out text")
    for kind, style in (("greedy", "-"), ("sampled", "--")):
        for index, point in enumerate(curve):
            steps = _by_position(point, f"val/acceptance_{kind}_pos_")
            label = f"{kind}, step {point['step']:.0f}" if index == len(curve) - 1 else None
            alpha = (index + 1) / len(curve)
            axes.plot(range(1, len(steps) + 1), steps, style, color=(0.1, 0.3, 0.6), alpha=alpha, label=label)
    axes.set_ylim(0, 1)
    if curve:
        axes.legend()
    return figure


def tau_figure(curve: Sequence[Mapping[str, float]]) -> Any:
    """Draws the expected block efficiency in the course of training."""
    figure, axes = _figure("optimizer step", "tokens per target forward, on held-out text")
    for name in sorted({name for point in curve for name in point if "tau" in name}):
        points = [(point["step"], point[name]) for point in curve if name in point]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    if curve:
        axes.legend()
    return figure


def card(kind: str, data: "SelfDistillationDataModule", metrics: Mapping[str, float]) -> str:
    """Returns a model card: the network, its data, its metrics and its use.

    Args:
        kind: name of the drafter's or decider's class.
        data: the data that it learned from.
        metrics: metrics of the last validation.
    """
    target, profile = data.spec.model, data.profile()
    rows = "\n".join(f"| {name.removeprefix('val/')} | {value:.4g} |" for name, value in sorted(metrics.items()))
    manifest = profile.get("manifest", {})
    command = "decider" if kind.endswith("Decider") else "drafter"
    arguments = '"this folder"' if command == "decider" else '"this folder", target'
    return f"""---
library_name: arbordraft
tags: [speculative-decoding, {kind.lower()}]
base_model: {target}
---
# {kind} for {target}

Trained with arbordraft by self-distillation: the target wrote all text that it learned from.

- target: {target}, fingerprint {data.description()["fingerprint"]}
- data: {profile.get("conversations")} conversations, {profile.get("answer_tokens")} answer tokens
- digest of the data: {profile.get("digest")}
- recipe: {manifest.get("recipe")}
- training: `training.yaml`, if it was started from the command line, for `arbordraft train {command} fit --config`

Output is lossless whatever this network drafts; the figures say how often it is right.

| held-out text | value |
|---|---|
{rows}

```python
from arbordraft import {kind}

{command} = {kind}.from_pretrained({arguments})
```
"""


def _by_position(point: Mapping[str, float], prefix: str) -> list[float]:
    values = {int(name.removeprefix(prefix)): value for name, value in point.items() if name.startswith(prefix)}
    return [values[position] for position in sorted(values)]


def _figure(x: str, y: str) -> tuple[Any, Any]:
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes
