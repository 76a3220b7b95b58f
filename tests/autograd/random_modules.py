"""Modules of random models: what models do to autograd. All map (batch, time, WIDTH) to the same shape."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import graph
from torch.autograd.function import once_differentiable

WIDTH = 8


class Call(nn.Module):
    """A function of the input, without parts."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """A function of a module and the input."""

    def __init__(self, inner: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner, x)


class Cubed(torch.autograd.Function):
    """Saves its input and its output, and can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.pow(3)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return grad * 3 * x.square() + 0 * out * grad


class SetUp(torch.autograd.Function):
    """Saves in `setup_context` an input and both outputs, of which one may get no gradient."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x.sin()
        return middle.exp(), middle

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        x, out, middle = ctx.saved_tensors
        parts = [grad * factor for grad, factor in ((first, out), (second, 1 + 0 * middle)) if grad is not None]
        return sum(parts[1:], parts[0]) * x.cos() if parts else None


class Once(torch.autograd.Function):
    """Can be differentiated once only, and has an output that cannot be at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        best = x.argmax(-1)
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(x, best)
        return x.cos(), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        x, best = ctx.saved_tensors
        return -grad * x.sin() + 0 * best.unsqueeze(-1)


class Doubled(torch.autograd.Function):
    """Writes to its input, and saves it afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * 2 + 0 * out


class Scribbling(torch.autograd.Function):
    """Its backward writes to a tensor of its own that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        dropout = 0.2 if torch.get_default_device().type == "cpu" else 0.0  # of cuDNN, it draws other numbers: limits
        self.cells = kind(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Channels(nn.Module):
    """A module of (batch, channels, time)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class ReadsStatistics(nn.Module):
    """Scales by the running statistics, from before a norm updates them and from afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_var.clone()
        return torch.tanh(self.norm(x) * before[:, None] + self.norm.running_mean.clone()[:, None])


class Makes(nn.Module):
    """Makes a parameter, a layer and a buffer in its first call. It writes to the buffer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None
        self.parts = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.rand(WIDTH, dtype=x.dtype, device=x.device))
            self.parts.append(nn.Linear(WIDTH, WIDTH, dtype=x.dtype, device=x.device))
            self.register_buffer("calls", torch.zeros((), dtype=x.dtype, device=x.device))
        self.calls += 1
        return torch.tanh(self.parts[0](x) * self.scale * self.calls.clone())


class Holds(nn.Module):
    """Draws from a generator in a list of an object, by a rate in that object, which it does not change."""

    def __init__(self) -> None:
        super().__init__()
        device = torch.get_default_device()
        self.options = SimpleNamespace(rate=0.5, draws={"noise": [torch.Generator(device).manual_seed(1)]})

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=self.options.draws["noise"][0])
        return torch.tanh(x * (1 + self.options.rate * noise))


class Named(nn.Module):
    """Takes a tensor by name, and gives a dict with a tensor, one without gradient, and other things."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"y": y * scale, "seen": (y.detach(), 3), "none": None}


class UsesNamed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.named = Named(inner)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.named(x, scale=self.scale)
        return out["y"] + out["seen"][0]


class Mixed(nn.Sequential):
    """Its first half is in full precision under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype == torch.bfloat16 else x
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        for i, part in enumerate(self):
            with torch.autocast(kind, torch.bfloat16, enabled=on and i >= len(self) // 2):
                x = part(x)
        return x


class Shared(nn.Module):
    """One module under two names, one of them in a dict beside a module that is None."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.one = inner
        self.rest = nn.ModuleDict({"other": inner, "idle": nn.Identity()})
        self.register_module("gone", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.rest["other"](x * 2)


class Tied(nn.Module):
    """Two layers with one weight, around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


class Watched(nn.Module):
    """Has a hook of each kind that sees gradients of its parameters and its output; `train` compares what they saw."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._seen: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._handles: list[Any] = []
        for weight in inner.parameters():
            if weight.requires_grad:
                weight.register_hook(self._see)
                weight.register_post_accumulate_grad_hook(lambda weight: self._see(weight.grad))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 1
        if y.requires_grad:
            y.register_hook(self._see)
            y.retain_grad()
            if _current_graph_task_id() == -1:  # what runs again in backward gets no gradient
                self._outputs.append(y)
                both = [tensor for tensor in (x, y) if tensor.requires_grad]
                for mode in ("all", "any"):  # such a hook holds nodes until it is removed
                    self._handles.append(graph.register_multi_grad_hook(both, self._see_all, mode=mode))
        return y

    def _see(self, grad: Tensor | None) -> None:
        if grad is not None and not is_legacy_batchedtensor(grad):
            self._seen.append(grad.detach().clone())

    def _see_all(self, grads: Any) -> None:
        for grad in grads if isinstance(grads, list | tuple) else [grads]:
            self._see(grad)

    def gradients(self) -> list[Tensor]:
        """What the hooks saw since the last call, each value once: a recomputed backward sees it again."""
        for output in self._outputs:
            if output.grad is not None:
                self._seen.append(output.grad.detach())
        for handle in self._handles:  # a hook on several tensors holds their nodes
            handle.remove()
        found = {(seen.dtype, seen.shape, repr(seen.flatten().tolist())): seen for seen in map(_dense, self._seen)}
        self._seen, self._outputs, self._handles = [], [], []
        return [found[key] for key in sorted(found, key=str)]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


class Subclass(torch.Tensor):
    """A class of tensors that its operators keep."""
