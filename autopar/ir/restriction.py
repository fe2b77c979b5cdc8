"""What the axes of a mesh are asked to do, beyond what the rules of the ops allow: named parallelism as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf

Label = OneOf["batch", "sequence", "expert", ""]
"""What a part of a dimension counts: examples, places in a sequence, experts, or anything else."""
Role = OneOf["replica", "data", "expert", "context", "tensor"]

HOME: dict[Role, frozenset[Label]] = {
    "replica": frozenset({"batch"}),
    "data": frozenset({"batch"}),
    "expert": frozenset({"batch", "expert"}),
    "context": frozenset({"sequence"}),
    "tensor": frozenset({"", "expert"}),
}
"""What axes of a role are there to cut."""


@dataclass(frozen=True)
class Restriction:
    """A part of the strategies that rules allow: what remains is still the programme's choice.

    `roles` says what each axis is for, in the mesh's order; without any, every axis may do anything. A `data` axis cuts only the batch,
    a `context` axis only the sequence, an `expert` axis the batch and, where there are any, experts: these three always cut it where they
    can. A `tensor` axis never cuts the batch at ops with parameters, nor the sequence, unless `sequence_parallel`, and then not in matmuls
    with parameters. `zero` says what may be kept in more parts than it is used in: nothing (0), the optimiser's state (1),
    gradients (2), parameters (3); with roles, it is over all axes but `replica` and `tensor` ones. A `replica` axis cuts the batch, and
    what lies along it is whole.
    """

    zero: int = 3
    roles: tuple[tuple[str, Role], ...] = ()
    sequence_parallel: bool = False

    def role(self, axis: str) -> Role | None:
        """What an axis is for; None where it may do anything."""
        return dict(self.roles).get(axis)

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes whose devices hold the same state unless `zero` says otherwise."""
        return tuple(a for a, role in self.roles if role not in ("replica", "tensor"))

    @property
    def tensor(self) -> tuple[str, ...]:
        return tuple(a for a, role in self.roles if role == "tensor")

    @property
    def is_void(self) -> bool:
        """Whether it leaves everything as it is."""
        return self.zero >= 3 and not self.roles

    def __str__(self) -> str:
        """As a user would say it."""
        words = [*(f"{role} parallelism over {axis}" for axis, role in self.roles), f"zero {self.zero}"]
        return ", ".join(words + ["sequence parallelism"] * self.sequence_parallel)
