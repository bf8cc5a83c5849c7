"""Recurrent layers of transformers run draft trees through the operators as they run one path at a time."""

import pytest
import torch
import transformers
from support.recurrent_mixers import Memory, rebound
from torch.testing import assert_close
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import Paths, tree_scan

HIDDEN = 32
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
COMMON = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": 40}
MIXERS = {
    "mamba": (MambaMixer, "MambaConfig", {"state_size": 12}),
    "mamba2": (Mamba2Mixer, "Mamba2Config", {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 12}),
    "bamba": (BambaMixer, "BambaConfig", MAMBA2),
    "granite": (GraniteMoeHybridMambaLayer, "GraniteMoeHybridConfig", MAMBA2 | {"layer_types": ["mamba"]}),
    "falcon_h1": (FalconH1Mixer, "FalconH1Config", MAMBA2 | {"mamba_d_ssm": 64}),
    "qwen3_next": (Qwen3NextGatedDeltaNet, "Qwen3NextConfig", DELTA | {"layer_types": ["linear_attention"]}),
    "qwen3_5": (Qwen3_5GatedDeltaNet, "Qwen3_5TextConfig", DELTA | {"layer_types": ["linear_attention"]}),
    "kimi_linear": (
        KimiLinearDeltaAttention,
        "KimiLinearConfig",
        {"linear_num_heads": 2, "linear_head_dim": 12, "layer_types": ["linear_attention"]},
    ),
    "lfm2": (Lfm2ShortConv, "Lfm2Config", {"layer_types": ["conv"]}),
}
PREFIXES = [7, 2]
TREES = Paths([-1, 0, 0, 1, 2, 2, -1, 6, 6, 8], rows=[6, 4], states=[1, 0])
ENDS = [5, 9]


def mixer_of(kind):
    of, config, sizes = MIXERS[kind]
    mixer = of(getattr(transformers, config)(**COMMON | sizes), layer_idx=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():  # the initial values leave much at 0 or 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    if kind == "falcon_h1":  # the model computes it
        mixer.mup_vector = torch.rand(mixer.in_proj.out_features, generator=generator) + 0.5
    return mixer


def sequence(rows, seed):
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(found, expected):
    return (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def path_of(row):
    path = [row]
    while (parent := TREES.parent[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def alone(mixer, *parts):
    """Runs the mixer on one text and returns the outputs of the last part."""
    with torch.no_grad():
        return mixer(torch.cat(parts)[None])[0][-len(parts[-1]) :]


def differing(mixer, spoil=None):
    """Runs prompts and two steps, each with accepted paths; returns the nodes that differ from their path."""
    memory = Memory(samples=2)
    run = rebound(mixer, memory.functions())
    prefixes = [sequence(rows, seed) for seed, rows in enumerate(PREFIXES)]
    prompt = memory.step(run, torch.cat(prefixes), Paths.chains(PREFIXES, TREES.states), commit=True)
    for prefix, found in zip(prefixes, prompt.split(PREFIXES), strict=True):
        assert close(found, alone(mixer, prefix))
    wrong = []
    for step in (1, 2):
        hidden = sequence(len(TREES.parent), 10 + step)
        packed = memory.step(run, hidden, TREES)
        for row in range(len(hidden)):
            path, prefix = path_of(row), prefixes[0 if row < TREES.rows[0] else 1]
            expected = alone(mixer, prefix, hidden[path])[-1]
            if not close(packed[row], expected):
                wrong.append((step, row))
        (spoil or Memory.commit)(memory, ENDS)
        prefixes = [torch.cat([prefix, hidden[path_of(end)]]) for prefix, end in zip(prefixes, ENDS, strict=True)]
    return wrong


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixer_runs_trees_as_it_runs_paths(kind):
    choice.ran.clear()
    assert differing(mixer_of(kind)) == []
    assert choice.ran["tree_convolution/native"]
    assert choice.ran["tree_scan/native"] or kind == "lfm2"


def another_node(memory, ends):
    memory.commit([ends[0] - 1, ends[1]])


def late_window(memory, ends):
    before = memory.windows.clone()
    memory.commit(ends)
    memory.windows[1] = torch.cat([before[1, -1:], memory.windows[1]])[:-1]


def no_state(memory, ends):
    memory.commit_windows(ends)


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "lfm2"])
@pytest.mark.parametrize(
    ("spoil", "of"),
    [(another_node, range(6)), (late_window, range(6)), (no_state, range(10))],
    ids=lambda x: str(x)[:16],
)
def test_a_wrong_commit_would_be_seen(kind, spoil, of):
    """Negative controls: all nodes of the next step's spoilt samples differ."""
    wrong = differing(mixer_of(kind), spoil)
    assert all(step == 2 and row in of for step, row in wrong)
    if kind == "lfm2" and spoil is no_state:
        assert wrong == []  # it has none
    else:
        assert (2, 0) in wrong


@pytest.mark.usefixtures("kernels")
def test_a_real_gated_linear_recurrent_unit():
    """RecurrentGemma's recurrence is a scan of states with one key, whose decay differs by channel."""
    config = transformers.RecurrentGemmaConfig(hidden_size=24, lru_width=24, num_attention_heads=2)
    unit = RecurrentGemmaRglru(config).eval()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    x, gates = torch.randn(1, 9, 24), {}

    def seen(hidden_states, recurrent_gate, reset, recurrent_states, **_):
        gates.update(inputs=hidden_states, decay=recurrent_gate)
        return type(unit)._rnn_scan(unit, hidden_states, recurrent_gate, reset, recurrent_states)

    unit._rnn_scan = seen
    with torch.no_grad():
        expected = unit(x, torch.arange(5, 14)[None])[0]
    ones = torch.ones(9, 1, 1)
    out = tree_scan(
        torch.zeros(1, 1, 1, 24),
        Paths.chains([9], [0]).schedule(),
        ones,
        ones,
        gates["inputs"][0][:, None],
        gates["decay"][0].log()[:, None],
        rates=torch.ones(1, 1, 24),
    )
    assert_close(out[:, 0], expected, rtol=1e-5, atol=1e-6)
