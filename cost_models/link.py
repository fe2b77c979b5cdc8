"""One kind of link, in the alpha-beta model with a ramp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Link:
    """A link as one device sees it: latency, and a bandwidth that small messages do not reach.

    `bytes_per_s` is the specified rate in one direction, `efficiency` the part of it that large messages reach.
    `half_bytes` is the message size at which half of that is reached: rate(v) = peak / (1 + (half_bytes / v)^(2/3)).
    The exponent is a fit to published all-reduce times of A100, H200 and B200 nodes between 1 MiB and 16 GiB, where a
    plain alpha-beta line is up to 60 % too fast. `call_seconds` is paid once per collective, `latency_seconds` per step.
    """

    bytes_per_s: float
    efficiency: float = 1.0
    latency_seconds: float = 0.0
    call_seconds: float = 0.0
    half_bytes: float = 0.0

    @cached_property
    def rate(self) -> float:
        """Bytes per second, one direction, that large messages reach."""
        return self.bytes_per_s * self.efficiency

    @cached_property
    def _ramp(self) -> float:
        return self.half_bytes ** (2 / 3)

    def transfer_seconds(self, nbytes: float, bytes_per_s: float) -> float:
        """Seconds to move `nbytes` at an asymptotic rate of `bytes_per_s`, without latency."""
        return (nbytes + self._ramp * nbytes ** (1 / 3)) / bytes_per_s

    def seconds(self, nbytes: float, steps: int, bytes_per_s: float) -> float:
        """Seconds of a collective that sends `nbytes` per device in `steps` messages, one after the other."""
        return self.call_seconds + steps * self.latency_seconds + self.transfer_seconds(nbytes, bytes_per_s)
