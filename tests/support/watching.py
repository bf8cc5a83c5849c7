"""Finds operators that make a host wait for its device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Records every operator that makes the host wait for the device, or whose result lies elsewhere."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.device, self.count, self.found = device, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        tagged = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
        if name in ("index", "index_put", "index_put_"):  # shapes are static with indices, but a mask must be counted
            tagged = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        out = function(*args, **(kwargs or {}))
        away = {leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)} - {self.device}
        if tagged or away or name == "lift_fresh":  # makes a tensor of Python's numbers
            self.found.append(name)
        self.count += 1
        return out
