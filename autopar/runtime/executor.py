"""Run a plan: place the arguments, keep state from being used twice, call the compiled program."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.emit.manual import Emission, emit, named_sharding
from autopar.emit.spmd import emit_jit
from autopar.errors import MeshError, StateError, UsageError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.trace import compat
from autopar.trace.trace import Traced

_BELOW_ONE_BYTE = ("int4", "uint4", "int2", "uint2")


def make_mesh(mesh: LogicalMesh, devices: Sequence[Any] | None = None) -> Mesh:
    """A JAX mesh (Auto axes) of the logical mesh's shape over the first devices. Raises `MeshError` when there are too few."""
    found = list(jax.devices() if devices is None else devices)
    check_devices(mesh.num_devices, len(found), f" ({mesh})")
    return Mesh(np.array(found[: mesh.num_devices]).reshape(mesh.sizes), mesh.names)


def check_devices(needed: int, here: int, mesh: str = "") -> None:
    """Raise `MeshError` where fewer devices are here than a plan needs."""
    if here < needed:
        raise MeshError(
            f"the plan needs {needed} devices{mesh}, but {here} are here. Plan for a smaller cluster, or simulate: "
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX starts."
        )


@contextmanager
def own_settings(mesh: Mesh) -> Iterator[None]:
    """The mesh of a plan in place of the caller's, and none of the caller's settings that would keep a compiled program from running.

    A step under `jax.disable_jit` still runs compiled, and its arguments are placed whatever `jax.transfer_guard` says.
    """
    with jax.set_mesh(mesh), jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


class Owned:
    """The arrays that a step has returned and may take back: only those are donated."""

    def __init__(self) -> None:
        self._arrays: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, array: Any) -> None:
        self._arrays[id(array)] = array

    def __contains__(self, array: Any) -> bool:
        return self._arrays.get(id(array)) is array


class Executable:
    """A plan compiled for devices that are here. Calling it with flat leaves runs one step and returns flat outputs."""

    def __init__(
        self,
        traced: Traced,
        emission: Emission,
        mesh: Mesh,
        donate: bool,
        emitter: str = "shard_map",
        compiler_options: Mapping[str, Any] | None = None,
    ):
        self.traced, self.emission, self.mesh = traced, emission, mesh
        self.shardings = [named_sharding(s, mesh) for s in emission.plan.inputs]
        self.carried = tuple(i for i, _ in traced.roles.carried) if donate else ()
        constants = traced.program.constants
        first = len(self.shardings) - len(constants)
        with own_settings(mesh):
            self.zero = jax.device_put(np.int32(0), named_sharding(TensorSharding(()), mesh))
            self.constants = [jax.device_put(c, s) for c, s in zip(constants, self.shardings[first:], strict=True)]
        program = emit_jit(emission, mesh) if emitter == "jit" else emit(emission, mesh)
        donated = tuple(i + 1 for i in self.carried)
        self._jitted = jax.jit(program, donate_argnums=donated, compiler_options=dict(compiler_options or {}))

    def specs(self) -> list[Any]:
        """The program's arguments as `jax.ShapeDtypeStruct`s on the mesh."""
        avals = [self.traced.graph.avals[v] for v in self.traced.graph.inputs]
        structs = [compat.struct(a, s) for a, s in zip(avals, self.shardings, strict=True)]
        return [jax.ShapeDtypeStruct((), jnp.int32, sharding=self.zero.sharding), *structs]

    def lower(self) -> Any:
        """The program lowered for the mesh, as `jax.jit(...).lower` gives it. The caller's own mesh plays no part."""
        return self.lowered

    @cached_property
    def lowered(self) -> Any:
        """The lowered program; lowered once."""
        with own_settings(self.mesh):
            return self._jitted.lower(*self.specs())

    @cached_property
    def compiled(self) -> Any:
        """The compiled program; compiled once."""
        with own_settings(self.mesh):
            return self.lowered.compile()

    def __call__(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        check_leaves(leaves, self.traced.graph.input_names)
        # A program compiled ahead of time refuses arrays of integers below one byte: JAX takes their layout for another one.
        run = self._jitted if any(a.dtype in _BELOW_ONE_BYTE for a in self.traced.graph.avals) else self.compiled
        with own_settings(self.mesh):
            outputs = run(self.zero, *self.place(leaves, owned), *self.constants)
        for array in outputs:
            owned.add(array)
        return list(outputs)

    def place(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        """Leaves on the mesh in the planned shardings. State that is not ours, or given twice, is copied before it is donated."""
        kept = Counter(id(x) for x in leaves)
        carried, placed = set(self.carried), []
        for i, (leaf, sharding) in enumerate(zip(leaves, self.shardings, strict=False)):
            copy = i in carried and not (leaf in owned and kept[id(leaf)] == 1)
            kept[id(leaf)] -= i in carried
            placed.append(put(leaf, self.traced.graph.avals[self.traced.graph.inputs[i]].dtype, sharding, copy))
        return placed


def check_leaves(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Raise an error unless every leaf is an array that is still there."""
    for leaf, name in zip(leaves, names, strict=False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise UsageError(f"`{name}` is a shape, and running a step takes arrays. `step.plan` and `step.lower` take shapes.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise StateError(
                f"`{name}` was donated to an earlier step and is gone, or was deleted. Pass the state that the last step returned, or keep "
                "the old one with Options(donate=False)."
            )


def put(leaf: Any, dtype: str, sharding: NamedSharding, copy: bool) -> Any:
    """A leaf on the mesh. What the host holds is always copied, so that it may be changed while the step runs."""
    if not isinstance(leaf, jax.Array):
        return jax.device_put(np.array(leaf, dtype=jax.dtypes.float0 if dtype == "float0" else dtype), sharding)
    placed = leaf if _lies(leaf, sharding) else jax.device_put(leaf, sharding)
    return copy_of(placed) if copy else placed


def _lies(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Whether a leaf is where it should be. To ask takes a tenth of the time of a move to the same place."""
    found = leaf.sharding
    same_mesh = isinstance(found, NamedSharding) and found.mesh == sharding.mesh and found.memory_kind == sharding.memory_kind
    return leaf.committed and same_mesh and found.is_equivalent_to(sharding, leaf.ndim)


def copy_of(array: Any) -> Any:
    """A fresh buffer with the same contents and sharding."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(array).copy(), impl=jax.random.key_impl(array))
    return array.copy()
