"""``arbordraft import``: saves published drafters in our format."""

import os
from pathlib import Path
from typing import Annotated

import typer

from arbordraft.cli.export import ForceOption, OutArgument
from arbordraft.cli.options import ModelOption
from arbordraft.utils.choices import Dtype
from arbordraft.utils.files import new_folder
from arbordraft.utils.terminal import terminal

console = terminal()


def _folder(source: str) -> str | os.PathLike[str]:
    """Returns a folder as it is; downloads a name of the hub and returns its folder."""
    if Path(source).exists():
        return source
    from huggingface_hub import snapshot_download

    from arbordraft.drafter_names import fetched

    snapshot_download(source, allow_patterns=["config.json"])
    return fetched(source) or source


def import_drafter(
    source: Annotated[
        str, typer.Argument(help="Folder or hub name of a head: EAGLE, P-EAGLE, DFlash, DSpark or Medusa.")
    ],
    out: OutArgument,
    model: ModelOption = "smollm2",
    force: ForceOption = False,
) -> None:
    """Import a published drafter for a model. 'auto' finds it beside the model or in the cache folder's 'drafters'."""
    from arbordraft.cli.display import progress
    from arbordraft.heads.base import fingerprint
    from arbordraft.heads.published import published_head
    from arbordraft.loading import load_target

    with progress(console) as on_progress:
        on_progress("loading the model")
        target, _ = load_target(model, Dtype.float32)
        on_progress("reading the drafter")
        head = published_head(_folder(source), target.model)
    head.config.target_fingerprint, head.config.target_name = fingerprint(target.model), model
    with new_folder(out, force=force) as staging:
        head.save_pretrained(staging)
    console.print(f"wrote {out}", soft_wrap=True)
