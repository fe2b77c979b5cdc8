"""The one error of this package."""


class ClusterError(ValueError):
    """A cluster description that cannot be read or priced. The message says what is accepted instead."""
