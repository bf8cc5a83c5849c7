"""Each call runs the expected implementation of an operator, and ``choice.ran`` records it."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from support.ragged_case import Case

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel_argmax
from arbordraft.kernels.kv_cache import append
from arbordraft.kernels.ragged_tree_attention import attend, ragged_tree_attention
from arbordraft.kernels.verify import row_max

ROWS = torch.arange(2)


def attention(dtype=torch.float32, size=16, use_native=True):
    Case([(3, TreeTopology.chain(2))], dtype=dtype, size=size).run(ragged_tree_attention, use_native=use_native)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("call", "ran"),
    [
        (lambda: gumbel_argmax(torch.zeros(2, 9), ROWS, ROWS), "gumbel_argmax/native"),
        (lambda: gumbel_argmax(torch.zeros(2, 9), ROWS, ROWS, 1.0, torch.zeros(2)), "gumbel_argmax/native"),
        (lambda: gumbel_argmax(torch.zeros(2, 9).half(), ROWS, ROWS), "gumbel_argmax/reference"),
        (lambda: row_max(torch.zeros(9, 2).t()), "row_max/native"),
        (lambda: row_max(torch.zeros(2, 9).double()), "row_max/reference"),
        (attention, "ragged_tree_attention/native"),
        (lambda: attention(use_native=False), "ragged_tree_attention/reference"),
        (lambda: attention(torch.float64), "ragged_tree_attention/reference"),
        (lambda: attention(size=8), "ragged_tree_attention/reference"),
        (lambda: append(*(torch.zeros(4, 1, 2) for _ in range(4)), torch.arange(4)), "kv_append/reference"),
    ],
)
def test_a_kernel_runs_all_calls_that_it_supports(call, ran):
    """The reference runs all other calls, and every call if it is chosen."""
    choice.ran.clear()
    call()
    assert choice.ran == {ran: 1}
    choice.ran.clear()
    with choice.use("reference"):
        call()
    assert choice.ran == {f"{ran.partition('/')[0]}/reference": 1}


def test_triton_is_never_replaced_silently(monkeypatch):
    monkeypatch.delenv(choice.INTERPRETER, raising=False)
    with choice.use("triton"), pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        row_max(torch.zeros(2, 9))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, {"size": 8}, {"dtype": torch.float64}], ids=str)
def test_a_trace_holds_an_operator_that_takes_its_arguments(options):
    """The C++ kernel would refuse some of these types and sizes."""
    case = Case([(3, TreeTopology.k_ary(2, 2))], **{"dtype": torch.float32, "size": 16} | options)
    batch = case.batch
    given = (case.query, case.keys, case.values, batch.layout, None, batch.positions, batch.words, 0.3, 0, 0.0, None)

    def call(query, *others):
        return attend.pick(query, native=query.shape[2] % 16 == 0)(query, *others, 9, 9, 0, None)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(found.double(), case.naive(), rtol=0, atol=1e-5)


LAZY = """
import sys
import torch
import arbordraft
[getattr(arbordraft, name) for name in arbordraft.__all__]
from arbordraft.kernels.verify import row_stats
assert "triton" not in sys.modules
assert not torch._C._dispatch_has_kernel_for_dispatch_key("arbordraft::gumbel", "CPU"), "loaded without need"
seeds = torch.tensor([7])
print(torch.ops.arbordraft.gumbel(seeds, seeds + 93, 3).shape, row_stats(torch.zeros(1, 3))[0].item())
"""


def test_importing_loads_neither_triton_nor_the_library():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "torch.Size([1, 3]) 0.0\n", done.stderr


class OnSecond:
    """Stands in for a tensor of a second GPU."""

    is_cuda = True

    def get_device(self):
        return 1


@pytest.mark.parametrize(("current", "switched"), [(0, [1]), (1, [])])
def test_a_launch_makes_the_device_of_its_tensors_current(monkeypatch, current, switched):
    """Triton launches on torch's current device, which need not be that of the tensors."""
    entered, launched = [], []

    @contextmanager
    def device(number):
        entered.append(number)
        yield
        assert launched, "the launch must come within"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setitem(vars(attend), "_launcher", lambda *given: launched.append(given))
    attend._launch([OnSecond()], 5)
    assert entered == switched
    assert len(launched) == 1
