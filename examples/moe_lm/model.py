"""The language model: a decoder whose feed-forward layers are mixtures of experts.

Symbols: B pieces of C tokens each, T = B * C tokens of one rank, H hidden, E experts in all, K of
them for each token, N rows that a rank received.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ep
from moe_lm.config import Config

BALANCE = 0.01  # weight of the balance term in the loss
EMBEDDING_STD = 0.4
# What travels: the dtype of the rows, and the format they are quantised to on their way out.
EXCHANGES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp8": (torch.bfloat16, "fp8_block128"),
}


class MoE(ep.nn.MoE):
    """`ep.nn.MoE` with fp32 experts whatever travels, and a term that keeps experts evenly loaded.

    Attributes:
        balance: of the last forward, E * sum over experts of (share of routes * mean probability);
            1 when even (Fedus, Zoph, Shazeer, https://arxiv.org/abs/2101.03961, eq. 4).
    """

    def __init__(self, buf: ep.EPBuffer, config: Config, seed: int) -> None:
        super().__init__(
            buf, config.experts, config.topk, config.hidden, config.ffn_hidden, seed=seed
        )
        self.travels_as, self.quant = EXCHANGES[config.exchange]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B,C,H] of x [B,C,H].  Every rank calls: tokens travel to their experts and back."""
        tokens = x.reshape(-1, self.hidden)
        topk_idx, topk_weights = self.route(tokens)
        out = ep.functional.dispatch(
            self.buf,
            tokens.to(self.travels_as),
            topk_idx,
            topk_weights,
            layout="expert",
            quant=self.quant,
        )
        self.tokens_per_expert = out.tokens_per_expert
        rows = self.apply_experts(out.dequantize(torch.float32), out.tokens_per_expert)
        y = ep.functional.combine(
            self.buf, rows.to(self.travels_as), out.handle, weights=topk_weights
        )
        return y.x.float().reshape(x.shape)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_idx [T,K] int64 and topk_weights [T,K] fp32 of tokens [T,H]; sets `balance`."""
        logits = self.router(tokens)
        top = logits.topk(self.num_topk, dim=1)
        routes = top.indices.flatten().bincount(minlength=logits.shape[1])
        probability = logits.softmax(dim=1).mean(dim=0)
        self.balance = logits.shape[1] * (routes / routes.sum() * probability).sum()
        return top.indices, top.values.softmax(dim=1)

    def apply_experts(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[N,H]: this rank's experts, each on its own block of the rows [N,H]."""
        experts = zip(self.up, self.down, rows.split(counts), strict=True)
        blocks = [ep.nn.expert_mlp((up, down), block) for up, down, block in experts]
        return torch.cat(blocks) if blocks else rows


class Block(nn.Module):
    """One layer: causal attention within each piece, then the experts."""

    def __init__(self, buf: ep.EPBuffer, config: Config, seed: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.project = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe_norm = nn.LayerNorm(config.hidden)
        self.moe = MoE(buf, config, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return x + self.moe(self.moe_norm(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B,C,H] plus its attention."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.project(mixed.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Tokens [B,C] to logits [B,C,vocab].

    What all ranks hold alike is drawn from one seed; experts are drawn expert by expert, so that
    every number of ranks trains the same model.
    """

    def __init__(self, buf: ep.EPBuffer, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(
            Block(buf, config, seed=config.seed * config.layers + layer)
            for layer in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        nn.init.normal_(self.token.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.position.weight, std=EMBEDDING_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.read_out(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B,C,H] of tokens [B,C]."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]

    def read_out(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B,C,vocab] of x [B,C,H]."""
        return self.head(self.norm(x))

    def balance(self) -> torch.Tensor:
        """What is added to the loss of the last forward."""
        return BALANCE * sum(block.moe.balance for block in self.blocks)

    def shared_parameters(self) -> list[nn.Parameter]:
        """What all ranks hold alike: everything but the experts."""
        experts = {id(p) for block in self.blocks for p in (block.moe.up, block.moe.down)}
        return [p for p in self.parameters() if id(p) not in experts]


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of logits [B,C,vocab] against the next tokens [B,C]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
