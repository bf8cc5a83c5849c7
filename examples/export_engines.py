"""Exports the trained drafter of this project for other engines: vLLM in two layouts, and SGLang.

The exports are written to a temporary folder; set --folder to keep them.
"""

import argparse
import json
import tempfile
from pathlib import Path

from arbordraft.exports.engines import export_sglang, export_vllm

DRAFTER = Path(__file__).parent / "checkpoints" / "smollm2-135m-instruct-eagle"


def main() -> None:
    """Writes three folders and prints their differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the folders here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.folder or Path(scratch)
        exports = {
            "vLLM, EAGLE-3": export_vllm(DRAFTER, root / "vllm", force=True),
            "vLLM, speculators": export_vllm(DRAFTER, root / "speculators", layout="speculators", force=True),
            "SGLang, EAGLE-3": export_sglang(DRAFTER, root / "sglang", force=True),
        }
        for name, export in exports.items():
            config = json.loads((export.folder / "config.json").read_text())
            ids = config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]
            size = sum(file.size for file in export.files) / 2**20
            print(f"{name}: {size:.1f} MiB, {config['architectures'][0]}, the target's states {ids}")


if __name__ == "__main__":
    main()
