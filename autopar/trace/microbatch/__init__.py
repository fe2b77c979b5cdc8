"""A step as a loop over microbatches: `separate` says what runs where, `divide` writes it as a graph."""

from autopar.trace.microbatch.divide import divide
from autopar.trace.microbatch.separate import Separation, separate

__all__ = ["Separation", "divide", "separate"]
