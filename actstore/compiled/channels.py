"""Images that Inductor keeps with the channels last in memory, where the graph was traced with rows last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node


def channels_last_nodes(forward: GraphModule) -> set[Node]:
    """Return the nodes of a forward graph whose results Inductor lays out so, by its own rule.

    A convolution on a CPU does, and what it reads and what reads its result follow. A wrong guess costs time alone.
    """
    from torch._inductor.graph import GraphLowering

    lowering: Any = GraphLowering
    if not lowering.decide_layout_opt(forward, is_inference=False):
        return set()
    found = lowering.find_nodes_prefer_channels_last(SimpleNamespace(module=forward))
    return {node for node in found if _is_image(node.meta.get("val"))}


def _is_image(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride())) and value.is_contiguous()
