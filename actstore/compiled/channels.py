"""Images that Inductor keeps with the channels last in memory, where the graph was traced with rows last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from actstore.compiled.arrange import IMAGE_DIM
from actstore.compiled.formats.sizes import is_fixed


def turns_images(module: GraphModule) -> bool:
    """Return whether Inductor lays out what the convolutions of a graph read and return with the channels last."""
    found: bool = _lowering().decide_layout_opt(module, is_inference=False)
    return found


def channels_last_nodes(forward: GraphModule) -> set[Node]:
    """Return the nodes of a forward graph whose results Inductor lays out so, by its own rule.

    A convolution on a CPU does, and what it reads and what reads its result follow. The rule ends at the last
    convolution: loops after it write as they read. A wrong guess costs time alone.
    """
    if not turns_images(forward):
        return set()
    preferred = _lowering().find_nodes_prefer_channels_last(SimpleNamespace(module=forward))
    found = set[Node]()
    for node in forward.graph.nodes:
        value = node.meta.get("val")
        if not _is_image(value):
            continue
        if node in preferred or any(
            each in found and each.meta["val"].shape == value.shape for each in node.all_input_nodes
        ):
            found.add(node)
    return found


def _lowering() -> Any:
    from torch._inductor.graph import GraphLowering

    return GraphLowering


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == IMAGE_DIM and is_fixed(value) and value.is_contiguous()
