"""Reserved names of elastic buffers: they exist and raise `Unsupported`."""

from __future__ import annotations

from typing import Any

from ep.errors import Unsupported


class Elastic:
    """Mixed into `EPBuffer` until elastic ranks exist."""

    @property
    def active_ranks(self) -> Any:
        """Reserved: [R] bool of an elastic buffer."""
        raise _no_elastic("active_ranks")

    def set_active(self, ranks: Any) -> None:
        """Reserved."""
        raise _no_elastic("set_active")

    @classmethod
    def rejoin(cls, *args: Any, **options: Any) -> Elastic:
        """Reserved."""
        raise _no_elastic("rejoin")

    def admit(self) -> None:
        """Reserved."""
        raise _no_elastic("admit")


def _no_elastic(name: str) -> Unsupported:
    return Unsupported(
        f"{name} belongs to elastic=True, which this version does not have: "
        "after PeerLost, close the buffer and make one without the lost rank"
    )
