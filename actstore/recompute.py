"""Runs the forward of chosen modules again in backward, with their inputs in the store."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, ModuleList, Sequential
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from actstore.composite import is_parameter
from actstore.errors import PolicyError
from actstore.generators import Generators
from actstore.modules import named_modules
from actstore.policy import Keep, Recompute
from actstore.storage import storages_of
from actstore.weights import Weights

if TYPE_CHECKING:
    from actstore.hooks import Scope
    from actstore.ledger import Account


_wrapping = Lock()


class Wrapped:
    """One module whose forward is wrapped while a store is active.

    The wrapper is an attribute of the instance, put there at entry and taken away at exit, so that the model can be
    copied and pickled in between. It acts on the threads that have entered the store, and calls through on others.
    """

    def __init__(self, name: str, module: Module, decision: Recompute, scope_of: Callable[[], Scope | None]) -> None:
        if type(module).forward is Module.forward:
            raise PolicyError(
                f"'{name} : {decision}' recomputes a {type(module).__name__}, which has no forward of its own; "
                f"name what it holds: '{name}.* : {decision}'",
                module=name,
            )
        self._name = name
        self._module = module
        self._decision = decision
        self._scope_of = scope_of
        self.users = 0

    def enter(self) -> None:
        """Wrap the module's forward, unless it is wrapped already."""
        with _wrapping:
            self.users += 1
            own = forward = self._module.__dict__.get("forward")
            while isinstance(forward, _Forward):
                if forward.region is self:
                    return
                forward = forward.own
            self._module.__dict__["forward"] = _Forward(self, self._module, self._module.forward, own)

    def exit(self) -> None:
        """Give the module its own forward back, as soon as no store that came later wraps it."""
        with _wrapping:
            self.users -= 1
            attributes = self._module.__dict__
            while isinstance(forward := attributes.get("forward"), _Forward) and not forward.region.users:
                if forward.own is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward.own

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = self._scope_of()
        if scope is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tracker = scope.tracker
        tracker.push(None, tracker.frame.place, self._decision.inputs)
        try:
            # Tensors go in by position, also those of keyword arguments and containers: only they reach the store.
            leaves, form = tree_flatten((args, kwargs))
            where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

            def run(*tensors: Tensor) -> Any:
                full = list(rest)
                for i, tensor in zip(where, tensors, strict=True):
                    full[i] = tensor
                call_args, call_kwargs = tree_unflatten(full, form)
                return forward(*call_args, **call_kwargs)

            counter = _CountRecomputed(scope, tracker.frame.place.account(0), self._module)
            if isinstance(self._decision.inputs, Keep):  # these are held already
                counter.ignored = {storage._cdata for i in where for storage in storages_of(leaves[i])}
            saved = _CountSaved(scope, counter.account, f"{self._name} ({self._decision})")
            output = checkpoint(
                run, *(leaves[i] for i in where), use_reentrant=False, context_fn=lambda: (saved, counter), **_RESPECT
            )
            counter.generators.ended()
            return output
        finally:
            tracker.pop()


class _Forward:
    """A module's forward as its region runs it. A copy or a pickle of the module has the module's own forward."""

    def __init__(self, region: Wrapped, module: Module, forward: Callable[..., Any], own: Any) -> None:
        functools.update_wrapper(self, forward)
        self.region = region
        self.own = own  # the instance attribute that was there before, if any
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.region.run(self._forward, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # before the copy has a state, this is its class's forward


# Later releases of torch ask whether outer hooks see what a selective checkpoint keeps.
_RESPECT: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


class _Delegating:
    """Sees what the checkpoint's own hooks pack, and leaves it to them. Enters again for each recomputation."""

    def __init__(self, scope: Scope, account: Account) -> None:
        self.account = account
        self._hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> None:
        pack, unpack = _top_saved_tensors_default_hooks(False)
        self.begin()

        def counting(tensor: Tensor) -> Any:
            if not (is_parameter(tensor) or isinstance(tensor, FakeTensor)):
                for storage in storages_of(tensor):
                    self.see(storage)
            return pack(tensor)

        hooks = saved_tensors_hooks(counting, self.reading(unpack))
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *exc: object) -> None:
        self._hooks.pop().__exit__(*exc)
        self.end()

    def begin(self) -> None:
        """The region starts to run."""

    def see(self, storage: torch.UntypedStorage) -> None:
        """The region saved something in this storage."""
        raise AssertionError

    def reading(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """What reads back what the region saved."""
        return unpack

    def end(self) -> None:
        """The region has run, or stopped early."""


class _CountSaved(_Delegating):
    """Books what plain autograd would have saved inside the region."""

    def __init__(self, scope: Scope, account: Account, region: str) -> None:
        super().__init__(scope, account)
        self._scope = scope
        self._region = region

    def see(self, storage: torch.UntypedStorage) -> None:
        self._scope.count(storage._cdata, storage, self.account)

    def reading(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        region = self._region

        def naming(packed: Any) -> Tensor:
            try:
                return unpack(packed)
            except Exception as error:
                error.add_note(f"while recomputing {region}")
                raise

        return naming


class _CountRecomputed(_Delegating):
    """Books the high-water of a recomputation: all that the region saved exists when it ends.

    Meanwhile the modules have the weights and buffers of the first run, and random generators their states before it.
    """

    def __init__(self, scope: Scope, account: Account, module: Module) -> None:
        super().__init__(scope, account)
        modules = list(module.modules())
        self.generators = Generators(modules)
        self._weights = Weights(modules)
        self._ledger = scope.ledger
        self._parameters = scope.parameters
        self.ignored = set[int]()
        self._seen: dict[int, int] = {}

    def begin(self) -> None:
        self._seen.clear()
        self._weights.rewind()
        self.generators.rewind()

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._parameters and key not in self.ignored:
            self._seen[key] = storage.nbytes()

    def end(self) -> None:
        self.generators.resume()
        self._weights.resume()
        self._ledger.touch_peak(self.account, sum(self._seen.values()))


def repeated_blocks(model: Module) -> list[str]:
    """Names of the modules that a model repeats: what its outermost ModuleLists and Sequentials hold.

    A model without any gives its direct children. Modules without parameters are left out.
    """
    names = {module: name for name, module in named_modules(model)}
    blocks: list[Module] = []

    def visit(module: Module) -> None:
        for child in module.children():
            if isinstance(module, ModuleList | Sequential):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    found = blocks or list(model.children())
    return [names[block] for block in found if any(True for _ in block.parameters())]
