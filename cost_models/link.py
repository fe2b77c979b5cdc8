"""One kind of link, in the alpha-beta model with a ramp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cost_models.curve import Curve


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

    def term(self, share: float, bytes_per_s: float) -> tuple[float, float]:
        """The term of a `Curve` for a link that carries `share v` of a message of `v` bytes at an asymptotic rate of `bytes_per_s`."""
        return share / bytes_per_s, self._ramp * share ** (1 / 3) / bytes_per_s

    def curve(self, share: float, steps: float, bytes_per_s: float) -> Curve:
        """One collective that sends `share v` bytes per device in `steps` messages, one after the other."""
        return Curve(self.call_seconds + steps * self.latency_seconds, (self.term(share, bytes_per_s),))
