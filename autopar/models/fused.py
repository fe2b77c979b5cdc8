"""Causal attention as one op that never writes its scores to memory (Dao et al. 2022, FlashAttention).

Both directions are functions of their own with a sharding rule, so a plan keeps each call closed and prices what a fused kernel does: the
products of attention, half of them for a causal mask, and traffic at its border only. What runs is the same arithmetic block by block,
for machines without such a kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.api.rule import rule

Array = jax.Array
BLOCKS = 8
"""Blocks of queries, each of which looks at the keys up to its end: 9/16 of all pairs instead of half."""


def fused_attention(query: Array, key: Array, value: Array) -> Array:
    """`(b q n g d), (b k n d), (b k n d) -> (b q n g d)`: causal attention, `g` query heads to each key head; queries come scaled."""
    return _attention(query, key, value)


@jax.custom_vjp
def _attention(query: Array, key: Array, value: Array) -> Array:
    return forward(query, key, value)[0]


@rule("b [q] n g [d], b [k] n [d], b [k] n [d] -> b [q] n g [d], b n g [q]")
def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """The result, and the logarithms of the softmax's denominators `(b n g q)`."""
    results, logarithms = [], []
    for begin, end in _blocks(query.shape[1]):
        scores = _scores(query[:, begin:end], key[:, :end], begin)
        logarithm = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - logarithm[..., None]).astype(value.dtype)
        results.append(jnp.einsum("bngqk,bknd->bqngd", weights, value[:, :end]))
        logarithms.append(logarithm)
    return jnp.concatenate(results, axis=1), jnp.concatenate(logarithms, axis=-1)


@rule(
    "b [q] n g [d], b [k] n [d], b [k] n [d], b [q] n g [d], b n g [q], b [q] n g [d] -> b [q] n g [d], b [k] n [d], b [k] n [d]",
)
def backward(query: Array, key: Array, value: Array, result: Array, logarithm: Array, given: Array) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values: the weights are made again from the logarithms, block by block."""
    delta = jnp.einsum("bqngd,bqngd->bngq", result.astype(logarithm.dtype), given.astype(logarithm.dtype))
    queries: list[Array] = []
    keys, values = jnp.zeros(key.shape, logarithm.dtype), jnp.zeros(value.shape, logarithm.dtype)
    for begin, end in _blocks(query.shape[1]):
        here = slice(begin, end)
        weights = jnp.exp(_scores(query[:, here], key[:, :end], begin) - logarithm[..., here, None])
        slopes = jnp.einsum("bqngd,bknd->bngqk", given[:, here], value[:, :end]).astype(logarithm.dtype)
        slopes = (weights * (slopes - delta[..., here, None])).astype(query.dtype)
        queries.append(jnp.einsum("bngqk,bknd->bqngd", slopes, key[:, :end]))
        keys = keys.at[:, :end].add(jnp.einsum("bngqk,bqngd->bknd", slopes, query[:, here]))
        values = values.at[:, :end].add(jnp.einsum("bngqk,bqngd->bknd", weights.astype(given.dtype), given[:, here]))
    return jnp.concatenate(queries, axis=1), keys.astype(key.dtype), values.astype(value.dtype)


def _scores(query: Array, key: Array, begin: int) -> Array:
    """Masked scores `(b n g q k)` of the queries from position `begin` on, in float32 or wider."""
    scores = jnp.einsum("bqngd,bknd->bngqk", query, key)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    here, there = jnp.arange(query.shape[1])[:, None] + begin, jnp.arange(key.shape[1])
    return jnp.where(there <= here, scores, jnp.finfo(scores.dtype).min)


def _blocks(length: int) -> list[tuple[int, int]]:
    size = length // BLOCKS if length % BLOCKS == 0 else length
    return [(begin, begin + size) for begin in range(0, length, size)]


def _saved(query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
    result, logarithm = forward(query, key, value)
    return result, (query, key, value, result, logarithm)


_attention.defvjp(_saved, lambda saved, given: _gradients(saved, given))


def _gradients(saved: tuple[Array, ...], given: Array) -> Any:
    return tuple(backward(*saved, given))
