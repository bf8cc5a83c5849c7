"""Speculative sampling in onnxruntime and numpy alone: target, drafter and verdict are graphs, torch is not imported.

The graphs come from three commands, for instance:

    arbordraft export onnx smollm2 graphs/target
    arbordraft export onnx early-exit:8 graphs/draft --target smollm2
    arbordraft export onnx verification:1,1 graphs/verdict
    python examples/onnx_only.py graphs "The capital of France is" --tokenizer tokenizer.json

Shapes: n nodes of a step, P committed tokens in a cache, V vocabulary, k children of a node.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

HIDDEN = np.finfo(np.float32).min  # added to a score that must not count


class Model:
    """A causal LM with its keys and values, for one text."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        pasts = [node for node in self.session.get_inputs() if node.name.startswith("past_key_values.")]
        self.past = {node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32) for node in pasts}

    def __len__(self) -> int:
        return next(iter(self.past.values())).shape[2]

    def run(self, tokens: Sequence[int], positions: Sequence[int], seen: np.ndarray) -> np.ndarray:
        """``[n, V]`` logits of tokens that see ``[n, P + n]`` of the cache and of each other; they join the cache."""
        names = [node.name for node in self.session.get_outputs()]
        feed = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": np.array([positions], np.int64),
            "attention_mask": np.where(seen, np.float32(0), HIDDEN)[None, None],
        }
        outputs = dict(zip(names, self.session.run(None, feed | self.past), strict=True))
        self.past = {name: outputs[name.replace("past_key_values", "present")] for name in self.past}
        return outputs["logits"][0]

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """The same for tokens that follow what is in the cache."""
        start, count = len(self), len(tokens)
        return self.run(tokens, range(start, start + count), np.tri(count, start + count, start, dtype=bool))

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all other rows of the cache."""
        self.past = {name: values[:, :, list(rows)] for name, values in self.past.items()}


class Verdict:
    """What becomes of every node's children, which were drawn by ``TopTail(tops, tails)``."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        about = self.session.get_modelmeta().custom_metadata_map
        self.tops, self.tails = (json.loads(about[f"arbordraft.{name}"]) for name in ("tops", "tails"))

    def draw(self, probs: np.ndarray, random: np.random.Generator) -> list[int]:
        """``k`` different children of a row, tails first; -1 where no token is left to draw."""
        tops = np.argsort(-probs, kind="stable")[: self.tops]
        rest, tails = probs.astype(np.float64), []
        rest[tops] = 0
        for _ in range(self.tails):
            total = rest.cumsum()
            token = int(np.searchsorted(total, random.random() * total[-1], side="right")) if total[-1] > 0 else -1
            tails.append(token)
            rest[token] = 0  # of a row without tokens this changes nothing
        return [*tails, *(int(token) if probs[token] > 0 else -1 for token in tops)]

    def __call__(
        self, logits: np.ndarray, draft_probs: np.ndarray, draft_tokens: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """``[n]`` the accepted child of every node, -1 for none, and ``[n]`` the token that is emitted there."""
        feed = {
            "logits": logits,
            "draft_probs": draft_probs,
            "draft_tokens": draft_tokens,
            "uniforms": random.random((len(logits), self.tops + self.tails + 1)),
        }
        accepted, token = self.session.run(["accepted", "token"], feed)
        return accepted, token


class Tree:
    """One step's drafts: node 0 is the last committed token, every node stands behind its parent."""

    def __init__(self, root: int) -> None:
        self.tokens, self.depths, self.ancestors = [root], [0], [[0]]
        self.children: list[dict[int, int]] = [{}]  # place among the drawn tokens: node

    def add(self, parent: int, place: int, token: int) -> int:
        """A child; returns its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.depths.append(self.depths[parent] + 1)
        self.ancestors.append([*self.ancestors[parent], node])
        self.children.append({})
        self.children[parent][place] = node
        return node

    def seen(self, past: int, nodes: Sequence[int], columns: Sequence[int]) -> np.ndarray:
        """``[nodes, past + columns]``: the committed tokens, and of the columns a node's ancestors and itself."""
        own = [[column in self.ancestors[node] for column in columns] for node in nodes]
        return np.concatenate([np.ones((len(nodes), past), bool), np.array(own, bool)], axis=1)


def warp(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Logits of the law to sample from; at temperature 0 only the most probable token remains."""
    if temperature > 0:
        return logits / np.float32(temperature)
    best = np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]
    return np.where(best, np.float32(0), np.float32(-np.inf))


def softmax(logits: np.ndarray) -> np.ndarray:
    """``[..., V]`` probabilities."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def grow(
    draft: Model, verdict: Verdict, text: Sequence[int], depth: int, temperature: float, random: np.random.Generator
) -> tuple[Tree, np.ndarray, np.ndarray]:
    """Drafts a tree behind a text, level by level; its ``[n, V]`` draft rows and ``[n, k]`` drawn tokens as well."""
    tree, rows, drawn = Tree(text[-1]), {}, {}
    logits = draft.read(text[len(draft) :])[-1:]  # all that was committed since the last step
    fed, frontier = [], [0]
    for _ in range(depth):
        fresh = []
        for node, probs in zip(frontier, softmax(logits / np.float32(temperature or 1)), strict=True):
            rows[node], drawn[node] = probs, verdict.draw(probs, random)
            fresh += [tree.add(node, place, token) for place, token in enumerate(drawn[node]) if token >= 0]
        frontier = fresh
        if tree.depths[frontier[0]] < depth:  # leaves draft nothing
            fed += frontier
            positions = [len(text) - 1 + tree.depths[node] for node in frontier]
            tokens = [tree.tokens[node] for node in frontier]
            logits = draft.run(tokens, positions, tree.seen(len(text), frontier, fed))
    draft.keep(range(len(text)))
    width = verdict.tops + verdict.tails
    nothing = np.zeros_like(rows[0]), [-1] * width
    nodes = range(len(tree.tokens))
    probs = np.stack([rows.get(node, nothing[0]) for node in nodes])
    return tree, probs, np.array([drawn.get(node, nothing[1]) for node in nodes], np.int64)


def load(folder: Path) -> tuple[Model, Model, Verdict]:
    """Target, drafter and verdict of a folder."""
    target, draft = (Model(folder / name / "model.onnx") for name in ("target", "draft"))
    return target, draft, Verdict(folder / "verdict" / "verification.onnx")


def decode(
    target: Model,
    draft: Model,
    verdict: Verdict,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    depth: int = 3,
    seed: int = 0,
    ends: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Continues a prompt; returns the new tokens and how many forwards of the target they took."""
    text, forwards, random = list(prompt), 0, np.random.default_rng(seed)
    target.keep([])
    draft.keep([])
    if len(text) > 1:
        target.read(text[:-1])
    while len(text) < len(prompt) + new_tokens and not set(text[len(prompt) :]) & set(ends):
        tree, rows, drawn = grow(draft, verdict, text, depth, temperature, random)
        nodes, past = range(len(tree.tokens)), len(target)
        logits = target.run(tree.tokens, [past + d for d in tree.depths], tree.seen(past, nodes, nodes))
        accepted, emitted = verdict(warp(logits, temperature), rows, drawn, random)
        path = [0]
        while (place := int(accepted[path[-1]])) >= 0:
            path.append(tree.children[path[-1]][place])
        target.keep([*range(past), *(past + node for node in path)])
        text += [*(tree.tokens[node] for node in path[1:]), int(emitted[path[-1]])]
        forwards += 1
    new = text[len(prompt) : len(prompt) + new_tokens]
    stop = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
    return new[:stop], forwards


def main() -> None:
    """Reads the command line, decodes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the folders target, draft and verdict")
    parser.add_argument("prompt", help="text; token ids as in 1,2,3 where there is no tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="the target's tokenizer.json")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=3, help="of the trees, at least 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ends", default="", help="ids of the tokens that end a text, as in 0,2")
    given = parser.parse_args()
    tokenizer = None
    if given.tokenizer is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(given.tokenizer))
    prompt = (
        [int(token) for token in given.prompt.split(",")] if tokenizer is None else tokenizer.encode(given.prompt).ids
    )
    tokens, forwards = decode(
        *load(given.folder),
        prompt,
        given.new_tokens,
        temperature=given.temperature,
        depth=given.depth,
        seed=given.seed,
        ends=[int(token) for token in given.ends.split(",") if token],
    )
    print(",".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens))
    print(f"{len(tokens) / forwards:.2f} tokens per forward of the target")


if __name__ == "__main__":
    main()
