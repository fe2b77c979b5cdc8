"""A cluster: one kind of device, and how the devices are joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models.collective import check_kind
from cost_models.curve import Curve
from cost_models.device import Device
from cost_models.errors import ClusterError
from cost_models.groups import Axes, mesh_shapes
from cost_models.measured import BASES, Base, Measured
from cost_models.tiles import Shape
from cost_models.topology import Flow

Kind = Base | Measured
TOPOLOGIES: dict[str, Any] = {**BASES, Measured.kind: Measured}


@dataclass(frozen=True)
class Cluster:
    """Equal devices, numbered node-major and row-major over the topology's dimensions.

    `name` is the text it was loaded from, such as `h100-sxm:2x8`. All times are seconds, sizes bytes, rates per second.
    """

    name: str
    device: Device
    topology: Kind

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them."""
        return self.topology.num_devices

    @property
    def shape(self) -> tuple[int, ...]:
        """`(nodes, devices per node)`, `(slices, *torus of chips)`, or the shape given for simulated devices."""
        return self.topology.shape

    @property
    def launch_seconds(self) -> float:
        """Overhead of one kernel, to be added by the caller once per kernel."""
        return self.device.launch_seconds

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster with `memory_bytes` on each device."""
        if memory_bytes <= 0:
            raise ClusterError(f"memory per device must be positive, not {memory_bytes} bytes.")
        return replace(self, device=replace(self.device, memory_bytes=int(memory_bytes)))

    def submesh(self, *shape: int) -> Cluster:
        """A part of this cluster with the same links, its share of the network, and open ends where a ring is cut.

        Raises `ClusterError` if it does not fit.
        """
        try:
            part = self.topology.submesh(shape)
        except ValueError as error:
            raise ClusterError(f"{shape} is no part of {self.name}, whose shape is {self.shape}.") from error
        if part.num_devices > self.num_devices or any(mine > whole for mine, whole in zip(part.dims, self.topology.dims, strict=True)):
            raise ClusterError(f"{shape} does not fit into {self.name}, whose shape is {self.shape}.")
        return replace(self, topology=part)

    def mesh_shapes(self, max_axes: int = 2) -> tuple[tuple[int, ...], ...]:
        """Logical mesh shapes worth searching, fewest axes first; sizes above 1, their product `num_devices`.

        An axis lies inside nodes (torus dimensions) or holds whole ones. Both orders of two sizes are listed where they differ in meaning.
        """
        return mesh_shapes(self.topology.dims, max_axes)

    def collective_seconds(self, kind: str, nbytes: float, axes: Axes, algorithm: str | None = None) -> float:
        """Seconds of a collective over the groups along `axes`, all groups at once.

        `kind` is one of `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `permute`. `nbytes` is the operand on one device: the
        shard for an all-gather, the full local operand for the others. `axes` are `(size, stride)` pairs in this cluster's device
        numbering; in a mesh of shape `(2, 8)` the axes are `(2, 8)` and `(8, 1)`. Groups that share a node's NICs or a torus's links
        divide them. The fastest algorithm counts, or the one named; see `collective_curves`. Formulas: `collective`, `levels`, `switch`,
        `torus`, `shared`. Raises `ClusterError` for an unknown kind or algorithm, or a group larger than the cluster.
        """
        check_kind(kind)
        return self.topology.seconds(kind, nbytes, axes, algorithm) if nbytes > 0 else 0.0

    def collective_curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        """Seconds over the operand's bytes, by algorithm (`Topology.curves` names them); empty for a group of one."""
        check_kind(kind)
        return self.topology.curves(kind, axes)

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """Seconds until each `(from, to)` pair of devices has moved `nbytes`, all at once: transfers between pipeline stages.

        Flows that share a NIC, a node's NICs or a torus's link divide it; a device that sends to several sends one after the other.
        """
        return self.topology.transfer_seconds(nbytes, list(flows))

    def compute_seconds(self, flops: float, nbytes: float, dtype: str, matmul: bool, shape: Shape | None = None) -> float:
        """Roofline time of one fused op on local shapes; see `Device.compute_seconds`. `nbytes` is memory traffic, read and written."""
        return self.device.compute_seconds(flops, nbytes, dtype, matmul, shape)

    def fused_seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of one kernel that multiplies matrices among other work; see `Device.fused_seconds`."""
        return self.device.fused_seconds(flops, nbytes, dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, for plan files."""
        return {"name": self.name, "device": self.device.to_dict(), "topology": self.topology.to_dict()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cluster:
        """The inverse of `to_dict`. Raises `ClusterError` where a figure is missing or unknown."""
        try:
            topology = TOPOLOGIES[data["topology"]["kind"]].from_dict(data["topology"])
            return Cluster(data["name"], Device.from_dict(data["device"]), topology)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ClusterError(f"the description of a cluster is incomplete or has an unknown figure: {error}.") from error


def model_flops_peak(cluster: Cluster, dtype: str) -> float:
    """Matmul peak of the whole cluster in FLOP/s: the denominator of model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B)."""
    return cluster.num_devices * cluster.device.peak(dtype)
