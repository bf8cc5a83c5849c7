"""From nothing but a target to a trained drafter and decider, with the data, the records and the proof."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from arbordraft.training.recording import RESULT


@dataclass(frozen=True)
class Demo:
    """What to train and where everything goes.

    Args:
        folder: for data, checkpoints, results and the tracker's database.
        drafter: configuration of the drafter.
        decider: configuration of the decider, ``None`` for none.
        changes: further options of ``arbordraft train drafter fit``, as on its command line.
    """

    folder: Path = Path("arbordraft-smollm2")
    drafter: str = "drafter/smollm2"
    decider: str | None = "decider/smollm2"
    changes: tuple[str, ...] = ()

    def run(self, console: Console) -> dict[str, Path]:
        """Generates, trains, and decodes a few prompts with the result.

        An interrupted run goes on where it stopped: generation at the last shard, training at the last checkpoint.

        Returns:
            Folders of the trained networks, by kind.
        """
        from arbordraft.training.cli import run
        from arbordraft.training.decider_module import DeciderModule
        from arbordraft.training.drafter_module import DrafterModule

        console.rule("drafter")
        found = {"drafter": self.folder / "drafter" / RESULT}
        run(DrafterModule, ["fit", "--config", self.drafter, *self._places("drafter"), *self.changes])
        if self.decider is not None:
            console.rule("decider")
            found["decider"] = self.folder / "decider" / RESULT
            options = [f"--model.drafter={found['drafter']}", *self._places("decider")]
            run(DeciderModule, ["fit", "--config", self.decider, *options, *self._data_changes()])
        return found

    def _places(self, kind: str) -> list[str]:
        options = [
            f"--data.folder={self.folder / 'data'}",
            f"--results.output={self.folder / kind}",
        ]
        last = self.folder / "checkpoints" / kind / "last.ckpt"
        return [*options, f"--ckpt_path={last}"] if last.exists() else options

    def _data_changes(self) -> list[str]:
        return [change for change in self.changes if change.startswith("--data.")]


def gain(console: Console, drafter: Path, prompts: Any = None, new_tokens: int = 128) -> None:
    """Decodes prompts with the trained drafter and shows what it gains over plain decoding."""
    import torch

    from arbordraft import RaggedModel
    from arbordraft.bench_drafters import drafter_gain
    from arbordraft.display import measurement_table
    from arbordraft.loading import load_drafter
    from arbordraft.pretrained import load_smollm2
    from arbordraft.prompts import MIXED, VARIED

    model, tokenizer = load_smollm2(torch.bfloat16)
    target = RaggedModel(model.eval(), tokenizer, linears="packed")
    texts = prompts or [*MIXED, *VARIED]
    found = drafter_gain(target, tokenizer, texts, {"trained": load_drafter(drafter, target)}, new_tokens=new_tokens)
    console.print(measurement_table(list(found)))
