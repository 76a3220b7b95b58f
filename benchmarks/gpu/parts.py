"""Parts of the GPU suite, in their order."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.place import Place

PART_S = 530.0  # of one part in one run
START_S = 15.0  # of a run, for its start and the writing of figures
DRY_TOTAL_S = 900.0  # for a busy machine; about four minutes of one core are needed

CODECS = "tests/codecs/test_cuda.py"
TESTS = (
    "tests/autograd/test_flex.py",
    "tests/check/test_gradients.py",
    "tests/cli/test_doctor.py",
    "tests/codecs/test_bnb8.py",
    "tests/devices/test_accelerator.py",
    "tests/devices/test_refusals.py",
    "tests/system/test_cuda_store.py",
    "tests/system/test_cuda_transfer.py",
)
COMPILED = tuple(
    f"tests/compiled/test_{name}.py" for name in ("tiers", "recomputed", "training", "payloads", "tags", "formats")
)
FIRST_DTYPES = {"moe": "bfloat16", "vit": "bfloat16", "resnet": "float16", "unet": "float32"}  # as each is trained
MODELS = (
    *FIRST_DTYPES,
    *(
        f"{name}_{dtype}"
        for name, first in FIRST_DTYPES.items()
        for dtype in ("float32", "bfloat16", "float16")
        if dtype != first
    ),
)
LIMITS_GIB = 24, 40, 78  # of device memory, for the largest contexts with adapters
PICTURES = (  # files kept beside the figures, by the part's name for them
    "llama.png",
    "llama-timeline.png",
    "llama-timeline.chrome.json",
    "context.png",
    "transfer.png",
    "transfer.ndjson",
    "transfer.chrome.json",
    "llama32.png",
    *(f"context{limit}.png" for limit in LIMITS_GIB),
    *(f"{name}.png" for name in (*MODELS, "curves")),
)
PLACED, JSON = ("--device", "{device}", "--scale", "{scale}"), ("--json", "{json}")
DRAWN = (*PLACED, *JSON, "--plot", "{plot}")


@dataclass(frozen=True)
class Part:
    """One command, run by this Python in the root of the repository.

    Attributes
    ----------
    command : arguments; ``{json}``, ``{plot}`` and ``{trace}`` become files in the work folder, the rest stays
        as it is
    alone : whether it takes times, so that nothing may run beside it. Neighbors without it run side by side
    resumes : whether it goes on from the figures of an earlier run in ``{json}``
    small : additional arguments of a dry run
    """

    name: str
    command: tuple[str, ...]
    alone: bool = True
    resumes: bool = False
    small: tuple[str, ...] = ()

    def arguments(self, place: Place) -> list[str]:
        """Return the command, for a device and a scale."""
        words = {"{device}": place.device, "{scale}": place.sized("full", "small")}
        words |= {"{workers}": place.sized("8", "1"), "{some}": place.sized("4", "1")}
        command = [*self.command, *(self.small if place.small else ())]
        return [words.get(argument, argument) for argument in command]


def model(name: str) -> Part:
    """Return the part of a model of `benchmarks.gpu.models`."""
    return Part(name, ("-m", "benchmarks.gpu.models", "--model", name, *DRAWN), resumes=True)


# Correctness comes first, then figures by their value to a reader. What they took on an H100, on 16 cores:
# compile   before all parts: 13 sources take 120 s on one core, the longest of them 45 s
# side by side: codecs, tests, compiled, exact, random, lossy, sanitizer: more than 130 s
# llama     8 s a row, 20 s a plan; 11 GB are pinned twice, 4 s each time
# transfer  42 s
# kernels   50 rows, 15 s; the error of 128 million elements in float64 takes longer than the calls
# graphs    the compiler takes 15 s a row, and more for a plan
# context   30 s a row: steps of 1 s at 20,000 tokens, 14 of a row; 30 GB are pinned, 6 s
# What they are expected to take, from those figures, until they have run:
# llama32   four times the steps of llama: 20 s a row, 16 rows, six minutes; 43 GB are pinned three times, 8 s each
# context24, 40, 78: steps of 4, 10 and 11 s at their largest contexts, where the logits are the limit, and of 20 s with
#           the loss in tiles; four or so of a row, 9 rows: two, five and six minutes
# duel      a minute to compile each of five models, and 20 s a plan: six minutes
# moe, vit, resnet, unet: at most 0.5 s a step, 14 rows of 15 steps: two minutes each; in another precision a minute
# small     11 rows in processes of their own, 15 s each, two of them compile: four minutes
# curves    500 steps of 20 ms four times, with as many plain ones: two minutes
PYTESTS = ("-m", "benchmarks.gpu.pytests", *JSON, "--workers")
PARTS = (
    Part("codecs", (*PYTESTS, "{workers}", "--", CODECS, "-m", "gpu"), alone=False, resumes=True),
    Part("tests", (*PYTESTS, "{some}", "--", *TESTS, "-m", "gpu"), alone=False, resumes=True),
    Part(
        "compiled",
        (*PYTESTS, "{some}", "--device", "{device}", "--", *COMPILED, "-m", "not slow"),
        alone=False,
        resumes=True,
        small=("-k", "test_exact_policies_are_plain_compiled_bit_for_bit and keep-Mlp"),
    ),
    Part("exact", ("-m", "benchmarks.gpu.exact", *PLACED, *JSON), alone=False, resumes=True),
    *(
        Part(
            name,
            ("-m", "tests.autograd.test_random_models", "--device", "{device}", *JSON, "--seed", "1", *arguments),
            alone=False,
            small=("--examples", "10"),
        )
        for name, arguments in (("random", ("--examples", "300")), ("lossy", ("--examples", "100", "--lossy")))
    ),
    Part("sanitizer", ("-m", "benchmarks.gpu.sanitizer", *PLACED, *JSON), alone=False),
    Part("llama", ("-m", "benchmarks.gpu.llama", *DRAWN), resumes=True),
    Part(
        "transfer",
        ("-m", "benchmarks.gpu.transfer", *PLACED, *JSON, "--trace", "{trace}", "--plot", "{plot}"),
        resumes=True,
    ),
    Part("kernels", ("-m", "benchmarks.gpu.device", *PLACED, *JSON), resumes=True),
    Part("graphs", ("-m", "benchmarks.gpu.graphs", *PLACED, *JSON), resumes=True),
    Part("context", ("-m", "benchmarks.gpu.context", *DRAWN), resumes=True),
    Part("llama32", ("-m", "benchmarks.gpu.llama", "--lora", *DRAWN), resumes=True),
    *(
        Part(f"context{limit}", ("-m", "benchmarks.gpu.context", "--lora", "--limit", str(limit), *DRAWN), resumes=True)
        for limit in LIMITS_GIB
    ),
    Part("duel", ("-m", "benchmarks.gpu.graphs", "--duel", *PLACED, *JSON), resumes=True),
    *map(model, FIRST_DTYPES),
    Part("small", ("-m", "benchmarks.gpu.exact", "--times", *PLACED, *JSON), resumes=True),
    Part("curves", ("-m", "benchmarks.gpu.curves", *DRAWN), resumes=True),
    Part(
        "hotpath",
        ("-m", "benchmarks.hotpath.run", "--device", "{device}", *JSON, "--rounds", "20"),
        small=("--rounds", "3", "--length", "20"),
    ),
    *map(model, MODELS[len(FIRST_DTYPES) :]),
)
