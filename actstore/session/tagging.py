"""Names that a model gives to tensors. This module alone of its room is compiled with models."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.traceback import annotate

from actstore.session.entries import tag_now


def tag(tensor: Tensor, name: str) -> Tensor:
    """Name a tensor, so that a rule can address it: ``"blocks.*/qkv : int8 @ host"``. Returns the tensor itself.

    The name holds for all views of the tensor's storage that operators save afterwards, in the innermost active store;
    without one, `tag` does nothing. An operator that saves its own output (exp, relu, softmax, attention) has saved it
    before the caller can name it.

    In a recomputed module the tensor waits by the rule, and the second run goes on from it: it returns that one, so use
    what `tag` returns. The operator that made the tensor does not run again.

    In a compiled graph the name is that of the operator's result, for what the graph saves: of its own output, too. It
    returns a view.

    Raises
    ------
    ConfigError : the name is not one word
    """
    if is_dynamo_compiling():
        from actstore.compiled.names import MARK

        with annotate({MARK: name}):
            return tensor.view_as(tensor)  # compilers drop it
    return tag_now(tensor, name)
