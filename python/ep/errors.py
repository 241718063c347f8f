"""The errors of the library: each carries the numbers behind its text.

After an error that all ranks saw in the same call the next call is exact; after `Timeout` or
`PeerLost` the first call after ``EPBuffer.resync()``.
"""

from __future__ import annotations


class Error(RuntimeError):
    """Base of all errors of ep."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong; the text names it, its value and the limit."""


class CapacityError(Error):
    """More was needed than there is: tokens, rows or bytes.

    Attributes:
        rank: whose limit it is.
        needed, available: in the unit that the text names.
    """

    def __init__(self, message: str, rank: int = 0, needed: int = 0, available: int = 0):
        super().__init__(message)
        self.rank, self.needed, self.available = rank, needed, available


class Timeout(Error, TimeoutError):
    """A wait ran out of time; the buffer needs ``resync()`` before its next call.

    Attributes:
        peers: the ranks that did not come.
        phase: where this rank waited for them.
    """

    def __init__(self, message: str, peers: list[int] | None = None, phase: str = ""):
        super().__init__(message)
        self.peers, self.phase = list(peers or []), phase


class PeerError(Error):
    """Another rank ended the call: it refused its arguments, was aborted, gave up or closed.

    Attributes:
        peers: those ranks.
        reason: what they said.
    """

    def __init__(self, message: str, peers: list[int] | None = None, reason: str = ""):
        super().__init__(message)
        self.peers, self.reason = list(peers or []), reason


class PeerLost(Error):
    """The processes of other ranks are gone or cannot be reached.

    Attributes:
        peers: those ranks.
    """

    def __init__(self, message: str, peers: list[int] | None = None):
        super().__init__(message)
        self.peers = list(peers or [])


class Desync(Error):
    """Ranks made different calls.

    Attributes:
        field: what differs.
        peer: a rank that differs from this one.
        mine, theirs: both values, as the entry record carries them.
    """

    def __init__(
        self, message: str, field: str = "", peer: int = 0, mine: int = 0, theirs: int = 0
    ):
        super().__init__(message)
        self.field, self.peer, self.mine, self.theirs = field, peer, mine, theirs


class Unsupported(Error):
    """The name is reserved, or the machine lacks what it needs; the text says what would do."""
