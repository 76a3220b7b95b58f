"""Parts of the GPU suite, in their order, with their time limits."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.place import Place

TOTAL_S = 525.0  # of nine minutes; the rest is for the start and the writing of figures
DRY_TOTAL_S = 600.0  # for a busy machine; about a minute of one core is needed

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
# Files kept beside the figures, by the part's name for them.
PICTURES = (
    "llama.png",
    "llama-timeline.png",
    "llama-timeline.chrome.json",
    "context.png",
    "transfer.png",
    "transfer.ndjson",
    "transfer.chrome.json",
)
PLACED, JSON = ("--device", "{device}", "--scale", "{scale}"), ("--json", "{json}")


@dataclass(frozen=True)
class Part:
    """One command, run by this Python in the root of the repository.

    Attributes
    ----------
    command : arguments; ``{json}``, ``{plot}`` and ``{trace}`` become files in the work folder, the rest stays
        as it is
    limit_s : seconds after which the run stops it
    alone : whether it takes times, so that nothing may run beside it. Neighbours without it run side by side
    small : additional arguments of a dry run
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    alone: bool = True
    small: tuple[str, ...] = ()

    def arguments(self, place: Place) -> list[str]:
        """Return the command, for a device and a scale."""
        words = {"{device}": place.device, "{scale}": place.sized("full", "small")}
        words |= {"{workers}": place.sized("8", "1"), "{some}": place.sized("4", "1")}
        command = [*self.command, *(self.small if place.small else ())]
        return [words.get(argument, argument) for argument in command]


# Correctness comes first, then figures by their value. The limits follow from a part's work on an H200 (500
# TFLOP/s, 55 GB/s each way, 4 TB/s) and 10 s for a process to start:
# compile   before all parts: 13 sources take 120 s on one core, the longest of them 45 s
# codecs    580 tests against oracles in NumPy take 150 s on one core, so 20 s on eight
# tests     165 tests of a second or less; four of them start a process
# compiled  200 tests, of which the compiler takes most of the time
# exact     seven processes of 10 s, and some steps of 30 ms
# random    300 and 100 small models, 10 and 2 a second on a CPU
# sanitizer 500 small kernels under each of three tools, which start slowly
# llama     12 TFLOP a layer and 8 layers: 0.2 s a step, 0.3 to 0.6 s in rows that move 11 GB; 13 rows of 13 steps are
#           70 s, two plans of some 40 steps 40 s; 11 GB are pinned twice, 4 s each time
# transfer  moves 1 GiB about 100 times each way (4 s), steps of 0.2 s, pins 6 GB
# kernels   80 rows of 100 calls of 0.3 ms; the error of 128 million elements in float64 takes longer: 0.5 s a row
# hotpath   200 rounds took more than 60 s on an H100
# graphs    the compiler takes 15 s a row, and more for a plan
# context   what is left: steps of 1 s at 20,000 tokens, 14 of a row: 60 s; 30 GB are pinned, 6 s
PARTS = (
    Part(
        "codecs",
        ("-m", "benchmarks.gpu.pytests", *JSON, "--workers", "{workers}", "--", CODECS, "-m", "gpu"),
        130,
        alone=False,
    ),
    Part(
        "tests",
        ("-m", "benchmarks.gpu.pytests", *JSON, "--workers", "{some}", "--", *TESTS, "-m", "gpu"),
        130,
        alone=False,
    ),
    Part(
        "compiled",
        (
            "-m",
            "benchmarks.gpu.pytests",
            *JSON,
            "--device",
            "{device}",
            "--workers",
            "{some}",
            "--",
            *COMPILED,
            "-m",
            "not slow",
        ),
        130,
        alone=False,
        small=("-k", "test_exact_policies_are_plain_compiled_bit_for_bit and keep-Mlp"),
    ),
    Part("exact", ("-m", "benchmarks.gpu.exact", *PLACED, *JSON), 130, alone=False),
    *(
        Part(
            name,
            ("-m", "tests.autograd.test_random_models", "--device", "{device}", *JSON, "--seed", "1", *arguments),
            130,
            alone=False,
            small=("--examples", "10"),
        )
        for name, arguments in (("random", ("--examples", "300")), ("lossy", ("--examples", "100", "--lossy")))
    ),
    Part("sanitizer", ("-m", "benchmarks.gpu.sanitizer", *PLACED, *JSON), 130, alone=False),
    Part("llama", ("-m", "benchmarks.gpu.llama", *PLACED, *JSON, "--plot", "{plot}"), 170),
    Part("transfer", ("-m", "benchmarks.gpu.transfer", *PLACED, *JSON, "--trace", "{trace}", "--plot", "{plot}"), 80),
    Part("kernels", ("-m", "benchmarks.gpu.device", *PLACED, *JSON), 120),
    Part(
        "hotpath",
        ("-m", "benchmarks.hotpath.run", "--device", "{device}", *JSON, "--rounds", "20"),
        60,
        small=("--rounds", "3", "--length", "20"),
    ),
    Part("graphs", ("-m", "benchmarks.gpu.graphs", *PLACED, *JSON), 120),
    Part("context", ("-m", "benchmarks.gpu.context", *PLACED, *JSON, "--plot", "{plot}"), 120),
)
