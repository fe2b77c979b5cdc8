"""Pieces that several linen models share: attention, the two-layer perceptron, the loss."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from autopar.models.fused import fused_attention

Array = jax.Array


def at_least_float32(dtype: Any) -> Any:
    """The dtype for softmax, norms and losses: `dtype`, or float32 if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Per-example loss, logits `(..., v)` and integer labels `(...)` -> `(...)`, in float32 or wider."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(at_least_float32(logits.dtype)), labels)


def causal_mask(length: int) -> Array:
    """`(length, length)` booleans, true where a query may look at a key."""
    return jnp.tril(jnp.ones((length, length), bool))


def attend(query: Array, key: Array, value: Array, *, mask: Array | None = None, bias: Array | None = None, scale: float = 1.0) -> Array:
    """`(b q h d), (b k h d), (b k h d) -> (b q h d)`; `mask` and `bias` broadcast against the scores `(b h q k)`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores.astype(at_least_float32(scores.dtype)) * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases, `(b s m) -> (b s m)`; the kernels keep heads as a dimension of their own."""

    heads: int
    head_dim: int
    dtype: Any
    param_dtype: Any
    causal: bool = True
    fused: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def project(name: str) -> Array:
            layer = nn.DenseGeneral((self.heads, self.head_dim), dtype=self.dtype, param_dtype=self.param_dtype, name=name)
            return layer(x)

        query, key, value = project("query"), project("key"), project("value")
        if self.fused:
            y = fused_attention((query * self.head_dim**-0.5)[..., None, :], key, value)[..., 0, :]
        else:
            mask = causal_mask(x.shape[1]) if self.causal else None
            y = attend(query, key, value, mask=mask, scale=self.head_dim**-0.5)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype, param_dtype=self.param_dtype, name="out")(y)


class Perceptron(nn.Module):
    """Dense, GELU (tanh form), Dense: `(... m) -> (... m)`."""

    width: int
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = nn.Dense(self.width, dtype=self.dtype, param_dtype=self.param_dtype, name="up")(x)
        return nn.Dense(x.shape[-1], dtype=self.dtype, param_dtype=self.param_dtype, name="down")(nn.gelu(hidden, approximate=True))
