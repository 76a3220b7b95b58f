"""Sizes, device and seed of a training run of the benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from actstore.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """Subject of a training run; everything else follows from it. `workloads.sized` fills in a model's sizes.

    Attributes
    ----------
    model : a name in actstore.bench.workloads.MODELS, or a function of the user, ``my_module:make_step``
    layers, width, heads : of the model
    context : characters of a sequence; for images, pixels of a side
    batch : sequences or images in a step
    steps : timed steps, after `warmup` steps that train but are not timed
    dropout : probability, in the attention and after each half of a block
    dtype : float32, or bfloat16 | float16 by autocast over a model in float32
    device : cpu, cuda, or cuda:<index>
    threads : of torch, on the CPU; 0 takes one for each core that this process may use
    """

    model: str = "gpt"
    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 5
    warmup: int = 2
    dropout: float = 0.0
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 1 or more.")
        if self.warmup < 0 or self.threads < 0:
            raise ConfigError(f"--warmup {self.warmup} and --threads {self.threads}: must be 0 or more.")
        if self.width % self.heads:
            raise ConfigError(f"--heads {self.heads}: must be a divisor of --width {self.width}.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: must be 0 or more and less than 1.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r}: must be one of {', '.join(DTYPES)}.")

    @property
    def device_type(self) -> str:
        return torch.device(self.device).type

    @property
    def on_cuda(self) -> bool:
        return self.device_type == "cuda"

    def check_device(self) -> None:
        """Raise ConfigError unless this machine has the device."""
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"--device {self.device!r}: must be cpu, cuda or cuda:0.") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: must be cpu or cuda.")
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ConfigError(f"--device {self.device!r}: torch sees {count} CUDA devices here. Give --device cpu.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        return cls(**{field.name: values[field.name] for field in fields(cls)})
