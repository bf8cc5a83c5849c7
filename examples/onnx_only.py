"""Speculative sampling in onnxruntime and numpy alone: target, drafter and draw are graphs, torch is not imported.

The graphs come from three commands, for instance:

    arbordraft export onnx smollm2 graphs/target
    arbordraft export onnx early-exit:8 graphs/draft --target smollm2
    arbordraft export onnx draw graphs/draw
    python examples/onnx_only.py graphs "The capital of France is" --tokenizer tokenizer.json --temperature 0.7 --seed 1

With any drafter and tree, a seed gives the text of the toolkit's plain decoding. With
``verification:1,1 graphs/verdict`` in place of the draw, SpecHub verifies drafts that have noise of their own.

Shapes: n nodes of a step, P committed tokens in a cache, V vocabulary, k children of a node.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

HIDDEN = np.finfo(np.float32).min  # added to the scores of masked tokens


class Model:
    """A causal LM with its keys and values, for one text."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        pasts = [node for node in self.session.get_inputs() if node.name.startswith("past_key_values.")]
        self.past = {node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32) for node in pasts}

    def __len__(self) -> int:
        return next(iter(self.past.values())).shape[2]

    def run(self, tokens: Sequence[int], positions: Sequence[int], seen: np.ndarray) -> np.ndarray:
        """Returns ``[n, V]`` logits of tokens, which join the cache; ``seen`` is the ``[n, P + n]`` mask."""
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
        """Returns logits of tokens that follow the cache and see all tokens before them."""
        start, count = len(self), len(tokens)
        return self.run(tokens, range(start, start + count), np.tri(count, start + count, start, dtype=bool))

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all other rows of the cache."""
        self.past = {name: values[:, :, list(rows)] for name, values in self.past.items()}


class SharedNoise:
    """Coupling by shared noise of seed and position, which target and drafter add to rows: trees change no text.

    Args:
        path: the graph that adds the noise.
        width: children of a node.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.width = width

    def begin(self, temperature: float, seed: int) -> None:
        """Begins another text."""
        self.temperature, self.seed = temperature, np.array(seed, np.uint64).astype(np.int64)

    def children(self, logits: np.ndarray, position: int) -> np.ndarray:
        """Returns the ``[n, k]`` tokens of highest score for ``[n, V]`` draft rows, -1 where there are fewer."""
        scores = self.perturbed(logits, position)
        tokens = np.argsort(-scores, axis=-1, kind="stable")[:, : self.width]  # of equal scores, the lowest token first
        return np.where(np.take_along_axis(scores, tokens, axis=-1) > -np.inf, tokens, -1)

    def decide(
        self, logits: np.ndarray, position: int, draft_logits: np.ndarray, drawn: Sequence[int]
    ) -> tuple[int, int]:
        """Returns the place of the accepted child, -1 for none, and the emitted token, the target's own."""
        token = int(self.perturbed(logits[None], position)[0].argmax())
        return list(drawn).index(token) if token in drawn else -1, token

    def perturbed(self, logits: np.ndarray, position: int) -> np.ndarray:
        """Returns ``[n, V]`` scores of rows that predict the token at a position."""
        if self.temperature == 0:
            return logits
        feed = {
            "logits": logits,
            "seed": np.array([self.seed]),
            "position": np.array([position]),
            "temperature": np.array(self.temperature, np.float32),
        }
        return self.session.run(["scores"], feed)[0]


class Verdict:
    """Coupling that draws children by ``TopTail(tops, tails)``: the tree changes the text, not its law."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        about = self.session.get_modelmeta().custom_metadata_map
        self.tops, self.tails = (json.loads(about[f"arbordraft.{name}"]) for name in ("tops", "tails"))

    def begin(self, temperature: float, seed: int) -> None:
        """Begins another text."""
        self.temperature, self.random = temperature, np.random.default_rng(seed)

    def children(self, logits: np.ndarray, position: int) -> np.ndarray:
        """Returns ``[n, k]`` different children of ``[n, V]`` draft rows, tails first; -1 where no token remains."""
        return np.array([self.draw(row) for row in self.draft_probs(logits)])

    def draw(self, probs: np.ndarray) -> list[int]:
        """Draws ``k`` children of one row."""
        tops = np.argsort(-probs, kind="stable")[: self.tops]
        rest, tails = probs.astype(np.float64), []
        rest[tops] = 0
        for _ in range(self.tails):
            total = rest.cumsum()
            found = np.searchsorted(total, self.random.random() * total[-1], side="right") if total[-1] > 0 else -1
            tails.append(int(found))
            rest[found] = 0  # changes nothing if no token remained
        return [*tails, *(int(token) if probs[token] > 0 else -1 for token in tops)]

    def draft_probs(self, logits: np.ndarray) -> np.ndarray:
        """Returns the ``[n, V]`` probabilities from which children are drawn."""
        return softmax(logits / np.float32(self.temperature or 1))

    def decide(
        self, logits: np.ndarray, position: int, draft_logits: np.ndarray, drawn: Sequence[int]
    ) -> tuple[int, int]:
        """Returns the place of the accepted child, -1 for none, and the emitted token."""
        feed = {
            "logits": warp(logits[None], self.temperature),
            "draft_probs": self.draft_probs(draft_logits[None]),
            "draft_tokens": np.array([drawn if len(drawn) else [-1] * (self.tops + self.tails)], np.int64),
            "uniforms": self.random.random((1, self.tops + self.tails + 1)),
        }
        accepted, token = self.session.run(["accepted", "token"], feed)
        return int(accepted[0]), int(token[0])


class Tree:
    """One step's drafts: node 0 is the last committed token, every node comes after its parent."""

    def __init__(self, root: int) -> None:
        self.tokens, self.depths, self.ancestors = [root], [0], [[0]]
        self.children: list[dict[int, int]] = [{}]  # node by place among the drawn tokens
        self.drafts: dict[int, tuple[np.ndarray, Sequence[int]]] = {}  # draft row and drawn tokens of inner nodes

    def add(self, parent: int, place: int, token: int) -> int:
        """Adds a child and returns its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.depths.append(self.depths[parent] + 1)
        self.ancestors.append([*self.ancestors[parent], node])
        self.children.append({})
        self.children[parent][place] = node
        return node

    def seen(self, past: int, nodes: Sequence[int], columns: Sequence[int]) -> np.ndarray:
        """Returns the ``[nodes, past + columns]`` mask: committed tokens, a node's ancestors and the node itself."""
        own = [[column in self.ancestors[node] for column in columns] for node in nodes]
        return np.concatenate([np.ones((len(nodes), past), bool), np.array(own, bool)], axis=1)


def warp(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Returns logits of the law to sample from; at temperature 0 only the most probable token remains."""
    if temperature > 0:
        return logits / np.float32(temperature)
    best = np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]
    return np.where(best, np.float32(0), np.float32(-np.inf))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns ``[..., V]`` probabilities."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def grow(draft: Model, coupling: SharedNoise | Verdict, text: Sequence[int], depth: int) -> Tree:
    """Drafts a tree after a text, level by level."""
    tree = Tree(text[-1])
    logits = draft.read(text[len(draft) :])[-1:]  # reads all tokens committed since the last step
    fed, frontier = [], [0]
    for level in range(depth):
        fresh = []
        for node, row, drawn in zip(frontier, logits, coupling.children(logits, len(text) + level), strict=True):
            tree.drafts[node] = row, drawn
            fresh += [tree.add(node, place, int(token)) for place, token in enumerate(drawn) if token >= 0]
        frontier = fresh
        if level + 1 < depth:  # leaves draft nothing
            fed += frontier
            tokens = [tree.tokens[node] for node in frontier]
            logits = draft.run(tokens, [len(text) + level] * len(tokens), tree.seen(len(text), frontier, fed))
    draft.keep(range(len(text)))
    return tree


def walk(coupling: SharedNoise | Verdict, tree: Tree, logits: np.ndarray, position: int) -> tuple[list[int], int]:
    """Returns the accepted path and the next token, by ``[n, V]`` target rows; the root predicts ``position``."""
    path = [0]
    while True:
        row = logits[path[-1]]
        place, token = coupling.decide(row, position + len(path) - 1, *tree.drafts.get(path[-1], (row, [])))
        if place < 0:
            return path, token
        path.append(tree.children[path[-1]][place])


def load(folder: Path, width: int = 2) -> tuple[Model, Model, SharedNoise | Verdict]:
    """Loads target, drafter and coupling from a folder."""
    target, draft = (Model(folder / name / "model.onnx") for name in ("target", "draft"))
    if (folder / "verdict").exists():
        return target, draft, Verdict(folder / "verdict" / "verification.onnx")
    return target, draft, SharedNoise(folder / "draw" / "draw.onnx", width)


def decode(
    target: Model,
    draft: Model,
    coupling: SharedNoise | Verdict,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    depth: int = 3,
    seed: int = 0,
    ends: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Continues a prompt; returns the new tokens and the number of target forwards."""
    text, forwards = list(prompt), 0
    coupling.begin(temperature, seed)
    target.keep([])
    draft.keep([])
    if len(text) > 1:
        target.read(text[:-1])
    while len(text) < len(prompt) + new_tokens and not set(text[len(prompt) :]) & set(ends):
        tree = grow(draft, coupling, text, depth)
        nodes, past = range(len(tree.tokens)), len(target)
        logits = target.run(tree.tokens, [past + d for d in tree.depths], tree.seen(past, nodes, nodes))
        path, token = walk(coupling, tree, logits, len(text))
        target.keep([*range(past), *(past + node for node in path)])
        text += [*(tree.tokens[node] for node in path[1:]), token]
        forwards += 1
    new = text[len(prompt) : len(prompt) + new_tokens]
    stop = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
    return new[:stop], forwards


def main() -> None:
    """Reads the command line, decodes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the folders target, draft and draw, or verdict instead")
    parser.add_argument("prompt", help="text; token ids as in 1,2,3 where there is no tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="the target's tokenizer.json")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=3, help="of the trees, at least 1")
    parser.add_argument("--width", type=int, default=2, help="children of a node; a verdict has its own")
    parser.add_argument("--seed", type=int, default=0, help="0 to 2**64 - 1")
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
        *load(given.folder, given.width),
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
