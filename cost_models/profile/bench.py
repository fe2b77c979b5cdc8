"""The programs that measure simulated devices. The only module of this package that imports JAX; it runs in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cost_models.collective import KINDS

_AXIS = "devices"
_SAMPLES = 15
_EDGE = 256
_MATMULS = 4
_CHAIN = 4
_SMALL = 512
Body = Callable[[Any], Any]


class Bench:
    """Times per-device programs on all simulated devices at once."""

    def __init__(self, devices: int) -> None:
        jax.config.update("jax_enable_x64", True)
        self.devices = devices
        self.mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))
        self.large = max(_SMALL * 2, 2**21 // devices // devices * devices)
        self.empty = self.seconds(lambda x: x + 1, (devices,))

    def seconds(self, body: Body, local: tuple[int, ...], dtype: str = "float32") -> float:
        """Median time of `body` on a `local` block of ones on each device, after compiling and warming up."""
        spec = PartitionSpec(_AXIS)
        run = jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        ones = np.ones((local[0] * self.devices, *local[1:]), dtype=jnp.dtype(dtype))
        block = jax.device_put(ones, NamedSharding(self.mesh, spec))
        run(block).block_until_ready()
        return median(_time(run, block) for _ in range(_SAMPLES))

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s of square matmuls, `2 n^3` each."""

        def chain(x: Any) -> Any:
            for _ in range(_MATMULS):
                x = jnp.dot(x, x, preferred_element_type=x.dtype)
            return x

        return _MATMULS * 2 * _EDGE**3 / self._beyond_empty(self.seconds(chain, (_EDGE, _EDGE), dtype))

    def memory_bytes_per_s(self) -> float:
        """One element-wise pass over float32: four bytes read and four written per element."""
        return 8 * self.large / self._beyond_empty(self.seconds(lambda x: x * 0.5 + 0.25, (self.large,)))

    def vector_flops(self) -> float:
        """FLOP/s of one fused element-wise loop of 64 operations per element."""

        def polynomial(x: Any) -> Any:
            y = x
            for _ in range(32):
                y = y * x + 0.25
            return y

        return 64 * self.large / self._beyond_empty(self.seconds(polynomial, (self.large,)))

    def launch_seconds(self) -> float:
        """Slope over the length of a chain of small ops, a matmul and an element-wise one in turn, so that nothing fuses."""

        def chain(pairs: int) -> Body:
            def body(x: Any) -> Any:
                for _ in range(pairs):
                    x = jnp.sin(x @ x)
                return x

            return body

        short, long = (self.seconds(chain(pairs), (8, 8)) for pairs in (8, 40))
        return max((long - short) / 64, 1e-7)

    def collectives(self) -> tuple[dict[str, float], dict[str, float]]:
        """Per kind, seconds of a call and bytes/s per device, from a line through a small and a large operand."""
        if self.devices == 1:
            return dict.fromkeys(KINDS, self.empty), dict.fromkeys(KINDS, self.memory_bytes_per_s())
        fits = {kind: self._fit(kind) for kind in KINDS}
        return {kind: fit[0] for kind, fit in fits.items()}, {kind: fit[1] for kind, fit in fits.items()}

    def _fit(self, kind: str) -> tuple[float, float]:
        unit = self.devices if kind in ("reduce_scatter", "all_to_all") else 1
        few, many = (-(-size // unit) * unit for size in (_SMALL, self.large // 2))
        body = _repeated(kind, self.devices)
        small, large = (self._beyond_empty(self.seconds(body, (size,))) / _CHAIN for size in (few, many))
        written = 4 * (self.devices if kind == "all_gather" else 1)
        slope = max(large - small, 0.1 * large) / (written * (many - few))
        return max(small - slope * written * few, 1e-6), 1 / slope

    def _beyond_empty(self, seconds: float) -> float:
        return max(seconds - self.empty, 0.1 * seconds)


def _time(run: Body, block: Any) -> float:
    start = time.perf_counter()
    run(block).block_until_ready()
    return time.perf_counter() - start


def _repeated(kind: str, size: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(_CHAIN):
            x = _once(kind, x, size)
        return x

    return body


def _once(kind: str, x: Any, size: int) -> Any:
    """One collective whose result has the operand's shape, so that calls can be chained."""
    if kind == "all_gather":
        return lax.all_gather(x, _AXIS, tiled=True)[x.size : 2 * x.size]
    if kind == "all_reduce":
        return lax.psum(x, _AXIS)
    if kind == "reduce_scatter":
        return jnp.tile(lax.psum_scatter(x, _AXIS, tiled=True), size)
    if kind == "all_to_all":
        return lax.all_to_all(x, _AXIS, 0, 0, tiled=True)
    return lax.ppermute(x, _AXIS, [(index, (index + 1) % size) for index in range(size)])
