"""One rank: a process that trains on its own shard and owns its share of the experts.

Two kinds of parameters, two ways to their gradients.  *Experts* live on one rank only: `ep` brings
the gradients of every rank's tokens there, in the backward of dispatch and combine.  *Everything
else* is held by all ranks alike: ordinary data parallelism, here an all-gather of the gradients,
which every rank then adds in rank order.  (An all-reduce would do, but adds in an order of its
own choice; so a single process can get the same bits.)  Each rank differentiates its loss / R,
hence both sums are the gradient of the mean over all ranks' tokens.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ep
from moe_lm.config import Config
from moe_lm.model import LanguageModel, next_token_loss
from moe_lm.progress import Progress
from moe_lm.text import Shard, split

WARM_UP = 20  # steps
HELD_OUT_BATCHES = 4  # of each rank
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7


@dataclasses.dataclass
class Run:
    """What a training run gives; the same on every rank."""

    losses: list[list[float]]  # [steps][ranks], nats per token
    load: list[list[list[int]]]  # [steps][layers][experts], routes
    seconds: float  # of all steps
    exchange_share: float  # of that time, in dispatch and combine; mean over ranks
    held_out_loss: float
    sample: list[int]  # tokens that rank 0 wrote


class TimedBuffer(ep.EPBuffer):
    """An `EPBuffer` that adds up the time spent in its operations, forward and backward."""

    seconds = 0.0

    def dispatch(self, *args, **options):
        """See `EPBuffer.dispatch`."""
        return self._timed(super().dispatch, args, options)

    def combine(self, *args, **options):
        """See `EPBuffer.combine`."""
        return self._timed(super().combine, args, options)

    def _timed(self, operation, args, options):
        start = time.perf_counter()
        try:
            return operation(*args, **options)
        finally:
            self.seconds += time.perf_counter() - start


@dataclasses.dataclass
class Job:
    """What all ranks are given."""

    config: Config
    tokens: torch.Tensor  # int64 [N], the whole text
    prompts: list[list[int]]  # tokens that each rank continues in the end


def run_ranks(job: Job) -> Run:
    """Trains in R processes on this machine.

    Raises torch.multiprocessing.ProcessRaisedException when a rank fails, with its traceback.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "run.json"
        torch.multiprocessing.spawn(run_rank, (store.port, job, result), job.config.ranks)
        return Run(**json.loads(result.read_text()))


def run_rank(rank: int, port: int, job: Job, result: pathlib.Path) -> None:
    """What each process does: finds the others at a port, trains; rank 0 writes the result."""
    config = job.config
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.ranks)
    try:
        with TimedBuffer(  # group=None: the default process group
            num_experts=config.experts,
            num_topk=config.topk,
            hidden=config.hidden,
            max_tokens_per_rank=config.tokens_per_rank,
        ) as buf:
            run = train(buf, job)
        if rank == 0:
            result.write_text(json.dumps(dataclasses.asdict(run)))
    finally:
        dist.destroy_process_group()


def train(buf: TimedBuffer, job: Job) -> Run:
    """Trains, evaluates and writes; collective."""
    config = job.config
    training_text, held_out = split(job.tokens)
    shard = Shard(training_text, buf.rank, config.ranks, config.seed)
    model = LanguageModel(buf, config)
    optimizer = make_optimizer(model)
    losses, load = [], []
    buf.seconds = 0.0
    start = time.perf_counter()
    with Progress(config, "training", shown=buf.rank == 0) as progress:
        for step in range(config.steps):
            inputs, targets = shard.next_batch(config.batch, config.context)
            loss = next_token_loss(model(inputs), targets)
            load.append([block.moe.tokens_per_expert for block in model.blocks])
            ((loss + model.balance()) / config.ranks).backward()
            sum_gradients(model)
            update(optimizer, config, step)
            losses.append(loss.item())
            seconds = time.perf_counter() - start
            progress.show(losses[-1], seconds, f"{buf.seconds / seconds:.0%} exchange")
    exchange_share = buf.seconds / seconds
    held_out_loss = evaluate(model, config, held_out)
    sample = write(model, config, job.prompts[buf.rank])
    by_rank = [None] * config.ranks
    dist.all_gather_object(by_rank, (losses, load, exchange_share, held_out_loss))
    losses, load, shares, held_out_losses = zip(*by_rank, strict=True)
    return Run(
        losses=[list(step) for step in zip(*losses, strict=True)],
        load=[_in_expert_order(step) for step in zip(*load, strict=True)],
        seconds=seconds,
        exchange_share=sum(shares) / config.ranks,
        held_out_loss=sum(held_out_losses) / config.ranks,
        sample=sample,
    )


def _in_expert_order(by_rank: tuple) -> list[list[int]]:
    """[layers][experts] of [ranks][layers][local experts]: rank 0 owns the first experts."""
    return [list(itertools.chain(*layer)) for layer in zip(*by_rank, strict=True)]


def make_optimizer(model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW over all that this rank holds; it works element by element, so it needs no peers."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True)


def update(optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    """One step at its learning rate (a linear warm-up, then half a cosine down to a tenth)."""
    decay = 0.55 + 0.45 * math.cos(math.pi * step / config.steps)
    for group in optimizer.param_groups:
        group["lr"] = config.lr * min(1.0, (step + 1) / WARM_UP) * decay
    optimizer.step()
    optimizer.zero_grad()


def sum_gradients(model: LanguageModel) -> None:
    """Replaces the gradients of the shared parameters by their sum over the ranks."""
    mine = flat_gradients(model)
    by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, mine)
    set_gradients(model, sum_in_rank_order(by_rank))


def flat_gradients(model: LanguageModel) -> torch.Tensor:
    """The gradients of the shared parameters, one after the other, in one vector."""
    return torch.cat([p.grad.flatten() for p in model.shared_parameters()])


def set_gradients(model: LanguageModel, flat: torch.Tensor) -> None:
    """The reverse of `flat_gradients`."""
    parameters = model.shared_parameters()
    for p, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(values.view_as(p))


def sum_in_rank_order(by_rank: list[torch.Tensor]) -> torch.Tensor:
    """((rank 0 + rank 1) + rank 2) + ...: sums of floats depend on their order."""
    total = by_rank[0].clone()
    for values in by_rank[1:]:
        total += values
    return total


@torch.no_grad()
def evaluate(model: LanguageModel, config: Config, held_out: torch.Tensor) -> float:
    """This rank's mean loss on its pieces of a text that nobody trained on; collective."""
    shard = Shard(held_out, dist.get_rank(), config.ranks, config.seed)
    losses = []
    for _ in range(HELD_OUT_BATCHES):
        inputs, targets = shard.next_batch(config.batch, config.context)
        losses.append(next_token_loss(model(inputs), targets).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def write(model: LanguageModel, config: Config, prompt: list[int]) -> list[int]:
    """Continues a prompt.  Collective: every rank writes a text of its own, a token at a time."""
    generator = torch.Generator().manual_seed(config.seed)
    text = list(prompt)
    for _ in range(SAMPLE_TOKENS):
        logits = model(torch.tensor([text[-config.context :]]))[0, -1]
        chances = (logits / TEMPERATURE).softmax(dim=0)
        text.append(int(chances.multinomial(1, generator=generator)))
    return text
