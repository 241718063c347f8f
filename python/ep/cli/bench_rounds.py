"""One rank of a case: its contenders, run in turn behind a barrier."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ep
from ep.cli import bench_verify
from ep.cli.bench_case import Case, Data


@dataclass(frozen=True)
class Plan:
    """What every rank of a case is told. Picklable."""

    case: Case
    contenders: tuple[str, ...]
    rounds: int
    warmup: int
    verify: bool
    timeout_s: float
    folder: str  # the ranks' own: sockets and gloo's store


class RankResult(NamedTuple):
    tensors: str  # the library they are of, and its version
    num_rows: int
    us: dict[str, list[float]]  # by contender, a value per round
    compared: int  # values, with --verify


def needs_torch(contender: str) -> bool:
    return contender.startswith("gloo")


class Contender(NamedTuple):
    """`prepare` and `check` are not timed; each call of `run` follows one of `prepare`."""

    prepare: Callable[[], None]
    run: Callable[[], None]
    check: Callable[[], int]  # returns how many values it compared


class Barrier:
    """Of the benchmark's own: datagrams, so that a rank that waits leaves its core to others."""

    _MESSAGE = struct.Struct("qq")  # number of the wait, when its sender arrived

    def __init__(self, comm: Any, folder: str, timeout_s: float) -> None:
        names = [str(Path(folder) / f"{rank}") for rank in range(comm.num_ranks)]
        self._peers = [name for name in names if name != names[comm.rank]]
        self._number = 0
        self._early: list[tuple[int, int]] = []  # of the next wait
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(names[comm.rank])
        self._socket.settimeout(timeout_s)
        comm.all_gather(b"", timeout_s=timeout_s)  # nobody sends to a socket that is not there yet

    def wait(self) -> int:
        """Returns when all ranks have come: the time (ns) at which the last one did."""
        self._number += 1
        now = time.monotonic_ns()
        message = self._MESSAGE.pack(self._number, now)
        for peer in self._peers:
            self._socket.sendto(message, peer)
        arrivals = [now] + [at for number, at in self._early if number == self._number]
        self._early = []
        while len(arrivals) <= len(self._peers):
            number, at = self._MESSAGE.unpack(self._socket.recv(self._MESSAGE.size))
            if number == self._number:
                arrivals.append(at)
            else:
                self._early.append((number, at))
        return max(arrivals)

    def close(self) -> None:
        self._socket.close()


class Kind:
    """Tensors of the library at hand: torch's where it is installed, else numpy's."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            self.torch = None
        else:
            self.torch = torch
            torch.set_num_threads(1)

    @property
    def name(self) -> str:
        """The library and its version."""
        if self.torch is None:
            import numpy as np

            return f"numpy {np.__version__}"
        return f"torch {self.torch.__version__}"

    def of(self, array: Any) -> Any:
        """A tensor over the memory of a numpy array."""
        return array if self.torch is None else self.torch.from_numpy(array)

    def bf16(self, bits: Any) -> Any:
        """A bf16 tensor over the memory of [...] uint16."""
        if self.torch is None:
            return bits
        return self.torch.from_numpy(bits.view("i2")).view(self.torch.bfloat16)

    def array(self, tensor: Any) -> Any:
        """The numpy array over a tensor's memory; bf16 as uint16, 8-bit floats as uint8."""
        if self.torch is None:
            return tensor
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view("u2")
        return (tensor.view(self.torch.uint8) if tensor.itemsize == 1 else tensor).numpy()


class Exchange:
    """A buffer, this rank's inputs, and the contenders that use them."""

    def __init__(self, comm: Any, case: Case) -> None:
        self.case, self.rank, self.data, self.kind = case, comm.rank, Data(case), Kind()
        self.rows = self.data.rows(comm.rank)
        self.answers = self.kind.bf16(self.data.answers(comm.rank, self.rows))
        self.x = self.kind.bf16(self.data.x(comm.rank))
        self.topk_idx = self.kind.of(self.data.topk_idx(comm.rank))
        self.topk_weights = self.kind.of(self.data.topk_weights(comm.rank))
        self.buffer = ep.EPBuffer(
            comm,
            num_experts=case.experts,
            num_topk=case.topk,
            hidden=case.hidden,
            max_tokens_per_rank=case.tokens,
            device="cpu",
            num_sms=1,
            outputs="window",
        )
        self._release()
        self._run_dispatch()
        self.handle = self._out.handle  # what combine gets in every round
        self._combined = self.kind.bf16(self.data.x(comm.rank))  # written, so its pages are there
        self._release()

    def contenders(self) -> dict[str, Contender]:
        def nothing() -> int:
            return 0

        case = self.case
        into = self._copy_target()
        return {
            "dispatch": Contender(self._release, self._run_dispatch, self._check_dispatch),
            "combine": Contender(self._prepare_combine, self._run_combine, self._check_combine),
            "memcpy": Contender(self._release, self._copy(into, case.dispatch_row_bytes), nothing),
            "memcpy_out": Contender(
                self._release, self._copy(into, case.combine_row_bytes), nothing
            ),
        }

    def _release(self) -> None:
        """Drops what the contender before made, outside the measurement."""
        self._out: Any = None
        self._expert_rows: Any = None
        self._result: Any = None

    def _run_dispatch(self) -> None:
        case = self.case
        self._out = self.buffer.dispatch(
            self.x, self.topk_idx, self.topk_weights, layout=case.layout, quant=case.quant
        )

    def _check_dispatch(self) -> int:
        return bench_verify.dispatched(self, self._out)

    def _prepare_combine(self) -> None:
        self._release()
        self._expert_rows = self._expert_output()
        self.kind.array(self._expert_rows)[...] = self.kind.array(self.answers)

    def _run_combine(self) -> None:
        weights = self.topk_weights if self.case.layout == "expert" else None
        self._result = self.buffer.combine(
            self._expert_rows, self.handle, weights=weights, out=self._combined
        )

    def _check_combine(self) -> int:
        return bench_verify.combined(self, self.kind.array(self._result.x))

    def _expert_output(self) -> Any:
        dtype = "bfloat16" if self.kind.torch is None else self.kind.torch.bfloat16
        return self.buffer.expert_output(self.handle, self.case.hidden, dtype)

    def _copy_target(self) -> Any:
        """The window's memory that memcpy writes into, as bytes; kept for the whole case."""
        rows = self.kind.array(self._expert_output())
        rows[...] = 0
        return rows.reshape(-1).view("u1")

    def _copy(self, into: Any, row_bytes: int) -> Callable[[], None]:
        import numpy as np

        num_bytes = len(self.rows.token) * row_bytes
        source = np.ones(num_bytes, np.uint8)  # private memory
        return lambda: np.copyto(into[:num_bytes], source)


def run_rank(plan: Plan, comm: Any) -> RankResult:
    """Everything one rank does for a case. Called in every rank's process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one node
    exchange = Exchange(comm, plan.case)
    contenders = exchange.contenders()
    group = None
    if exchange.kind.torch is not None and any(map(needs_torch, plan.contenders)):
        from ep.cli.bench_gloo import Gloo

        group = Gloo(exchange, plan.folder, plan.timeout_s)
        contenders |= group.contenders()
    barrier = Barrier(comm, plan.folder, plan.timeout_s)
    gc.collect()
    gc.disable()
    try:
        chosen = {name: contenders[name] for name in plan.contenders if name in contenders}
        result = _rounds(plan, chosen, barrier)
        barrier.wait()  # nobody closes what others still use
    finally:
        gc.enable()
        barrier.close()
    if group is not None:
        group.close()
    exchange.buffer.close()
    return RankResult(exchange.kind.name, len(exchange.rows.token), *result)


def _rounds(
    plan: Plan, contenders: dict[str, Contender], barrier: Barrier
) -> tuple[dict[str, list[float]], int]:
    us: dict[str, list[float]] = {name: [] for name in contenders}
    compared = 0

    def check() -> int:
        total = 0
        for contender in contenders.values():
            contender.prepare()
            barrier.wait()
            contender.run()
            total += contender.check()
        return total

    if plan.verify:
        compared += check()
    for number in range(plan.warmup + plan.rounds):
        # Another order in every round, the same on all ranks: what ran before (what it left in the
        # caches) must not always be to one contender's cost.
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            prepare, run, _ = contenders[name]
            prepare()
            start_ns = barrier.wait()
            run()
            end_ns = time.monotonic_ns()
            if number >= plan.warmup:
                us[name].append((end_ns - start_ns) / 1e3)
    if plan.verify:
        compared += check()
    return us, compared
