"""Memory of a Megatron-style transformer in closed form, as a truth to hold plans and schedules against.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), sections 4 and 5: one layer of 16-bit
activations with dropout keeps `sbh (34 + 5 a s / h)` bytes for sequence `s`, microbatch `b`, width `h` and `a` heads: 11 for the
attention's matmuls and dropout, 19 for the feed-forward block, 4 for two layer norms, and `5 a s / h` for softmax, its dropout and the
scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import ClusterError

RECOMPUTE = ("none", "selective", "full")
_CUT, _WHOLE = 24.0, 10.0
"""Of the 34: what tensor parallelism divides, and what only sequence parallelism does (norms, dropouts after the blocks, block inputs)."""


@dataclass(frozen=True)
class Transformer:
    """A decoder of `layers` equal layers. `sequence` tokens in each of `microbatch` examples, `hidden` wide, with `heads` heads."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    microbatch: int

    @property
    def parameters(self) -> float:
        """`12 L h^2`: the matmuls of all layers, without embeddings, norms and biases."""
        return 12.0 * self.layers * self.hidden**2


def layer_bytes(model: Transformer, tensor: int = 1, sequence_parallel: bool = False, recompute: str = "none") -> float:
    """Bytes that one layer keeps on each device until its backward (the paper's equations 1 to 5, and table 2).

    `tensor` devices share a layer. `selective` recomputes the attention's core, which drops `5 a s / h`; `full` keeps the layer's input
    alone, whole on each device. Raises `ClusterError` for another `recompute`.
    """
    if recompute not in RECOMPUTE:
        raise ClusterError(f"unknown recomputation {recompute!r}; known are {', '.join(RECOMPUTE)}.")
    unit = float(model.sequence * model.microbatch * model.hidden)
    if recompute == "full":
        return 2 * unit
    core = 5 * model.heads * model.sequence / model.hidden if recompute == "none" else 0.0
    whole = _WHOLE / tensor if sequence_parallel else _WHOLE
    return unit * (whole + (_CUT + core) / tensor)


def stage_bytes(
    model: Transformer,
    tensor: int = 1,
    pipeline: int = 1,
    chunks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations on each device of the first of `pipeline` stages under 1F1B: `p` microbatches of `L/p` layers are in flight.

    With `chunks` parts of the model per stage (interleaved), `1 + (p-1) / (p m)` times as much (section 4.2.3).
    """
    interleaved = 1 + (pipeline - 1) / (pipeline * chunks) if chunks > 1 else 1.0
    return model.layers * layer_bytes(model, tensor, sequence_parallel, recompute) * interleaved


def state_bytes(model: Transformer, tensor: int = 1, pipeline: int = 1, bytes_per_parameter: float = 18.0) -> float:
    """Bytes of parameters, gradients and Adam's state on each device.

    18 per parameter in mixed precision: 2 for the parameter, 4 for its gradient in float32, and 4 each for master copy and both moments.
    """
    return model.parameters * bytes_per_parameter / (tensor * pipeline)
