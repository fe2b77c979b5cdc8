"""Interleaved 1F1B: each device holds several chunks of layers, so that the pipeline fills sooner (Narayanan et al. 2021)."""

from __future__ import annotations

from typing import Literal

from autopar.schedule.alternate import alternate
from autopar.schedule.check import check, check_counts
from autopar.schedule.tasks import Schedule, Task


def interleaved(devices: int, microbatches: int, chunks: int) -> Schedule:
    """Stage `c * devices + d` is chunk c of device d. Microbatches go in rounds of `devices` through one chunk after the other.

    Where they do not divide by `devices`, the last round is that of a full one without the microbatches that there are not: what is
    left of an order that can run can run.
    """
    check_counts("interleaved", devices=devices, microbatches=microbatches, chunks=chunks)
    padded = -(-microbatches // devices) * devices
    orders = []
    for d in range(devices):
        ahead = 2 * (devices - 1 - d) + (chunks - 1) * devices
        order = alternate(_rounds("F", devices, padded, chunks, d), _rounds("B", devices, padded, chunks, d), ahead)
        orders.append(tuple(task for task in order if task.microbatch < microbatches))
    device_of = tuple(s % devices for s in range(devices * chunks))
    return check(Schedule("interleaved", microbatches, device_of, tuple(orders)))


def _rounds(kind: Literal["F", "B"], devices: int, microbatches: int, chunks: int, device: int) -> list[Task]:
    """A device's forwards or backwards in order; backward takes the chunks from the last to the first."""
    turns = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Task(kind, chunk * devices + device, first + k)
        for first in range(0, microbatches, devices)
        for chunk in turns
        for k in range(devices)
    ]
