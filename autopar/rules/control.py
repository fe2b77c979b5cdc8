"""Primitives that run whole on purpose, with the reason that a plan gives for it."""

from __future__ import annotations

_CONTROL = "its body is planned on its own; as one op it runs whole"
_CALL = "a function kept closed was traced at global shapes"
_REGION = "its body addresses devices itself"
_KERNEL = "a kernel bound to a part would still return the whole block"
_HOST = "it runs on the host once, with whole operands"
_GENERATOR = "its state spans all that it generates"

OPAQUE: dict[str, str] = (
    dict.fromkeys(("scan", "while", "cond"), _CONTROL)
    | dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "call", "remat2", "checkpoint", "composite"), _CALL)
    | dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "linear_call", "eval_jaxpr"), _CALL)
    | dict.fromkeys(("custom_partitioning",), _REGION)
    | dict.fromkeys(("pallas_call", "ffi_call", "tpu_custom_call"), _KERNEL)
    | dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "debug_print", "python_callback"), _HOST)
    | dict.fromkeys(("rng_bit_generator", "rng_uniform"), _GENERATOR)
)


def why_whole(primitive: str) -> str:
    """Why a primitive without a rule runs whole, in words for a report."""
    return OPAQUE.get(primitive, "no sharding rule is known for it")
