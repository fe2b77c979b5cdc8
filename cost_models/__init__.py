"""What hardware can do, as plain arithmetic: devices, links, collectives, presets with a source for every figure."""

from cost_models.cluster import Cluster, model_flops_peak
from cost_models.collective import KINDS
from cost_models.curve import Curve
from cost_models.device import Device
from cost_models.errors import ClusterError
from cost_models.levels import Levels
from cost_models.link import Link
from cost_models.presets import describe, load_cluster, presets, save_profile
from cost_models.shared import SharedMemory
from cost_models.switch import TwoLevel
from cost_models.tiles import Shape, Tiling
from cost_models.torus import Torus

__all__ = [
    "KINDS",
    "Cluster",
    "ClusterError",
    "Curve",
    "Device",
    "Levels",
    "Link",
    "Shape",
    "SharedMemory",
    "Tiling",
    "Torus",
    "TwoLevel",
    "describe",
    "load_cluster",
    "model_flops_peak",
    "presets",
    "save_profile",
]
