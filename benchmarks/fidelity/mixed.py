"""Mixed precision as in Megatron-LM and Alpa: 16-bit parameters and gradients, and a float32 copy that the optimiser works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Master(NamedTuple):
    """The float32 parameters, and the inner optimiser's state for them."""

    params: Any
    inner: Any


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on float32 copies of narrow parameters, which it brings to the copies' rounded values.

    Of each parameter a device holds 2 bytes, and of its state 4 + 8 with Adam (Micikevicius et al. 2018; Rajbhandari et al. 2020,
    section 3.1).
    """

    def init(params: Any) -> Master:
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return Master(wide, inner.init(wide))

    def update(grads: Any, state: Master, params: Any = None) -> tuple[Any, Master]:
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, after = inner.update(wide, state.inner, state.params)
        new = optax.apply_updates(state.params, updates)
        return jax.tree.map(lambda n, p: n.astype(p.dtype) - p, new, params), Master(new, after)

    return optax.GradientTransformation(init, update)
