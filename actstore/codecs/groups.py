"""Codecs of groups of elements, which end with the rows of a tensor. The groups: csrc/rows.md."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from actstore.codecs.dispatch import KernelCodec, SignedCodec
from actstore.kernels.base import Kernels
from actstore.kernels.rows import Format, fit, in_rows


class GroupCodec(SignedCodec):
    """A lossy codec that stores numbers, such as a scale, for each `group` elements of a row."""

    group: int
    round: str = "nearest"

    @property
    def keyed(self) -> bool:
        return self.round != "nearest"

    def _options(self) -> dict[str, Any]:
        return {"group": self.group, **super()._options()}

    @property
    @abstractmethod
    def _form(self) -> Format:
        """The sections of a payload."""

    @property
    def shaped(self) -> bool:
        return True

    def _fitted(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[KernelCodec, int]:
        group, width = fit(shape, stride, self.group)
        return (self if group == self.group else _of_group(self, group)), width

    def kernels(self, back_end: str, dtype: torch.dtype, device: torch.device) -> Kernels:
        kernels = super().kernels(back_end, dtype, device)
        return in_rows(kernels, self._form, self.group) if kernels.rows is None else kernels

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return self._form.nbytes(1, numel, self.group)

    def _rows_nbytes(self, numel: int, width: int) -> int:
        return self._form.nbytes(numel // width, width, self.group)


@lru_cache(maxsize=256)  # the codec holds its kernels
def _of_group(codec: GroupCodec, group: int) -> GroupCodec:
    options: dict[str, Any] = {"group": group}
    return replace(codec, **options)
