"""One accelerator: a roofline whose matmul roof rises with size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

_SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "complex128": "float64", "s8": "int8", "uint8": "int8"}
_INSTEAD = {"float8": ("bfloat16", "float16"), "int8": ("bfloat16",), "float16": ("bfloat16",), "bfloat16": ("float16",)}


@dataclass(frozen=True)
class Device:
    """What one device (as JAX counts them) can do. FLOP/s, bytes, bytes/s, seconds.

    `peak_flops` are the dense matmul peaks by dtype, at JAX's default matmul precision; `vector_flops` the peak of everything else.
    `half_flops` is the matmul size, in FLOPs, at which half of `matmul_efficiency` is reached.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    vector_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    matmul_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    half_flops: float = 0.0
    launch_seconds: float = 0.0

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return dict(self.peak_flops)

    @cached_property
    def _ramp(self) -> float:
        return self.half_flops ** (2 / 3)

    @cached_property
    def _memory_rate(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    def peak(self, dtype: str) -> float:
        """Matmul peak in FLOP/s. A dtype that the device lacks runs as the nearest wider one it has, in the end as float32."""
        found = self._peaks.get(dtype)
        return found if found is not None else self._nearest_peak(dtype)

    def _nearest_peak(self, dtype: str) -> float:
        name = "float8" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
        known = [each for each in (name, *_INSTEAD.get(name, ())) if each in self._peaks]
        self._peaks[dtype] = self._peaks[known[0]] if known else self._peaks["float32"]
        return self._peaks[dtype]

    def compute_seconds(self, flops: float, nbytes: float, dtype: str, matmul: bool) -> float:
        """Roofline: the slower of arithmetic and memory traffic, in seconds, without launch cost.

        A matmul of `f` FLOPs reaches `matmul_efficiency / (1 + (half_flops / f)^(2/3))` of the peak. `f^(1/3)` is its edge, so the loss
        is that of partly filled tiles and of filling the pipeline; the form fits published square matmuls of a TPU v7x core from edge 512
        on within 25 %.
        """
        return max(self._arithmetic_seconds(flops, dtype, matmul), nbytes / self._memory_rate)

    def _arithmetic_seconds(self, flops: float, dtype: str, matmul: bool) -> float:
        if matmul:
            return (flops + self._ramp * flops ** (1 / 3)) / (self.peak(dtype) * self.matmul_efficiency)
        return flops / self.vector_flops * (2 if dtype in ("float64", "complex128") else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "peak_flops": dict(self.peak_flops)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Device:
        """The inverse of `to_dict`."""
        return Device(**{**data, "peak_flops": tuple(sorted(data["peak_flops"].items())), "memory_bytes": int(data["memory_bytes"])})
