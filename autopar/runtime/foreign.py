"""Compile a plan's program with the real compiler of hardware that is not here, and read what it makes of it.

The compilers come with `autopar[tpu-aot]` (libtpu) and `autopar[cuda-aot]` (the CUDA plugin of JAX without its libraries); neither needs a
device. A program that compiles is no proof that it fits: the TPU compiler refuses temporaries that exceed the memory by themselves only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from autopar import rules
from autopar.emit.compare import CollectiveCheck, compare_collectives
from autopar.emit.hlo import read_collectives
from autopar.emit.manual import Emission, emit, named_sharding
from autopar.errors import CheckError, MeshError, UsageError
from autopar.ir.plan import Plan
from autopar.ir.sharding import TensorSharding
from autopar.runtime.held import BACKENDS, temporaries
from autopar.runtime.program import planned
from autopar.runtime.verify import Check, Verification
from autopar.trace import compat
from autopar.trace.trace import Traced

COMPILERS = ("tpu", "cuda")
SURROUNDINGS = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""What the plugins ask of the environment where there is no device: no metadata server, no lock, no CUDA libraries. To be set before JAX
first asks for a device."""

EXTRAS = {"tpu": "tpu-aot", "cuda": "cuda-aot"}

# Presets and what a compiler has to know of them: compute capability, multiprocessors, shared memory and registers (CUDA C++ programming
# guide, table of technical specifications per compute capability), and the name that drivers give the device.
GPUS: Mapping[str, tuple[tuple[int, int], int, int, int, str]] = {
    "v100-p3": ((7, 0), 80, 98304, 98304, "Tesla V100-SXM2-16GB"),
    "v100-dgx2": ((7, 0), 80, 98304, 98304, "Tesla V100-SXM3-32GB"),
    "a100-40": ((8, 0), 108, 167936, 166912, "NVIDIA A100-SXM4-40GB"),
    "a100-80": ((8, 0), 108, 167936, 166912, "NVIDIA A100-SXM4-80GB"),
    "h100-sxm": ((9, 0), 132, 233472, 232448, "NVIDIA H100 80GB HBM3"),
    "h200-sxm": ((9, 0), 132, 233472, 232448, "NVIDIA H200"),
}
TPUS = ("v4", "v5e", "v5p", "v6e")
COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cuda": {
        **{f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "reduce_scatter", "all_gather")},
        "xla_gpu_enable_triton_gemm": False,
    },
    "tpu": {},
}
"""Without combining, compiled collectives stand beside written ones one by one. Tiles of Triton's matmuls are found by running them."""


@dataclass(frozen=True)
class Foreign:
    """What a foreign compiler made of a plan: bytes on one device, the text of the program, and the check of its collectives.

    `expected_bytes` are the temporaries that the plan is expected to hold by that compiler's rules.
    """

    compiler: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    expected_bytes: int
    collectives: CollectiveCheck
    text: str

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs that take no argument's place, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compile_for(plan: Plan, traced: Traced, compiler: str, donate: bool = True) -> Foreign:
    """Compile a plan with `compiler` (`tpu` or `cuda`) for the cluster that it is for.

    Raises `MeshError` where the compiler is not installed or does not know the cluster.
    """
    mesh = foreign_mesh(plan, compiler)
    program = planned(traced, plan)
    found = tuple(rules.rule_for(op, program.graph.aval) for op in program.graph.ops)
    emission = Emission(program.graph, program.program, found, plan.sharding, plan.options.get("reduce_dtype") == "as_written")
    donated = tuple(i + 1 for i, _ in program.roles.carried) if donate else ()
    jitted = jax.jit(emit(emission, mesh), donate_argnums=donated, compiler_options=dict(COMPILER_OPTIONS[compiler]))
    with jax.set_mesh(mesh):
        lowered = jitted.trace(*_specs(program, plan, mesh)).lower(lowering_platforms=(compiler,))
        compiled = _compiled(lowered, compiler)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Foreign(
        compiler,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        temporaries(plan, traced, BACKENDS[compiler]),
        compare_collectives(plan.collectives, read_collectives(text), compiler, plan.mesh),
        text,
    )


def _compiled(lowered: Any, compiler: str) -> Any:
    """The compiled program. Raises `CheckError` where the compiler refuses it, as for want of memory."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        what = re.sub(r"\s+", " ", str(error))[:400]
        raise CheckError(f"the {compiler} compiler refuses the program: {what}. Where it is for want of memory, plan for less.") from error


def _specs(program: Traced, plan: Plan, mesh: Mesh) -> list[Any]:
    """The program's arguments as shapes on the mesh."""
    avals = [program.graph.avals[v] for v in program.graph.inputs]
    structs = [compat.struct(a, named_sharding(s, mesh)) for a, s in zip(avals, plan.sharding.inputs, strict=True)]
    zero = jax.ShapeDtypeStruct((), jnp.int32, sharding=named_sharding(TensorSharding(()), mesh))
    return [zero, *structs]


def foreign_mesh(plan: Plan, compiler: str) -> Mesh:
    """The plan's mesh over devices that are not here, in the cluster's order."""
    name, shape = str(plan.cluster["name"]).partition(":")[0], tuple(plan.cluster["topology"]["shape"])
    devices = _tpu_devices(name, shape) if compiler == "tpu" else _gpu_devices(name, shape, plan.cluster["device"])
    if len(devices) < plan.mesh.num_devices:
        raise MeshError(f"the {compiler} compiler sees {len(devices)} devices, and the plan is for {plan.mesh.num_devices}.")
    return Mesh(np.array(devices[: plan.mesh.num_devices]).reshape(plan.mesh.sizes), plan.mesh.names)


def _tpu_devices(name: str, shape: Sequence[int]) -> list[Any]:
    """The chips of a TPU topology, row-major over its torus, slice by slice."""
    if name not in TPUS:
        raise MeshError(f"the TPU compiler knows {', '.join(TPUS)}, not {name}. Plan for one of these, or use --compiler cuda.")
    slices, *chips = shape
    described = _topology("tpu", f"{name}:{'x'.join(map(str, chips))}", **({"num_slices": slices} if slices > 1 else {}))
    return sorted(described.devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, *d.coords))


def _gpu_devices(name: str, shape: Sequence[int], device: Mapping[str, Any]) -> list[Any]:
    if name not in GPUS:
        raise MeshError(f"the CUDA compiler is told of {', '.join(GPUS)}, not {name}. Plan for one of these, or use --compiler tpu.")
    hosts, count = shape
    return list(_topology("cuda", "", target_config=gpu_config(name, device), topology=f"1x{hosts}x{count}").devices)


def gpu_config(name: str, device: Mapping[str, Any]) -> str:
    """A GPU as its compiler is told of it, in protobuf's text form."""
    (major, minor), cores, shared, optin, description = GPUS[name]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": 128 if major == 9 else 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(device["memory_bytes_per_s"]),
        "l2_cache_size": {7: 6, 8: 40, 9: 50}[major] * 2**20,
        "clock_rate_ghz": {7: 1.53, 8: 1.41, 9: 1.98}[major],
        "device_memory_size": int(device["memory_bytes"]),
        "shared_memory_per_block_optin": optin,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = " ".join(f"{key}: {value}" for key, value in info.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    versions = "dnn_version_info { major: 9 minor: 7 } runtime_version { major: 12 minor: 8 patch: 0 }"
    return f'gpu_device_info {{ {lines} {capability} }} platform_name: "CUDA" {versions} device_description_str: "{description}"'


def _topology(compiler: str, name: str, **settings: Any) -> Any:
    """The description of devices that are not here. Raises `MeshError` where their compiler is not installed or does not know them."""
    try:
        return topologies.get_topology_desc(platform=compiler, topology_name=name, **settings)
    except Exception as error:  # whatever the plugin raises
        what = re.sub(r"\s+", " ", str(error))[:300]
        raise MeshError(
            f"the {compiler} compiler cannot describe {name or settings.get('topology')}: {what}. It comes with "
            f"`pip install 'autopar[{EXTRAS[compiler]}]'`; where that is there already, check that the topology exists."
        ) from error


def verify_foreign(plan: Plan, traced: Traced, compiler: str, donate: bool = True) -> Verification:
    """Collectives and memory of a plan beside what `compiler` makes of it. Nothing runs, so numbers and time are not judged."""
    if plan.stages:
        raise UsageError(
            f"a plan in {len(plan.stages)} stages is many programs, which the {compiler} compiler does not judge yet. Verify it without "
            "`compiler`, or plan with stages='off'."
        )
    found = compile_for(plan, traced, compiler, donate)
    nothing = "not run: the hardware is not here"
    return Verification(
        Check("numbers", "one device's", nothing, True),
        check_foreign_collectives(plan, found),
        check_foreign_memory(plan, found),
        Check("time", f"{plan.predicted.step_time_s * 1e3:.3g} ms", nothing, True),
    )


def check_foreign_memory(plan: Plan, found: Foreign, tolerance: float = 0.25) -> Check:
    """Temporaries beside the compiler's, and the sum beside what the device has: to compile is no proof of fit."""
    predicted, device = found.expected_bytes, plan.cluster["device"]
    off = abs(found.temp_bytes - predicted) <= tolerance * max(found.temp_bytes, predicted)
    room = int(device["memory_bytes"]) - int(device.get("reserved_bytes", 0))
    fits = found.total_bytes <= room
    detail = f"{found.total_bytes:,} bytes in all of {room:,}" + ("" if fits else ": it does not fit")
    return Check("memory", f"{predicted:,} temporary bytes", f"{found.temp_bytes:,}", off and fits, detail)


def check_foreign_collectives(plan: Plan, found: Foreign) -> Check:
    """The compiled program's collectives beside the planned ones, after the compiler's known rewrites."""
    check = found.collectives
    expected = f"{len(plan.collectives)} collectives, {check.planned_bytes:,} bytes"
    detail = "" if check.agree else str(check).split("\n", 1)[-1].strip()[:2000]
    if check.agree and check.rewrites:
        detail = f"rewritten: {', '.join(check.rewrites)}"
    return Check("collectives", expected, f"{check.compiled_bytes:,} bytes", check.agree, detail)
