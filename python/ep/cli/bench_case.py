"""What is measured: a case, and its tokens and routing, which every rank can make for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ep import quant

if TYPE_CHECKING:
    import numpy as np

BF16_BYTES = 2
SHIFTS = 4  # experts (or ranks) answer with x / 2^(number % SHIFTS)


@dataclass(frozen=True)
class Case:
    """One combination of sizes. Rows are bf16; `format` is what dispatch makes of them."""

    num_ranks: int
    tokens: int  # of each rank
    hidden: int
    topk: int
    experts: int
    format: str  # "none" or one of ep.quant.formats()
    layout: str  # "rank" or "expert"
    seed: int = 1

    @property
    def quant(self) -> str | None:
        return None if self.format == "none" else self.format

    @property
    def dispatch_row_bytes(self) -> int:
        if self.quant is None:
            return self.combine_row_bytes
        return quant.describe(self.quant).bytes_per_row(self.hidden)

    @property
    def combine_row_bytes(self) -> int:
        return self.hidden * BF16_BYTES

    def headline(self) -> str:
        plural = "" if self.num_ranks == 1 else "es"
        return (
            f"{self.num_ranks} process{plural}, T {self.tokens}, H {self.hidden}, K {self.topk} of "
            f"{self.experts}, bf16, format {self.format}, layout {self.layout}, exact, outputs "
            "window, num_sms 1"
        )


class Data:
    """All ranks' inputs, as numpy arrays: functions of the case and a rank."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def x(self, rank: int) -> np.ndarray:
        """[T, H] uint16, the bits of bf16: sign, mantissa and three exponent bits are random."""
        import numpy as np

        bits = self._random(rank, 0).integers(
            0, 1 << 16, (self.case.tokens, self.case.hidden), np.uint16
        )
        bits &= 0x83FF
        bits |= 0x3C00
        return bits

    def topk_idx(self, rank: int) -> np.ndarray:
        """[T, K] int64: K different experts of a token, uniform."""
        import numpy as np

        keys = self._random(rank, 1).random((self.case.tokens, self.case.experts), np.float32)
        return np.argpartition(keys, self.case.topk - 1, axis=1)[:, : self.case.topk]

    def topk_weights(self, rank: int) -> np.ndarray:
        """[T, K] fp32, 64ths: their products with bf16 add up exactly in fp32, in any order."""
        import numpy as np

        shape = self.case.tokens, self.case.topk
        return self._random(rank, 2).integers(1, 65, shape).astype(np.float32) / 64

    @cached_property
    def owner(self) -> np.ndarray:
        """[E]: the rank of each expert; as even as can be, the first E % R own one more."""
        import numpy as np

        shares = np.array_split(np.arange(self.case.experts), self.case.num_ranks)
        return np.repeat(np.arange(self.case.num_ranks), [len(share) for share in shares])

    def rows(self, rank: int) -> Rows:
        """What `rank` receives, in the layout's order."""
        import numpy as np

        parts = []
        for rank_of_x in range(self.case.num_ranks):
            idx = self.topk_idx(rank_of_x)
            token, slot = np.nonzero(self.owner[idx] == rank)
            if self.case.layout == "rank":
                token, first = np.unique(token, return_index=True)
                slot = slot[first]
            parts.append((np.full(len(token), rank_of_x), token, idx[token, slot]))
        source, token, expert = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.case.layout == "expert":
            order = np.argsort(expert, kind="stable")
            source, token, expert = source[order], token[order], expert[order]
        return Rows(source, token, expert)

    def answers(self, rank: int, rows: Rows) -> np.ndarray:
        """[N, H] uint16: what the experts of `rank` make of `rows`, x / 2^shift."""
        import numpy as np

        answers = np.empty((len(rows.token), self.case.hidden), np.uint16)
        for source in range(self.case.num_ranks):
            mine = rows.source == source
            answers[mine] = self.x(source)[rows.token[mine]]
        number = rows.expert if self.case.layout == "expert" else np.full_like(rows.expert, rank)
        answers -= (number % SHIFTS << 7).astype(np.uint16)[:, None]  # of the exponent
        return answers

    def _random(self, rank: int, stream: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng([self.case.seed, rank, stream])


@dataclass(frozen=True)
class Rows:
    """Where received rows come from, each [N]."""

    source: np.ndarray  # rank
    token: np.ndarray  # of that rank
    expert: np.ndarray  # global; layout "rank": of the row's first slot here
