"""One accelerator: a roofline whose matmul roof rises with size and falls with shapes that do not fit its tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from cost_models.tiles import Shape, Tiling

_SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "complex128": "float64", "s8": "int8", "uint8": "int8"}
_INSTEAD = {"float8": ("bfloat16", "float16"), "int8": ("bfloat16",), "float16": ("bfloat16",), "bfloat16": ("float16",)}


@dataclass(frozen=True)
class Device:
    """What one device (as JAX counts them) can do. FLOP/s, bytes, bytes/s, seconds.

    `peak_flops` are the dense matmul peaks by dtype, at JAX's default matmul precision; `vector_flops` the peak of everything else.
    `matmul_efficiency` is what large matmuls reach of their peak, `dtype_efficiency` the same where a dtype has its own; `fused_efficiency`
    is what products within a kernel that does more reach, such as fused attention. `half_flops` is
    the matmul size, in FLOPs, at which half of that is reached. `tiling` prices shapes; without one only FLOPs count. Of `memory_bytes`,
    driver, context and runtime keep `reserved_bytes`, and an allocator leaves `fragmentation` of the rest unused.
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
    reserved_bytes: int = 0
    fragmentation: float = 0.0
    dtype_efficiency: tuple[tuple[str, float], ...] = ()
    fused_efficiency: float = 0.5
    tiling: Tiling | None = None

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return dict(self.peak_flops)

    @cached_property
    def _matmul_rates(self) -> dict[str, float]:
        return {}

    @cached_property
    def _ramp(self) -> float:
        return self.half_flops ** (2 / 3)

    @cached_property
    def _memory_rate(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    def usable_bytes(self, fraction: float = 1.0) -> float:
        """Bytes that a program may fill: `fraction` of what is not reserved, less fragmentation."""
        return (self.memory_bytes - self.reserved_bytes) * (1 - self.fragmentation) * fraction

    def peak(self, dtype: str) -> float:
        """Matmul peak in FLOP/s. A dtype that the device lacks runs as the nearest wider one it has, in the end as float32."""
        found = self._peaks.get(dtype)
        return found if found is not None else self._nearest_peak(dtype)

    def _nearest_peak(self, dtype: str) -> float:
        known = [each for each in _names(dtype) if each in self._peaks]
        self._peaks[dtype] = self._peaks[known[0]] if known else self._peaks["float32"]
        return self._peaks[dtype]

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s that large matmuls reach."""
        found = self._matmul_rates.get(dtype)
        if found is None:
            own = dict(self.dtype_efficiency)
            efficiency = next((own[each] for each in (dtype, *_names(dtype)[:1]) if each in own), self.matmul_efficiency)
            found = self._matmul_rates[dtype] = self.peak(dtype) * efficiency
        return found

    def fused_seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of a kernel that multiplies matrices and does other work between: `fused_efficiency` of the peak."""
        return max(flops / (self.peak(dtype) * self.fused_efficiency), nbytes / self._memory_rate)

    def compute_seconds(self, flops: float, nbytes: float, dtype: str, matmul: bool, shape: Shape | None = None) -> float:
        """Roofline: the slower of arithmetic and memory traffic, in seconds, without launch cost.

        A matmul of `f` FLOPs reaches `matmul_efficiency / (1 + (half_flops / f)^(2/3))` of the peak. `f^(1/3)` is its edge, so the loss
        is that of partly filled tiles and of filling the pipeline; the form fits published square matmuls of a TPU v7x core from edge 512
        on within 25 %. Where its `shape` is given, it takes at least what its tiles take when they are padded (`Tiling`).
        """
        return max(self._arithmetic_seconds(flops, dtype, matmul, shape), nbytes / self._memory_rate)

    def _arithmetic_seconds(self, flops: float, dtype: str, matmul: bool, shape: Shape | None) -> float:
        if matmul:
            spent = flops + self._ramp * flops ** (1 / 3)
            if shape is not None and self.tiling is not None and flops > 0:
                spent = max(spent, self.tiling.padded_flops(shape))
            return spent / self.matmul_rate(dtype)
        return flops / self.vector_flops * (2 if dtype in ("float64", "complex128") else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        tables = {"peak_flops": dict(self.peak_flops), "dtype_efficiency": dict(self.dtype_efficiency)}
        return {**fields, **tables, "tiling": asdict(self.tiling) if self.tiling else {}}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Device:
        """The inverse of `to_dict`."""
        given = {"dtype_efficiency": {}, **data}
        known: dict[str, Any] = {key: tuple(sorted(given[key].items())) for key in ("peak_flops", "dtype_efficiency")}
        known |= {key: int(data.get(key, 0)) for key in ("memory_bytes", "reserved_bytes")}
        tiling = data.get("tiling")
        known["tiling"] = Tiling(**{**tiling, "tiles": tuple(map(tuple, tiling["tiles"]))}) if tiling else None
        return Device(**{**data, **known})


def _names(dtype: str) -> tuple[str, ...]:
    """What a dtype may run as, in order of preference."""
    name = "float8" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
    return name, *_INSTEAD.get(name, ())
