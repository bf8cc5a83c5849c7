"""Calls of recurrent layers along draft trees: rounding, layouts, refusals, traces."""

import pytest
import torch
from support.recurrent_checks import TREES, convolution_case, scan_case
from torch import library

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import (
    Paths,
    Scan,
    Schedule,
    advance_states,
    advance_windows,
    commit_windows,
    gate,
    tree_convolution,
    tree_scan,
)


def test_rounding_of_inputs_is_the_callers():
    case = scan_case("gated delta, odd sizes")
    rows = {name: part.bfloat16() for name, part in case.rows.items()}
    wide = {name: part.float() for name, part in rows.items()}
    schedule = TREES.schedule()
    out = Scan.gated_delta(**rows).run(case.states.clone(), schedule)
    assert out.dtype == torch.float32
    assert torch.equal(out, Scan.gated_delta(**wide).run(case.states.clone(), schedule))
    plain = Scan.gated_delta(**wide, normalize=False).run(case.states.clone(), schedule)
    assert not torch.equal(out, plain)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_inputs_of_any_layout(path):
    with choice.use(path):
        case = scan_case("Mamba")
        apart = {name: part.transpose(0, -1).contiguous().transpose(0, -1) for name, part in case.rows.items()}
        rates = case.options["rates"].transpose(1, 2).contiguous().transpose(1, 2)
        assert not rates.is_contiguous()
        found = tree_scan(case.states.clone(), TREES.schedule(), **apart, rates=rates, scale=case.options["scale"])
        assert torch.equal(found, case.run())
        arguments = convolution_case()
        strided = [torch.stack([part, part], dim=-1)[..., 0] for part in arguments]
        assert not any(part.is_contiguous() for part in strided)
        assert torch.equal(tree_convolution(*strided), tree_convolution(*arguments))
        assert torch.equal(gate(strided[0], "silu", strided[4]), gate(arguments[0], "silu", arguments[4]))


def refusals():
    case = scan_case("gated delta, odd sizes")
    schedule, rows = TREES.schedule(), case.rows
    inputs, windows, history, weight, bias = convolution_case()

    def scan(**changes):
        arguments = {"states": case.states, "schedule": schedule, **rows} | changes
        return lambda: tree_scan(**arguments)

    def convolve(**changes):
        arguments = {"inputs": inputs, "windows": windows, "history": history, "weight": weight, "bias": bias} | changes
        return lambda: tree_convolution(**arguments)

    return [
        (scan(states=case.states.double()), r"states must be \[any, 3, 7, 5\] of torch.float32"),
        (scan(key=rows["key"][:, :2], query=rows["query"][:, :2]), "2 key heads cannot serve 3 heads"),
        (scan(states=case.states.transpose(2, 3).contiguous().transpose(2, 3)), "so they must be contiguous"),
        (scan(query=rows["query"][:-1]), r"query must be \[15, 3, 7\]"),
        (scan(value=rows["value"][..., :4]), r"value must be \[15, 3, 5\]"),
        (scan(log_decay=rows["log_decay"][:, :2]), r"log_decay must be \[15, 3\]"),
        (scan(beta=rows["beta"][:, :2]), r"beta must be \[15, 3\]"),
        (scan(schedule=Paths.chains([3], [0]).schedule()), r"read must be \[15\] of torch.int64"),
        (scan(rates=torch.empty(3, 7, 4)), r"rates must be \[3, 7, 5\]"),
        (convolve(windows=windows.bfloat16()), r"windows must be \[any, 3, 37\] of torch.float32"),
        (convolve(history=history[:-1]), r"history must be \[15, 3\]"),
        (convolve(weight=weight[:, 1:]), r"weight must be \[any, 37\]"),
        (convolve(bias=bias[:-1]), r"bias must be \[37\]"),
        (lambda: gate(inputs, "gelu"), "there is no activation 'gelu'; choose one of softplus, sigmoid, silu"),
        (lambda: gate(inputs, "silu", bias[:3]), r"bias must be \[37\]"),
        (lambda: commit_windows(windows, inputs.bfloat16(), history[:5], torch.arange(5)), "inputs must be"),
        (
            lambda: Scan.mamba2(torch.zeros(15, 2, 3), torch.zeros(15, 3), *[torch.zeros(2)] * 3),
            r"steps must be \[15, 2\]",
        ),
        (lambda: Scan.mamba(inputs, inputs[1:], *[inputs] * 3), r"steps must be \[15, 37\]"),
        (
            lambda: Scan.mamba2(torch.zeros(15, 2, 3), torch.zeros(15, 2), *[torch.zeros(2)] * 3, skip=torch.zeros(3)),
            r"skip must be \[2\]",
        ),
        (
            lambda: advance_windows(windows[None], [inputs.bfloat16()], *[torch.zeros(1, dtype=torch.int64)] * 3),
            r"inputs must be \[1, any, 37\] of torch.float32",
        ),
        (
            lambda: advance_states(case.states[None].double(), [Scan(**rows)], *[torch.zeros(1)] * 3),
            r"states must be \[1, any, 3, 7, 5\] of torch.float32",
        ),
    ]


@pytest.mark.parametrize("case", range(len(refusals())))
def test_wrong_arguments_are_refused(case):
    call, message = refusals()[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("kernels")
def test_the_kernel_refuses_states_that_do_not_exist():
    case = scan_case("Mamba-2")
    good = TREES.schedule()
    for part, row, place, message in (
        ("read", 0, len(case.states), "row 0 needs a state that does not exist"),
        ("write", 3, -2 - good.scratch, "row 3 needs a state that does not exist"),
        ("read", 7, -1, "no row comes before the first of sample 1"),
    ):
        places = {name: getattr(good, name).clone() for name in ("first", "read", "write")}
        places[part][row] = place
        with pytest.raises(RuntimeError, match=message):
            case.run(Schedule(**places, scratch=good.scratch))
    inputs, windows, history, weight, _ = convolution_case()
    history[4, 1] = -1 - windows.shape[0] * 3
    with pytest.raises(RuntimeError, match="row 4 has an input before it that is nowhere"):
        tree_convolution(inputs, windows, history, weight)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_no_rows(path):
    with choice.use(path):
        empty = Paths([], [0, 0], [1, 0])
        case = scan_case("gated delta, odd sizes").on([], empty)
        assert case.run(empty.schedule()).shape == (0, 3, 5)
        inputs, windows, _, weight, _ = convolution_case()
        assert tree_convolution(inputs[:0], windows, empty.history(4), weight).shape == (0, 37)
        assert gate(inputs[:0], "silu").shape == (0, 37)


@pytest.mark.usefixtures("kernels")
def test_the_operators_are_registered_properly_and_compile():
    case = scan_case("gated delta, odd sizes")
    case.states.nan_to_num_()
    schedule = TREES.schedule()
    places = schedule.first, schedule.read, schedule.write
    rows = case.rows
    order = rows["query"], rows["key"], rows["value"], rows["log_decay"]
    inputs, windows, history, weight, bias = convolution_case()
    ops = torch.ops.arbordraft
    for operator, arguments in (
        (ops.tree_scan, (case.states, *places, *order, None, rows["beta"], 0.5, 1e-6, schedule.scratch)),
        (ops.tree_convolution, (inputs, windows.nan_to_num(), history, weight, bias, True)),
        (ops.recurrent_gate, (inputs, bias, None, 0)),
    ):
        for overload in (operator.default, operator.portable):
            library.opcheck(overload, arguments)
            compiled = torch.compile(overload, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(*arguments), overload(*arguments))
