"""Other models under stores and peers: ``python -m benchmarks.gpu.models --model vit --json FILE --plot FILE``.

A GPT of experts, whose routing recomputation keeps, a ViT-L, a ResNet-50 and a U-Net: each with all rows in one
precision, as it is trained, and with some in the other two (``--model vit_float16``). Rows and figures are those of
`benchmarks.gpu.llama`. A gradient that two plain steps do not repeat is not compared, and counted.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from actstore.bench.workloads import sized
from actstore.bench.workloads.digits import CLASSES
from actstore.bench.workloads.job import autocast
from actstore.bench.workloads.text import Batches
from actstore.bench.workloads.unet import UNet
from actstore.bench.workloads.vit import ViT
from actstore.bench.workloads.workload import Workload
from benchmarks.evidence.experts import MixtureGPT
from benchmarks.gpu import llama
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.llama_model import Job, deterministic
from benchmarks.gpu.llama_rows import Row, named
from benchmarks.gpu.parts import FIRST_DTYPES, MODELS
from benchmarks.gpu.place import Place
from benchmarks.gpu.resnet50 import CHANNELS, ResNet50
from benchmarks.gpu.resnet50 import CLASSES as IMAGENET_CLASSES

FIRST_LOSS_SCALE = 65536.0  # GradScaler's own; halved until all gradients are finite, as training does


@dataclass(frozen=True)
class Subject:
    """A model and its sizes.

    Attributes
    ----------
    workload : whose sizes the model takes
    full, small : sizes on a GPU, and of a dry run
    dtype : of autocast; float32 for none, and float16 with GradScaler
    unit : what a batch has
    """

    title: str
    model: type[nn.Module]
    workload: str
    full: dict[str, int]
    small: dict[str, int]
    unit: str = "image"
    channels: int = 1
    classes: int = CLASSES
    channels_last: bool = False
    dtype: str = ""
    rows: tuple[Row, ...] = ()


SMALL_TEXT = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 2}
SMALL_IMAGES = {"layers": 1, "width": 8, "context": 16, "batch": 2}
_SUBJECTS = {
    "moe": Subject(
        "GPT of 8 experts, two for a token, with kept routing",
        MixtureGPT, "gpt",
        {"layers": 12, "width": 1024, "heads": 16, "context": 1024, "batch": 8}, SMALL_TEXT, unit="token",
    ),
    "vit": Subject(
        "ViT-L of 197 tokens",  # of 14 x 14 patches, and one of the class
        ViT, "vit",
        {"layers": 24, "width": 1024, "heads": 16, "context": 56, "batch": 64}, SMALL_IMAGES | {"heads": 2},
    ),
    "resnet": Subject(
        "ResNet-50, channels last",
        ResNet50, "resnet",
        {"layers": 6, "width": 64, "context": 224, "batch": 256}, SMALL_IMAGES | {"context": 32},
        channels=CHANNELS, classes=IMAGENET_CLASSES, channels_last=True,
    ),
    "unet": Subject(
        "U-Net",
        UNet, "unet",
        {"layers": 4, "width": 64, "context": 256, "batch": 16}, SMALL_IMAGES | {"layers": 2},
    ),
}  # fmt: skip
ROWS = named(
    "keep", "derive", "torch checkpoint", "recompute", "selective checkpoint", "int8", "derive(int8)",
    "recompute(int8)", "save_on_cpu", "raw @ host", "int8 @ host", "Transformers offload", "TRL offload",
    "bitsandbytes 8-bit",
)  # fmt: skip
SOME_ROWS = named("keep", "derive", "torch checkpoint", "recompute", "int8", "derive(int8)", "raw @ host")


def _subject(name: str) -> Subject:
    """Return a model in the precision that its name has after the `_`, or in its first one."""
    base, _, dtype = name.partition("_")
    subject = _SUBJECTS[base]
    if not dtype:
        return replace(subject, dtype=FIRST_DTYPES[base], rows=ROWS)
    return replace(subject, dtype=dtype, rows=SOME_ROWS, title=f"{subject.title}, {dtype}")


SUBJECTS = {name: _subject(name) for name in MODELS}
SKIPPED_IN_DRY_RUN = ("save_on_cpu", "raw @ host", "int8 @ host", "Transformers offload", "recompute")


class ModelJob(Job):
    """Model of `SUBJECTS` on a device, and one batch. A step is forward and backward."""

    def __init__(self, place: Place, subject: Subject) -> None:
        self.place = place
        sizes = place.sized(subject.full, subject.small)
        self._work = work = sized(subject.workload, **sizes, dtype=subject.dtype, device=place.device)
        torch.manual_seed(0)
        with torch.device(place.device):
            self.model: Any = subject.model(work)
        model = self.model
        self.blocks = [*model.downs, model.middle, *model.ups] if subject.model is UNet else list(model.blocks)
        self._batch = Batches(work)(0) if subject.unit == "token" else _images(work, subject)
        if subject.channels_last:
            model.to(memory_format=torch.channels_last)
            images, labels = self._batch
            self._batch = images.contiguous(memory_format=torch.channels_last), labels
        self._scale_loss(subject.dtype == "float16")
        self.parameter_nbytes = sum(p.nbytes for p in model.parameters())
        units = work.batch * (work.context if subject.unit == "token" else 1)
        bound = "layers" if subject.model is ResNet50 else ""  # of bottlenecks in a dry run
        said = ", ".join(f"{name} {size}" for name, size in sizes.items() if name != bound)
        said += f", {subject.dtype}{' with GradScaler' if self._scaler.is_enabled() else ''}"
        self.about = {"title": subject.title, "said": said, "unit": subject.unit, "units": units}

    def forward(self) -> Tensor:
        with self._attention(), autocast(self._work):
            loss: Tensor = self._scaler.scale(self.model(*self._batch))
        return loss

    def backward(self, loss: Tensor) -> None:
        with self._attention():
            torch.autograd.backward(loss)

    def _scale_loss(self, enabled: bool) -> None:
        scale, finite = FIRST_LOSS_SCALE, False
        while not finite:
            self._scaler = torch.amp.GradScaler(self.place.device, scale, enabled=enabled)
            if enabled:
                self.step(nullcontext())
            finite = scale <= 1 or all(bool(grad.isfinite().all()) for grad in self.gradients())
            scale /= 2

    def _attention(self) -> AbstractContextManager[None]:
        """Use flash attention, whose backward can be told to be deterministic, where the dtype has it."""
        flash = self.place.on_gpu and self._work.dtype != "float32"
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext()


def _images(work: Workload, subject: Subject) -> tuple[Tensor, Tensor]:
    """Return random images, and their classes or, for a U-Net, other images."""
    shape = work.batch, subject.channels, work.context, work.context
    with torch.device(work.device):
        images = torch.randn(shape)
        denoised = subject.model is UNet
        return images, torch.randn(shape) if denoised else torch.randint(subject.classes, (work.batch,))


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--model", choices=SUBJECTS, required=True)
    parser.add_argument("--plot", type=Path, help="draw memory against time here")
    options = parser.parse_args()
    place = gpu_place.place_of(options)
    deterministic(warn_only=True)  # pooling and experts may have no other way on a GPU
    subject, skipped = SUBJECTS[options.model], place.sized((), SKIPPED_IN_DRY_RUN)
    rows = tuple(row for row in subject.rows if row.name not in skipped)
    return llama.run(ModelJob(place, subject), rows, options.json, options.plot, timeline=False)


if __name__ == "__main__":
    sys.exit(main())
