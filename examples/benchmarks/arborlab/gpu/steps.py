"""Phase ``steps``: times of steps for known model shapes, with random weights and drafts of known acceptance.

Heads with random weights draft badly. So an oracle replays the target's own greedy tokens, with some wrong ones.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch.profiler import ProfilerActivity

from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.trees.topology import TreeTopology
from arborlab.gpu.oracle import OracleDrafter, OracleOnCopy, OracleOnHead, Recorded
from arborlab.gpu.profiling import events
from arborlab.gpu.setting import Item, Setting
from arborlab.gpu.shapes import BESIDE, CHAIN, LONG_CHAIN, ON_GPU, TREE, Decode, ShapeModel, ShapeModels

LONG = 8, 32768  # samples, and keys of each
HYBRIDS_ON_GPU = ("lfm2-350m", "granite-4-h-micro")
PROFILED = 8  # steps
_REPLAYED = 96  # tokens that oracles replay
_RECORDINGS = 3  # at most, until replaying a text changes no token


@dataclass(frozen=True)
class StepRow:
    """Time, kernels and acceptance of a step.

    Args:
        steps: ``transformers``, ``eager`` or ``recorded``.
        kernels: kernels of the layers, ``torch``, ``triton`` or ``row-invariant``; see ``RaggedModel``.
        drafts: drafts of every sample: ``none``, or those of an EAGLE head or an oracle.
        rows: rows of the target's forward, padding included.
        ms: median milliseconds from one verdict (or token) to the next; meaningless on a CPU.
        launches: kernels that a step runs on the GPU.
        busy_ms: sum of these kernels' times.
        first_s: seconds of the first decode, which compiles kernels and records graphs.
        acceptance: share of the oracle's drafts that are correct.
        accepted: share of the tried drafts that the target accepted.
        tau: emitted tokens per target forward.
        tokens_per_second: ``tau`` over ``ms``.
    """

    model: str
    steps: str
    kernels: str
    drafts: str
    rows: int
    ms: float
    launches: float | None = None
    busy_ms: float | None = None
    first_s: float | None = None
    acceptance: float | None = None
    accepted: float | None = None
    tau: float | None = None
    tokens_per_second: float | None = None

    @property
    def table(self) -> str:
        """Title of its table."""
        return self.model


class _Shape:
    """Makes the rows of one model on demand."""

    def __init__(self, models: ShapeModels, name: str, setting: Setting) -> None:
        self.models, self.name, self.setting = models, name, setting
        self.steps = 24 if setting.on_gpu else 2

    @property
    def model(self) -> ShapeModel:
        return self.models.get(self.name)

    def row(self, how: str, kernels: str, drafts: str, rows: int, decode: Decode, profiled: bool = True) -> StepRow:
        begun = time.perf_counter()
        decode(3)
        first = time.perf_counter() - begun
        found = decode(self.steps + 2)
        launches, busy = _profile(decode) if profiled and self.setting.on_gpu else (None, None)
        return StepRow(self.name, how, kernels, drafts, rows, found.ms, launches, busy, first)

    def transformers(self) -> Iterator[StepRow]:
        yield self.row("transformers", "torch", "none", 1, self.model.generated)

    def eager(self, own: bool = False) -> Iterator[StepRow]:
        target = self.model.own if own else self.model.target
        yield self.row("eager", target.backend, "none", 1, self.model.by(self.model.plain(None, target)))

    def recorded(self, rows: int, own: bool = False) -> Iterator[StepRow]:
        target = self.model.own if own else self.model.target
        yield self.row("recorded", target.backend, "none", rows, self.model.by(self.model.plain(rows, target)))

    def invariant(self, rows: int) -> Iterator[StepRow]:
        plain = self.model.plain(rows, self.model.invariant)
        yield self.row("recorded", "row-invariant", "none", rows, self.model.by(plain))

    def long(self, samples: int, keys: int, drafts: bool) -> Iterator[StepRow]:
        decode, rows = self.model.long(samples, keys, drafts), samples * (LONG_CHAIN.num_nodes if drafts else 1)
        named = f"{'chain of 7 of a copy' if drafts else 'none'}, {samples} x {keys} keys"
        yield self.row("recorded", self.model.unread.backend, named, rows, decode, profiled=False)

    def headed(self, named: str, tree: TreeTopology) -> Iterator[StepRow]:
        decode, kernels = self.model.by(self.model.drafting(tree)), self.model.target.backend
        yield self.row("recorded", kernels, f"{named} of a head", tree.num_nodes, decode)

    def lifted(self, named: str, tree: TreeTopology) -> Iterator[StepRow]:
        drafts = f"{named} of a head, drawn, lifted rejection"
        yield self.row("recorded", self.model.target.backend, drafts, tree.num_nodes, self.model.drawing(tree))

    def oracle(self, named: str, tree: TreeTopology, acceptance: float, by: str = "nothing") -> Iterator[StepRow]:
        """Yields a row of drafts of known acceptance, run on a ``head`` or a ``copy`` of the target for its cost."""
        model, count = self.model, _REPLAYED if self.setting.on_gpu else 24

        def decoder(text: list[int], rate: float) -> SpeculativeDecoder:
            recorded = Recorded([text], rate, model.model.config.vocab_size, self.setting.seed)
            drafter: Drafter = OracleDrafter(recorded)
            if by == "head":
                drafter = OracleOnHead(recorded, model.head, model.target)
            elif by == "copy":
                drafter = OracleOnCopy(recorded, model.copied)
            return SpeculativeDecoder(model.target, drafter, tree, buckets=(tree.num_nodes,))

        # In bfloat16 a step of more rows may choose another token: record the tokens of steps of this shape.
        text = model.by(model.plain())(count).text
        for _ in range(_RECORDINGS):
            again = model.by(decoder(text, 1.0))(count).text
            if again == text:
                break
            text = again
        decode = model.by(decoder(text, acceptance))
        named = f"oracle, {named}" + f" with a {by}" * (by != "nothing")
        decode(3)
        found = decode(count)
        stats = found.stats
        assert stats is not None
        tried = sum(stats.tried.values())
        yield StepRow(
            *(self.name, "recorded", model.target.backend, named, tree.num_nodes, found.ms),
            acceptance=acceptance,
            accepted=sum(stats.accepted.values()) / tried if tried else None,
            tau=stats.tau,
            tokens_per_second=1e3 * stats.tau / found.ms if self.setting.on_gpu and found.ms else None,
        )


def steps(setting: Setting) -> list[Item]:
    """Returns the items of the phase, first the most telling ones of every model."""
    models = ShapeModels(setting.device, setting.seed)
    first: list[Item] = []
    second: list[Item] = []
    for name in ON_GPU if setting.on_gpu else ("tiny",):
        shape = _Shape(models, name, setting)
        # A chain of 7 of which 0.92 are right emits 6 of at most 8 tokens.
        drafts_for_itself = {
            f"oracle of {rate}, chain with a copy": partial(shape.oracle, "chain of 7", LONG_CHAIN, rate, "copy")
            for rate in (0.92, 0.0)
        }
        samples, keys = LONG if setting.on_gpu else (2, 12)
        long = name == ON_GPU[0] or not setting.on_gpu  # the others have small caches
        extra: dict[str, Callable[[], Iterator[StepRow]]] = {
            "recorded": partial(shape.recorded, 1),
            "oracle of 0.8, chain with a head": partial(shape.oracle, "chain of 4", CHAIN, 0.8, "head"),
            **drafts_for_itself,
            "chain of a head": partial(shape.headed, "chain of 4", CHAIN),
            **({f"recorded, {samples} x {keys} keys": partial(shape.long, samples, keys, False)} if long else {}),
            "recorded, 32 rows": partial(shape.recorded, 32 if setting.on_gpu else 2),
            "recorded, row-invariant": partial(shape.invariant, 1),
            "recorded, row-invariant, 32 rows": partial(shape.invariant, 32),
            "transformers": shape.transformers,
            "eager": shape.eager,
        }
        rest: dict[str, Callable[[], Iterator[StepRow]]] = {
            **({f"chain of a copy, {samples} x {keys} keys": partial(shape.long, samples, keys, True)} if long else {}),
            "tree of a head": partial(shape.headed, "tree of 20", TREE),
            "drawn chain of a head": partial(shape.lifted, "chain of 4", CHAIN),
            "drawn tree of a head": partial(shape.lifted, "tree of 20", TREE),
            "oracle of 0.8, chain": partial(shape.oracle, "chain of 4", CHAIN, 0.8),
            "oracle of 0.6, chain with a head": partial(shape.oracle, "chain of 4", CHAIN, 0.6, "head"),
            "oracle of 0.6, tree with a head": partial(shape.oracle, "tree of 20", TREE, 0.6, "head"),
            "recorded, 8 rows": partial(shape.recorded, 8),
            "recorded, 128 rows": partial(shape.recorded, 128),
            "recorded, kernels=torch": partial(shape.recorded, 1, True),
            "eager, kernels=torch": partial(shape.eager, True),
        }
        first += [Item(f"{name}: {part}", run) for part, run in extra.items()]
        second += [Item(f"{name}: {part}", run) for part, run in rest.items()]
    if not setting.on_gpu:  # the others show nothing more on a CPU
        first = [item for item in first if "row-invariant" not in item.name and "copy" not in item.name]
        wanted = ("tree of a head", "chain", "tree with a head")
        second = [item for item in second if item.name.endswith(wanted)]
    for name in HYBRIDS_ON_GPU if setting.on_gpu else ("tiny-lfm2",):
        for named in (name, BESIDE + name):
            shape = _Shape(models, named, setting)
            parts: dict[str, Callable[[], Iterator[StepRow]]] = {
                "recorded": partial(shape.recorded, 1),
                "oracle of 0.8, chain": partial(shape.oracle, "chain of 4", CHAIN, 0.8),
                "oracle of 0.8, tree": partial(shape.oracle, "tree of 20", TREE, 0.8),
                "eager": shape.eager,
            }
            second += [Item(f"{named}: {part}", run) for part, run in parts.items()]
    return [*first, *second]


def _profile(decode: Decode) -> tuple[float, float]:
    """Returns the kernels of a step and their milliseconds, without those of the prompt."""
    launches, microseconds = (
        sum(value for event, value in values.items() if event.startswith("gpu: "))
        for values in events(decode, PROFILED, [ProfilerActivity.CUDA])
    )
    return launches / PROFILED, microseconds / PROFILED / 1e3
