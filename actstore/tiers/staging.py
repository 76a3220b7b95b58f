"""Staging memory on the host, which payloads cross between an accelerator and a file."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import ClassVar

import torch

from actstore.base.ticket import DONE, Ticket
from actstore.devices.base import Device
from actstore.devices.cpu import Cpu
from actstore.errors import ActstoreError


class Chunk:
    """Page-aligned host memory.

    Attributes
    ----------
    memory : `Ring.chunk_nbytes` of uint8
    view : the same bytes, for system calls
    busy : ticket of the device's copy that uses the chunk
    """

    __slots__ = ("busy", "memory", "pinned", "view")

    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory = memory
        self.view: memoryview = memory.numpy().data
        self.pinned = pinned
        self.busy: Ticket = DONE

    def settle(self) -> None:
        """Make the host wait until no copy uses it."""
        with suppress(ActstoreError):  # a failed copy is over too, and its own ticket raises the error
            self.busy.wait_on(None)
        self.busy = DONE


class Ring:
    """A ring of chunks, each made when first needed. Thread-safe.

    No job waits here for another job, so that jobs cannot deadlock. A job holds one chunk at most, and the ring has as
    many chunks as jobs that run at a time. A chunk that no job holds waits at most for the device.

    Attributes
    ----------
    chunk_nbytes : bytes of one system call; larger calls are not faster
    chunks : limit of the number of chunks: one for each worker that reads or writes
    """

    chunk_nbytes: ClassVar[int] = 8 * 2**20
    chunks: ClassVar[int] = 8

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = Lock()
        self._all: list[Chunk] = []
        self._idle: list[Chunk] = []  # the longest idle first

    def take(self) -> Chunk:
        """Take a chunk that is not in use; the host waits for the device if it uses all of them.

        Raises
        ------
        MemoryError : the system has no more memory
        """
        with self._lock:
            chunk = next((chunk for chunk in self._idle if chunk.busy.ready()), None)
            if chunk is None and self._idle and len(self._all) >= self.chunks:
                chunk = self._idle[0]
            if chunk is None:
                chunk = self._make()
            else:
                self._idle.remove(chunk)
        chunk.settle()
        return chunk

    def give(self, chunk: Chunk, busy: Ticket = DONE) -> None:
        """Take back a chunk, which a copy uses until `busy` is complete."""
        chunk.busy = busy
        with self._lock:
            self._idle.append(chunk)

    def close(self) -> None:
        """Return the memory; no job runs any more."""
        with self._lock:
            chunks, self._all, self._idle = self._all, [], []
        for chunk in chunks:
            chunk.settle()
            if chunk.pinned:
                self._device.unpin(chunk.memory)

    def _make(self) -> Chunk:
        memory = self._device.pinned(self.chunk_nbytes)
        pinned = memory is not None
        if memory is None:
            memory = Cpu(torch.device("cpu")).empty(self.chunk_nbytes)
        chunk = Chunk(memory, pinned)
        self._all.append(chunk)
        return chunk
