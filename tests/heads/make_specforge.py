"""Makes the checkpoints ``specforge-*`` of tests/golden/published, and their drafts, with SpecForge's own models.

Run it in a separate environment: ``pip install --no-deps specforge``, torch, transformers and safetensors, then
``python tests/heads/make_specforge.py``. It imports only the package's models, which need no server.
"""

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

PACKAGE = Path(find_spec("specforge").submodule_search_locations[0])
FOLDER = Path(__file__).parents[1] / "golden" / "published"
HIDDEN, VOCAB, LENGTH, BLOCK, MASK, PLACES = 16, 64, 7, 4, 63, (1, 3, 5)
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
}
KINDS = {
    "specforge-dflash": ("dflash", "DFlashDraftModel", {}),
    "specforge-dspark": ("dspark", "DSparkDraftModel", {"markov_rank": 8, "markov_head_type": "gated"}),
    "specforge-dspark-rnn": (
        "dspark",
        "DSparkDraftModel",
        {"markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": True},
    ),
}


def models(module: str) -> types.ModuleType:
    """Imports a module of models without its packages, which would import a serving engine."""
    for name in ("", ".modeling", ".modeling.draft"):
        package = sys.modules.setdefault(f"specforge{name}", types.ModuleType(f"specforge{name}"))
        package.__path__ = [str(PACKAGE.joinpath(*name.split(".")))]
    return importlib.import_module(f"specforge.modeling.draft.{module}")


@torch.no_grad()
def make(name: str) -> None:
    """Writes a checkpoint, and beside it the inputs and the logits of blocks after some places."""
    module, kind, own = KINDS[name]
    torch.manual_seed(sorted(KINDS).index(name))
    config = Qwen3Config(**SIZES, attn_implementation="eager")
    config.block_size, config.num_target_layers = BLOCK, 4
    config.dflash_config = {"target_layer_ids": [0, 1, 2], "mask_token_id": MASK, **own}
    model = getattr(models(module), kind)(config).float().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(FOLDER / name)
    embeddings, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    states, ids = torch.randn(LENGTH, 3 * HIDDEN), torch.randint(VOCAB, (LENGTH + BLOCK,))
    found = []
    for place in PLACES:
        block = torch.tensor([[ids[place], *[MASK] * (BLOCK - 1)]])
        hidden = model(
            position_ids=torch.arange(place + BLOCK)[None],
            noise_embedding=embeddings[block],
            target_hidden=states[None, :place],
            is_causal=False,
        )[:, 1:]
        before = ids[None, place : place + BLOCK - 1]
        logits = hidden @ head.T
        if module == "dspark":
            logits = model.apply_logits_head(logits, prev_token_ids=before, hidden_states=hidden)
        found.append(logits[0])
    known = {"states": states, "ids": ids, "places": torch.tensor(PLACES), "logits": torch.stack(found)}
    save_file(known | {"embeddings": embeddings, "head": head}, FOLDER / name / "drafts.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        make(name)
