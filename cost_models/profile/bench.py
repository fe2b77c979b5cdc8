"""The programs that measure devices. The only module of this package that imports JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost_models.fit import summarise
from cost_models.profile.questions import Question, shape_of

_AXIS = "devices"
_LEAST_SAMPLES, _MOST_SAMPLES, _ENOUGH_S = 3, 15, 0.15
_CHAIN = 4
_POLYNOMIAL = 32
Body = Callable[..., Any]


class Bench:
    """Times per-device programs on all devices at once, in the order of `devices`."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = list(devices)

    def ask(self, question: Question) -> list[float]:
        """Seconds of what a question asks for, once per repeat, after compiling and warming up."""
        what, *rest = question.curve.split(" ")
        with jax.enable_x64(True):
            return getattr(self, f"_{what}")(question.at, *rest)

    @cached_property
    def _empty(self) -> float:
        """A program that does next to nothing, called on every device."""
        return summarise(self._samples(lambda x: x + 1, [((8,), "float32")])).seconds

    def _samples(self, body: Body, operands: Sequence[tuple[tuple[int, ...], str]], group: tuple[int, int] | None = None) -> list[float]:
        """Seconds of `body` on local blocks of ones; with `group`, its mesh axis runs over groups of `(size, stride)`."""
        mesh = self._mesh(*(group or (len(self.devices), 1)))
        spec = PartitionSpec(mesh.axis_names)
        program = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(operands), out_specs=spec, check_vma=False)
        run = jax.jit(program)
        blocks = [_ones(mesh, spec, shape, dtype) for shape, dtype in operands]
        return _repeat(lambda: jax.block_until_ready(run(*blocks)))

    def _mesh(self, size: int, stride: int) -> Mesh:
        """The devices as groups, members, and what lies between two members."""
        found = np.array(self.devices).reshape(-1, size, stride)
        return Mesh(found, ("outer", _AXIS, "inner"))

    def _beyond(self, samples: Sequence[float], times: float) -> list[float]:
        """Per operation of a chain, without the call of a program."""
        return [max(each - self._empty, 0.1 * each) / times for each in samples]

    def _launch(self, at: str) -> list[float]:
        """Slope over the length of a chain of small ops, a matmul and an element-wise one in turn, so that nothing fuses."""

        def chain(pairs: int) -> Body:
            def body(x: Any) -> Any:
                for _ in range(pairs):
                    x = jnp.sin(x @ x)
                return x

            return body

        short, long = (self._samples(chain(pairs), [((8, 8), "float32")]) for pairs in (8, 136))
        return [max((each - summarise(short).seconds) / 256, 1e-7) for each in long]

    def _matmul(self, at: str, dtype: str) -> list[float]:
        """Pairs of matmuls, `(m k), (k n)` and `(m n), (n k)`, which have the same FLOPs, so that calls can be chained."""
        shape = shape_of(at)
        b, m, n, k = (int(each) for each in shape)

        def chain(x: Any, y: Any, z: Any) -> Any:
            for _ in range(_CHAIN // 2):
                x = jnp.matmul(x, y, preferred_element_type=x.dtype) * (1 / k)
                x = jnp.matmul(x, z, preferred_element_type=x.dtype) * (1 / n)
            return x

        operands = [((b, m, k), dtype), ((b, k, n), dtype), ((b, n, k), dtype)]
        return self._beyond(self._samples(chain, operands), _CHAIN)

    def _memory(self, at: str) -> list[float]:
        """One element-wise pass over float32: as much is read as written."""
        return self._beyond(self._samples(lambda x: x * 0.5 + 0.25, [((int(at) // 4,), "float32")]), 1)

    def _vector(self, at: str, dtype: str) -> list[float]:
        """One fused element-wise loop of two operations for each step of a polynomial."""

        def polynomial(x: Any) -> Any:
            y = x
            for _ in range(_POLYNOMIAL):
                y = y * x + 0.25
            return y

        itemsize = jnp.dtype(dtype).itemsize
        return self._beyond(self._samples(polynomial, [((int(at) // itemsize,), dtype)]), 1)

    def _collective(self, at: str, kind: str, group: str) -> list[float]:
        """A chain of one collective, over all groups of that size and stride at once."""
        size, stride = map(int, group.split(":"))
        elements = max(1, int(at) // 4)
        if kind in ("reduce_scatter", "all_to_all"):
            elements = -(-elements // size) * size

        def chain(x: Any) -> Any:
            for _ in range(_CHAIN):
                x = _once(kind, x, size)
            return x

        return self._beyond(self._samples(chain, [((elements,), "float32")], (size, stride)), _CHAIN)

    def _transfer(self, at: str) -> list[float]:
        """An array that lies on the first half of the devices, put on the other half."""
        half = len(self.devices) // 2
        here, there = (
            NamedSharding(Mesh(np.array(part), (_AXIS,)), PartitionSpec(_AXIS)) for part in (self.devices[:half], self.devices[half:])
        )
        block = jax.device_put(np.ones(max(1, int(at) // 4) * half, np.float32), here)
        return _repeat(lambda: jax.block_until_ready(jax.device_put(block, there)))


def _ones(mesh: Mesh, spec: PartitionSpec, local: tuple[int, ...], dtype: str) -> Any:
    """A block of ones on each device, made there."""
    shape = (local[0] * mesh.size, *local[1:])
    return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=NamedSharding(mesh, spec))()


def _repeat(run: Callable[[], Any]) -> list[float]:
    """Seconds of repeats, after one to compile and one to warm up: at least a few, more while they are short."""
    run()
    run()
    found: list[float] = []
    while len(found) < _LEAST_SAMPLES or (len(found) < _MOST_SAMPLES and sum(found) < _ENOUGH_S):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def _once(kind: str, x: Any, size: int) -> Any:
    """One collective whose result has the operand's shape, so that calls can be chained, and as little else as possible."""
    if kind == "all_gather":
        return lax.all_gather(x, _AXIS, tiled=True)[-x.size :]
    if kind == "all_reduce":
        return lax.psum(x, _AXIS)
    if kind == "reduce_scatter":
        return lax.dynamic_update_slice(x, lax.psum_scatter(x, _AXIS, tiled=True), (0,))
    if kind == "all_to_all":
        return lax.all_to_all(x, _AXIS, 0, 0, tiled=True)
    return lax.ppermute(x, _AXIS, [(index, (index + 1) % size) for index in range(size)])
