"""The devices of this process."""

from __future__ import annotations

from typing import Any

import jax


def simulate(count: int, only_cpu: bool) -> None:
    """Have `count` simulated CPU devices; with `only_cpu`, no others.

    Works before JAX has looked for its devices; afterwards it changes nothing.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
        if only_cpu:
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # devices are there already: whether they are enough shows when the mesh is made
        return


def abstract_leaves(args: Any) -> list[str]:
    """Paths of the leaves that are shapes, not arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    return [jax.tree_util.keystr(path) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]


def platform() -> str:
    """`cpu`, `gpu` or `tpu`."""
    return jax.default_backend()


def count() -> int:
    """Devices of this process and those that it works with."""
    return jax.device_count()


def use_cpu_alone() -> None:
    """Let JAX look for no device but the CPU: plugins of compilers for hardware that is not here would."""
    jax.config.update("jax_platforms", "cpu")
