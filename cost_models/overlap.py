"""Communication beside compute: what a schedule hides of it."""

from __future__ import annotations


def exposed_seconds(independent: float, compute: float, share: float = 1.0) -> float:
    """What is left to wait for of `independent` communication, which may run beside `compute` seconds of work.

    Gathers of parameters are issued a layer ahead, sums of gradients run while earlier layers are differentiated (Rajbhandari et al. 2020,
    ZeRO; Zhao et al. 2023, PyTorch FSDP, section 3.3): a step is as long as the longer of the two. `share` is the part of the compute
    beside which communication can run.

    >>> exposed_seconds(3.0, 2.0), exposed_seconds(1.0, 2.0)
    (1.0, 0.0)
    """
    return max(0.0, independent - share * compute)
