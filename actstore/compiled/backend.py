"""Back ends for `torch.compile` that compile a model with a store's policy in its graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from inspect import signature
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from actstore.compiled.budget.plan import RegionBudget
from actstore.compiled.names import NodeNames, take_marks
from actstore.compiled.region import accounted
from actstore.compiled.rules import GraphRules
from actstore.errors import CapacityError, ConfigError

Compiler = Callable[..., Any]
INDUCTOR, EAGER = "inductor", "aot_eager"
_BOTH = "force_non_lazy_backward_lowering"  # compiles backward with forward
_OWN_GENERATORS = "graphsafe_rng_functionalization"  # on CUDA, what runs twice draws from generators of the graph's own
ATTEMPTS = 5  # of plans under a budget: the last one has the least memory


class GraphBackend:
    """A back end for ``torch.compile(backend=)``: PyTorch's own, with a policy in the graphs.

    Parameters
    ----------
    rules : the policy, for one compiled module
    inner : ``"inductor"``; ``"aot_eager"``, which runs the graphs as they are; or a function that compiles a graph of
        ATen operators, as `torch._dynamo.backends.common.aot_autograd` takes one

    Raises
    ------
    ConfigError : `inner` is another name
    """

    def __init__(self, rules: GraphRules, inner: str | Compiler = INDUCTOR) -> None:
        if inner not in (INDUCTOR, EAGER) and not callable(inner):
            raise ConfigError(
                f"backend={inner!r}: must be {INDUCTOR!r}, {EAGER!r}, or a function that compiles a graph of ATen "
                f"operators. Use {INDUCTOR!r}."
            )
        self.__name__ = f"actstore_{inner if isinstance(inner, str) else getattr(inner, '__name__', 'graphs')}"
        self._rules = rules
        self._inner = inner

    def __call__(self, graph: GraphModule, inputs: Any, *, mode: str | None = None, options: Any = None) -> Compiler:
        reason = why_unsupported()
        if reason:
            warnings.warn(f"compiled without the store's policy: {reason}.", RuntimeWarning, stacklevel=2)
            return self._compile(graph, inputs, mode, options, None, "")
        from actstore.compiled.budget_partition import Attempts, OverBudgetError
        from actstore.compiled.partition import DONATES, Partitioner

        tags = take_marks(graph.graph)
        graph.recompile()
        names = NodeNames(self._rules.named(), self._rules.target, graph.graph)
        digest = self._rules.digest(names, graph.graph, tags)
        counts = self.budget is not None and self._inner == INDUCTOR and hasattr(torch._functorch.config, _BOTH)
        settings = {DONATES: getattr(torch._functorch.config, DONATES), _OWN_GENERATORS: self._replays(mode, options)}
        if counts:
            settings[_BOTH] = True
        attempts = Attempts() if counts else None
        again = None if attempts is None else GraphModule(graph, deepcopy(graph.graph))
        for number in range(ATTEMPTS):
            if attempts is not None and number == ATTEMPTS - 1:
                attempts.only_least = True
            fuses = self._inner != EAGER
            partitioner = Partitioner(self._rules, names, self._decompositions, fuses=fuses, attempts=attempts)
            budgeted = partitioner.budget_partition
            try:
                with torch._functorch.config.patch(settings):
                    compiled = self._compile(graph, inputs, mode, options, partitioner, f"{digest}{number or ''}")
                break
            except Exception as error:
                if budgeted is not None and budgeted.refusal:
                    return partial(_refuse, budgeted.refusal)  # Dynamo would replace an error of now by one of its own
                if again is None or not isinstance(error, OverBudgetError):
                    raise
                graph = GraphModule(again, deepcopy(again.graph))
        return accounted(compiled, self._rules.target, partitioner.find)

    @property
    def budget(self) -> RegionBudget | None:
        """Budget within which the graphs follow a plan; None for none."""
        return self._rules.budget

    def reset(self) -> None:
        """Forget what Inductor keeps of CUDA graphs, when the compiler is reset."""
        if self._inner == INDUCTOR:
            torch._TorchCompileInductorWrapper(None, None, None).reset()

    def _replays(self, mode: str | None, options: Any) -> bool:
        """Return whether Inductor is to replay CUDA graphs: they cannot read the state of the device's generator."""
        if self._inner != INDUCTOR:
            return False
        from torch._inductor import config

        chosen = torch._TorchCompileInductorWrapper(mode, dict(options or {}), None).config
        return bool(chosen.get("triton.cudagraphs", config.triton.cudagraphs))

    def _compile(
        self, graph: GraphModule, inputs: Any, mode: str | None, options: Any, partitioner: Any, digest: str
    ) -> Compiler:
        """Compile a graph as PyTorch does, with a partitioner of ours, or with PyTorch's for None."""
        options = dict(options or {})
        if self._inner == INDUCTOR:
            if partitioner is not None:
                from torch._inductor.compile_fx import compile_fx

                from actstore.compiled.inductor import InductorPartitioner, LoopsApart, counting, settings_of_plans

                options["custom_partitioner_fn"] = InductorPartitioner(partitioner, digest)
                if self.budget is not None:
                    options["_pre_fusion_custom_pass"] = LoopsApart(partitioner, digest)
                    options = settings_of_plans() | options  # Inductor resets what is among its options
                    wrapper = torch._TorchCompileInductorWrapper(mode, options, None)
                    inner = counting(partitioner)
                    compiled: Compiler = compile_fx(graph, inputs, inner_compile=inner, config_patches=wrapper.config)  # type: ignore[assignment]
                    return compiled
            wrapper = torch._TorchCompileInductorWrapper(mode, options, None)
            compiled = wrapper(graph, inputs)
            return compiled
        if mode or options:
            raise ConfigError(f"mode={mode!r}, options={options!r}: are for {INDUCTOR!r}. Leave them out.")
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        compiler = aot_autograd(
            fw_compiler=boxed_nop if self._inner == EAGER else self._inner,
            partition_fn=partitioner or min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        compiled = compiler(graph, inputs)
        return compiled

    def _decompositions(self) -> Any:
        if self._inner != INDUCTOR:
            return None
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()


def _refuse(error: CapacityError, *args: Any) -> NoReturn:
    """Raise the error of a region that no plan fits."""
    raise error.with_traceback(None)


@cache
def why_unsupported() -> str:
    """Return the reason why this PyTorch cannot hold payloads in its graphs; empty where it can."""
    try:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        known = signature(min_cut_rematerialization_partition).parameters
        if not {"num_fwd_outputs", "static_lifetime_input_indices"} <= known.keys():
            return f"PyTorch {torch.__version__} calls partitioners in another way; actstore knows 2.10 to 2.14"
        if not hasattr(config, "custom_partitioner_fn") or not hasattr(CustomPartitionerFn, "uuid"):
            return f"PyTorch {torch.__version__} has no custom partitioners; actstore knows 2.10 to 2.14"
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no partitioner of that name ({error}); actstore knows 2.10 to 2.14"
    return ""
