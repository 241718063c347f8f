"""What the tests of ep.testing.run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ep
from ep import testing

BOTH = pytest.mark.parametrize("how", ["threads", "processes"])
SIZES = {"num_experts": 4, "num_topk": 1, "hidden": 8, "max_tokens_per_rank": 4}


class Odd(Exception):
    """An exception with a number of its own."""

    def __init__(self, text: str, number: int):
        super().__init__(text, number)
        self.number = number


def raised_by(*arguments: Any, **options: Any) -> BaseException:
    """What run() raises."""
    with pytest.raises(BaseException) as caught:
        testing.run(*arguments, **options)
    return caught.value


def notes(error: BaseException) -> str:
    """What was added to an exception (before Python 3.11 as an argument)."""
    return "\n".join(getattr(error, "__notes__", map(str, error.args)))


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Looks until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gather_often(comm: ep.Communicator, rounds: int) -> list[list[bytes]]:
    """Gathers the rank and the number of the call."""
    return [comm.all_gather(bytes([comm.rank, i])) for i in range(rounds)]


def one_row(buffer: ep.EPBuffer) -> Any:
    """Dispatches one token to expert 0."""
    return buffer.dispatch(np.zeros((1, 8), np.float32), np.zeros((1, 1), np.int64))


def one_token_each_way(comm: ep.Communicator) -> tuple[int, np.ndarray]:
    """Every rank sends its number to the first and the last expert and gets it back."""
    with ep.EPBuffer(comm, **SIZES) as buffer:
        x = np.full((2, 8), comm.rank + 1, dtype=np.float32)
        topk_idx = np.array([[0], [3]], dtype=np.int64)
        out = buffer.dispatch(x, topk_idx)
        y = buffer.combine(out.x, out.handle)
        return int(out.num_rows), y.x.copy()
