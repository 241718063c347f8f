"""Many rounds without barriers: each rank dawdles at its own moments and looks at results late."""

import random
import threading
from collections import deque

import pytest

from python.compare import expect_combined, expect_received
from python.ranks import LAYOUTS, window_answer, with_buffers
from python.routing import ROUTINGS
from python.trip import Case, Trip, combine_args, dispatch_args, make_trips

CYCLE = (1, 2, 4, 0, 8, 16, 31, 64, 3)
NUM_ROUNDS = 200


def cycling_trips(num_ranks: int) -> list[Trip]:
    """T cycles, also by rank; layouts, sizes, routings and formats alternate."""
    cases = []
    for i in range(2 * len(CYCLE)):
        layout = LAYOUTS[i % 2]
        cases.append(
            Case(
                num_tokens=tuple(CYCLE[(i + r) % len(CYCLE)] for r in range(num_ranks)),
                num_experts=3 * num_ranks,
                num_topk=4,
                hidden=128,
                routing=sorted(ROUTINGS)[i % len(ROUTINGS)],
                seed=i,
                layout=layout,
                alignment=4 if layout == "expert" else 1,
                exact=i % 5 != 0,
                quant="fp8_block128" if i % 4 == 2 else None,
                row_weights=i % 3 == 0,
                combine_weights=layout == "expert",
                kind=("torch", "numpy")[i // 2 % 2],
            )
        )
    return make_trips(cases)


def dawdle(mine: random.Random) -> None:
    """Perturbs the order of events; nothing waits for it."""
    if mine.random() < 0.3:
        threading.Event().wait(mine.expovariate(2000))


class Rank:
    """One rank: all draw the same operations, each has its own way to make them."""

    def __init__(self, buf, trips: list[Trip], seed: int) -> None:
        self.buf, self.trips = buf, trips
        self.common, self.mine = random.Random(seed), random.Random(seed + 1 + buf.rank)
        self.handles: deque = deque(maxlen=4)  # (trip, handle): to replay and to combine, any order
        self.unseen: list = []  # results that nobody has looked at

    def own_way(self) -> dict:
        return {"async_op": self.mine.random() < 0.5, "num_sms": self.mine.choice((None, 1, 3))}

    def dispatch(self) -> None:
        trip = self.common.choice(self.trips)
        out = self.buf.dispatch(**dispatch_args(trip, self.buf.rank), **self.own_way())
        self.handles.append((trip, out.handle))
        self.unseen.append((expect_received, out, trip.sent.received[self.buf.rank], trip.rules))

    def replay(self) -> None:
        trip, handle = self.common.choice(self.handles)
        args = {"x": dispatch_args(trip, self.buf.rank)["x"], "quant": trip.case.quant}
        out = self.buf.dispatch(**args, handle=handle, **self.own_way())
        self.unseen.append((expect_received, out, trip.sent.received[self.buf.rank], trip.rules))

    def combine(self) -> None:
        trip, handle = self.common.choice(self.handles)
        args = combine_args(trip, self.buf.rank)
        if self.mine.random() < 0.5:
            args["x"] = window_answer(self.buf, trip, handle)
        y = self.buf.combine(handle=handle, **args, **self.own_way())
        del args  # freed while it may be in flight
        self.unseen.append((expect_combined, y, trip.back[self.buf.rank]))

    def look(self, keep: int) -> None:
        """Compares results in any order until at most `keep` are left."""
        while len(self.unseen) > keep:
            expect, *what = self.unseen.pop(self.mine.randrange(len(self.unseen)))
            expect(*what)

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            dawdle(self.mine)
            choices = (self.dispatch, self.replay, self.combine)
            operation = self.common.choice(choices) if self.handles else self.dispatch
            operation()
            dawdle(self.mine)
            self.look(keep=self.mine.randrange(3))
        self.look(keep=0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_operations_without_barriers(num_ranks):
    """[B4, G3, G4, K7, K8] Dispatches, replays, combines in any order, several in flight."""
    trips = cycling_trips(num_ranks)

    def body(buf):
        Rank(buf, trips, seed=num_ranks).run(NUM_ROUNDS)
        return buf.stats()

    with_buffers(trips, body, outputs="auto", num_regions=4)
