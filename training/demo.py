"""From nothing but a target to a trained drafter and decider, with the data, the records and a taste of the gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True)
class Demo:
    """What to train and where everything goes.

    Args:
        folder: for data, results and checkpoints.
        conversations: how many to generate; by default what the configuration says.
        drafter: configuration of the drafter.
        decider: configuration of the decider.
        options: further ones of ``arbordraft train``, for both.
    """

    folder: Path = Path("arbordraft-smollm2")
    conversations: int | None = None
    drafter: str = "drafter/smollm2"
    decider: str = "decider/smollm2"
    options: Sequence[str] = ()

    def run(self, console: Console) -> dict[str, Path]:
        """Generates and trains; an interrupted run goes on at the last shard, or at the last checkpoint.

        Returns:
            Folders of the trained networks, by kind.
        """
        from arbordraft.training.decider_module import DeciderModule
        from arbordraft.training.drafter_module import DrafterModule
        from arbordraft.training.fit import run
        from arbordraft.training.recording import RESULT

        folders = {kind: self.folder / kind / RESULT for kind in ("drafter", "decider")}
        console.rule("drafter")
        run(DrafterModule, self._arguments("drafter", self.drafter))
        console.rule("decider")
        run(DeciderModule, [*self._arguments("decider", self.decider), f"--model.drafter={folders['drafter']}"])
        return folders

    def _arguments(self, kind: str, config: str) -> list[str]:
        output = self.folder / kind
        arguments = ["fit", "--config", config, f"--data.folder={self.folder / 'data'}", f"--results.output={output}"]
        if self.conversations is not None:
            arguments.append(f"--data.recipe.conversations={self.conversations}")
        last = output / "checkpoints" / "last.ckpt"
        return [*arguments, *([f"--ckpt_path={last}"] if last.exists() else []), *self.options]


def gain(console: Console, drafter: Path, new_tokens: int = 128) -> None:
    """Decodes the built-in prompts with the trained drafter and shows what it gains over plain decoding."""
    import torch

    from arbordraft import RaggedModel
    from arbordraft.bench.contests import drafter_gain
    from arbordraft.bench.decoding import DecodeRow, in_turns
    from arbordraft.bench.tables import rows_table
    from arbordraft.bench.workload import Workload
    from arbordraft.loading import load_drafter
    from arbordraft.pretrained import load_smollm2

    model, tokenizer = load_smollm2(torch.bfloat16)
    target = RaggedModel(model.eval(), tokenizer, kernels="auto")
    drafters = {"trained": load_drafter(drafter, target)}
    rows: list[DecodeRow] = []
    for temperature in (0.0, 1.0):
        workload = Workload(new_tokens=new_tokens, temperature=temperature, repeats=1)
        rows += in_turns(target, drafter_gain(target, drafters, workload), workload)
    console.print(rows_table(rows))
