"""What a matmul's shape costs beside its FLOPs: partly filled tiles, waves, and padding.

A GPU computes the result in tiles, one for each of its multiprocessors at a time; `ceil(tiles / units)` waves are paid whole, and so is
each tile that sticks out (NVIDIA, "Matrix multiplication background user's guide", sections on tile and wave quantisation). A TPU pads the
dimensions to the edge of its systolic array and the sublanes of its registers (Google Cloud, "TPU system architecture"; XLA's layouts pad
to tiles of 8 x 128): there one unit holds one tile, and the same arithmetic applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Shape(NamedTuple):
    """`batch` matmuls `(m k), (k n) -> (m n)`, on local sizes."""

    batch: float
    m: float
    n: float
    k: float

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Tiling:
    """Tiles `(m, n, k, efficiency)` that a library chooses among, and how many are computed at once.

    `efficiency` is that of a full tile against the largest one: small tiles read their operands more often. `least_rows` go through a
    unit in any case, along `m` or, transposed, `n`: a systolic array loads its next weights in as many steps as it has rows.
    """

    tiles: tuple[tuple[int, int, int, float], ...]
    units: int = 1
    least_rows: int = 0

    @cached_property
    def _known(self) -> dict[Shape, float]:
        return {}

    def padded_flops(self, shape: Shape) -> float:
        """FLOPs that the best tile spends on `shape`, idle units and padding counted, at the largest tile's efficiency.

        `ceil(tiles / units) units * 2 tm tn ceil(k / tk) tk / efficiency`, the least over tiles; transposed ones count as tiles too. Where
        there are fewer tiles than units, `k` is split among those that would idle, down to one step of `tk`.

        >>> Tiling(((128, 128, 32, 1.0),), 4).padded_flops(Shape(1, 256, 256, 64)) / Shape(1, 256, 256, 64).flops
        1.0
        >>> Tiling(((8, 128, 128, 1.0),)).padded_flops(Shape(1, 1024, 128, 64)) / Shape(1, 1024, 128, 64).flops
        2.0
        """
        found = self._known.get(shape)
        if found is None:
            found = self._known[shape] = min(self._spent(shape, *tile) for tile in self.tiles)
        return found

    def _spent(self, shape: Shape, m: int, n: int, k: int, efficiency: float) -> float:
        steps = _up(shape.k, k)
        ways = []
        for rows, columns in {(shape.m, shape.n), (shape.n, shape.m)}:
            tiles = shape.batch * _up(max(rows, self.least_rows), m) * _up(columns, n)
            split = max(1, min(int(self.units // tiles), steps)) if tiles < self.units else 1
            ways.append(_up(tiles * split, self.units) * self.units * _up(steps, split))
        return min(ways) * 2.0 * m * n * k / efficiency


def _up(number: float, step: float) -> int:
    """`ceil(number / step)`, at least 1."""
    return max(1, int(-(-number // step)))
