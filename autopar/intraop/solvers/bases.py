"""Where earlier runs of the simplex method ended: a relaxation with the same matrix, whatever its costs, is best begun there."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from zlib import crc32

import highspy

from autopar.intraop.solvers.programme import Programme

MOST = 128
"""Bases that are kept, the last ones."""


class Bases:
    """Bases by matrix. They make runs shorter and change no value; which of several optima is found may depend on them."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, highspy.HighsBasis] = OrderedDict()

    def begin(self, solver: highspy.Highs, model: Programme) -> None:
        """Has a fresh solver of a relaxation of `model` begin where one with as many rows ended, if there was one."""
        known = self._known.get(_key(solver, model))
        if known is not None:
            solver.setBasis(known)

    def keep(self, solver: highspy.Highs, model: Programme) -> None:
        """Remembers where a solver ended, before it is given more rows."""
        basis = solver.getBasis()
        if basis.valid:
            self._known[_key(solver, model)] = basis
            self._known.move_to_end(_key(solver, model))
        while len(self._known) > MOST:
            self._known.popitem(last=False)


def _key(solver: highspy.Highs, model: Programme) -> Any:
    matrix = model.matrix
    return matrix.shape, solver.getNumRow(), crc32(matrix.indptr.tobytes()), crc32(matrix.indices.tobytes())
