"""What one training run is made of: every size, in one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and seeds of a run; equal on all ranks.

    A rank's batch of one step is `batch` pieces of `context` tokens, so a step trains on
    `ranks * batch * context` tokens.
    """

    ranks: int = 4
    steps: int = 200
    exchange: str = "fp32"  # what travels between the ranks: fp32, bf16 or fp8
    layers: int = 2
    experts: int = 8
    topk: int = 2
    hidden: int = 128
    ffn_hidden: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 4
    vocab: int = 1024
    lr: float = 5e-3
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "layers", "experts", "heads", "context", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk must be in 1..experts ({self.experts}), not {self.topk}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.exchange == "fp8" and self.hidden % 128:
            raise ValueError(f"fp8 needs a multiple of 128 as hidden, not {self.hidden}")
        if self.vocab < 257:
            raise ValueError(f"vocab must be above the 256 bytes, not {self.vocab}")

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank trains on in one step."""
        return self.batch * self.context
