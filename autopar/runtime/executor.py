"""Run a plan: place the arguments, keep state from being used twice, call the compiled program."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.emit.manual import Emission, emit, named_sharding
from autopar.emit.spmd import emit_jit
from autopar.errors import MeshError, StateError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.trace.trace import Traced


def make_mesh(mesh: LogicalMesh, devices: Sequence[Any] | None = None) -> Mesh:
    """A JAX mesh (Auto axes) of the logical mesh's shape over the first devices. Raises `MeshError` when there are too few."""
    found = list(jax.devices() if devices is None else devices)
    if len(found) < mesh.num_devices:
        raise MeshError(
            f"the plan needs {mesh.num_devices} devices ({mesh}), but {len(found)} are here. Plan for a smaller cluster, or simulate: "
            f"jax.config.update('jax_num_cpu_devices', {mesh.num_devices}) before JAX starts."
        )
    return Mesh(np.array(found[: mesh.num_devices]).reshape(mesh.sizes), mesh.names)


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

    def __init__(self, traced: Traced, emission: Emission, mesh: Mesh, donate: bool, emitter: str = "shard_map"):
        self.traced, self.emission, self.mesh = traced, emission, mesh
        self.shardings = [named_sharding(s, mesh) for s in emission.plan.inputs]
        self.carried = tuple(i for i, _ in traced.roles.carried) if donate else ()
        self.zero = jax.device_put(jnp.int32(0), named_sharding(TensorSharding(()), mesh))
        constants = traced.program.constants
        first = len(self.shardings) - len(constants)
        self.constants = [jax.device_put(c, s) for c, s in zip(constants, self.shardings[first:], strict=True)]
        program = emit_jit(emission, mesh) if emitter == "jit" else emit(emission, mesh)
        self._jitted = jax.jit(program, donate_argnums=tuple(i + 1 for i in self.carried))
        self._compiled: Any = None

    def specs(self) -> list[Any]:
        """The program's arguments as `jax.ShapeDtypeStruct`s on the mesh."""
        avals = [self.traced.graph.avals[v] for v in self.traced.graph.inputs]
        structs = [_struct(a, s) for a, s in zip(avals, self.shardings, strict=True)]
        return [jax.ShapeDtypeStruct((), jnp.int32, sharding=self.zero.sharding), *structs]

    def lower(self) -> Any:
        """The program lowered for the mesh, as `jax.jit(...).lower` gives it."""
        return self._jitted.lower(*self.specs())

    @property
    def compiled(self) -> Any:
        """The compiled program; compiled once."""
        if self._compiled is None:
            self._compiled = self.lower().compile()
        return self._compiled

    def __call__(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        arguments = self.place(leaves, owned)
        outputs = self.compiled(self.zero, *arguments, *self.constants)
        for array in outputs:
            owned.add(array)
        return list(outputs)

    def place(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        """Leaves on the mesh in the planned shardings. State that is not ours, or given twice, is copied before it is donated."""
        _check_alive(leaves, self.traced.graph.input_names)
        carried, seen, placed = set(self.carried), set(), []
        for i, (leaf, sharding) in enumerate(zip(leaves, self.shardings, strict=False)):
            ours = leaf in owned and id(leaf) not in seen
            seen.add(id(leaf))
            placed.append(_put(leaf, self.traced.graph.avals[self.traced.graph.inputs[i]].dtype, sharding, i in carried and not ours))
        return placed


def _struct(aval: Any, sharding: Any) -> Any:
    if aval.dtype.startswith("key<"):
        impl = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[aval.dtype[4:-1]]
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding)
    dtype = jax.dtypes.float0 if aval.dtype == "float0" else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding)


def _check_alive(leaves: Sequence[Any], names: Sequence[str]) -> None:
    for leaf, name in zip(leaves, names, strict=False):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise StateError(
                f"`{name}` was donated to an earlier step and is gone. Pass the state that the last step returned, or keep the old one "
                "with Options(donate=False)."
            )


def _put(leaf: Any, dtype: str, sharding: Any, copy: bool) -> Any:
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf).astype(dtype) if not dtype.startswith("key<") and dtype != "float0" else leaf
        return jax.device_put(leaf, sharding)
    placed = jax.device_put(leaf, sharding)
    return _copy(placed) if copy else placed


def _copy(array: Any) -> Any:
    """A fresh buffer with the same contents and sharding."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(array).copy(), impl=jax.random.key_impl(array))
    return array.copy()
