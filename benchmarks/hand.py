"""Shardings as people write them by hand for `jax.jit`, and how long steps take under them and under a plan, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from autopar import api, models

Path = tuple[Any, ...]
Policy = Callable[[str, tuple[int, ...], Mapping[str, int]], P]
"""Path and shape of a leaf of the state, and the sizes of the axes -> its spec."""

BY_ROW = ("down", "out", "wo", "output", "proj")
"""Names of matrices that follow one that is cut by columns."""


def whole(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    return P()


def in_parts(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """Along the longest dimension that divides, as FSDP does."""
    fitting = [d for d, n in enumerate(shape) if n % sizes["data"] == 0]
    if not fitting:
        return P()
    longest = max(fitting, key=lambda d: shape[d])
    return P(*(None,) * longest, "data")


def optimizer_in_parts(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """ZeRO-1: moments in parts, parameters whole."""
    return in_parts(path, shape, sizes) if "opt" in path else P()


def by_columns(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """Megatron's: matrices by their last dimension, those that follow such a one by their first."""
    if len(shape) < 2:
        return P()
    d = 0 if any(f"'{name}'" in path for name in BY_ROW) else len(shape) - 1
    return P(*(None,) * d, "tensor") if shape[d] % sizes["tensor"] == 0 else P()


WAYS: Mapping[str, tuple[Policy, int, bool]] = {
    "every device alike": (whole, 1, False),
    "data parallel": (whole, 1, True),
    "ZeRO-1": (optimizer_in_parts, 1, True),
    "ZeRO-3": (in_parts, 1, True),
    "grid": (by_columns, 4, True),
}
"""Policy of the state, devices along the axis `tensor`, and whether the batch is cut."""


def step_seconds(name: str, devices: int, rounds: int) -> dict[str, float]:
    """The median step of a zoo model under its plan and each way, in seconds. They take turns, so all see the same machine."""
    step, (state, batch) = models.build(name, abstract=False)
    runs = {"autopar": (api.parallelize(step, f"host:{devices}"), state, batch)}
    for way, (policy, tensor, cut) in WAYS.items():
        runs[way] = by_hand(step, state, batch, devices, policy, tensor, cut)
    states: dict[str, Any] = {way: run[1] for way, run in runs.items()}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for n in range(rounds + 2):
        for way, (function, _, examples) in runs.items():
            begin = time.perf_counter()
            states[way] = jax.block_until_ready(function(states[way], examples))[0]
            if n >= 2:  # the first compiles, the second may still place things
                seconds[way].append(time.perf_counter() - begin)
    return {way: median(found) for way, found in seconds.items()}


def by_hand(step: Any, state: Any, batch: Any, devices: int, policy: Policy, tensor: int, cut: bool) -> tuple[Any, Any, Any]:
    """A jitted step that keeps its state where the policy says, with state and batch in place."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, tensor), ("data", "tensor"))
    sizes = dict(mesh.shape)

    def spec(path: Path, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, policy(jax.tree_util.keystr(path), np.shape(leaf), sizes))

    places = jax.tree_util.tree_map_with_path(spec, state)
    fed = NamedSharding(mesh, P("data") if cut else P())
    jitted = jax.jit(step, in_shardings=(places, fed), out_shardings=(places, None), donate_argnums=0)
    return jitted, jax.device_put(jax.tree.map(np.array, state), places), jax.device_put(batch, fed)
