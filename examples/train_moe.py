"""Trains a small mixture-of-experts language model with expert parallelism, on CPUs.

    python examples/train_moe.py                    # four ranks, fp32 between them
    python examples/train_moe.py --exchange fp8     # tokens travel as fp8
    python examples/train_moe.py --check            # and once more in one process: same losses?

Each rank is a process.  It trains on its own part of the text and owns its share of every layer's
experts; `ep` takes the tokens to their experts and back, forward and backward.  The text is the
language reference that every Python carries.  examples/moe_lm/__init__.py says which file holds
what.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
import textwrap

from moe_lm import report
from moe_lm.config import Config
from moe_lm.model import EXCHANGES
from moe_lm.replay import replay
from moe_lm.text import Vocabulary, load_text, longest_context
from moe_lm.train import Job, Run, run_ranks

OUT = pathlib.Path(__file__).parent.parent / "build" / "train_moe"
PROMPTS = ["The value of", "If the object", "In this case", "A function is"]
HELP = {
    "ranks": "processes",
    "steps": "updates of the parameters",
    "exchange": "what travels between the ranks; fp8: on the way to the experts, bf16 back",
    "layers": "layers, each of attention and experts",
    "experts": "experts of each layer, spread over the ranks",
    "topk": "experts of each token",
    "hidden": "size of a token's vector",
    "ffn_hidden": "inner size of an expert",
    "heads": "heads of the attention",
    "context": "tokens of a piece of text",
    "batch": "pieces of text that a rank trains on in a step",
    "vocab": "kinds of tokens",
    "lr": "highest learning rate",
    "seed": "of the parameters and of the choice of text",
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=field.type,
            default=field.default,
            choices=list(EXCHANGES) if field.name == "exchange" else None,
            help=HELP[field.name],
        )
    parser.add_argument(
        "--check",
        action="store_true",
        help="train once more, in one process without ep, and compare the losses: equal to the bit "
        "with fp32, else to 1 %%; exit status 1 if they are not",
    )
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder for what is written")
    options = parser.parse_args(arguments)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Config)}
    try:
        options.config = Config(**values)
    except ValueError as error:
        parser.error(str(error))
    return options


def introduce(config: Config, text: str, num_tokens: int) -> None:
    """Says what is going to happen."""
    print("A small mixture-of-experts language model learns to write like Python's manual.")
    print(f"  text      {len(text) / 1e3:.0f} kB of pydoc_data.topics, {num_tokens} tokens")
    print(
        f"  model     {config.layers} layers, hidden {config.hidden}, {config.experts} experts a "
        f"layer, {config.topk} for each token"
    )
    print(
        f"  ranks     {config.ranks} processes on this machine; experts are spread over them, "
        f"tokens travel as {config.exchange}"
    )
    print(
        f"  training  {config.steps} steps of {config.ranks} x {config.tokens_per_rank} tokens",
        flush=True,
    )


def conclude(config: Config, run: Run, sample: str, check: report.Check | None) -> None:
    """Says what came out."""
    means = report.step_means(run.losses)
    print("Results")
    print(
        f"  loss      {means[0]:.2f} at first, {means[-1]:.2f} at last, {run.held_out_loss:.2f} on "
        f"text that was held out (nats per token)"
    )
    print(
        f"  speed     {report.tokens_per_s(config, run):.0f} tokens/s; {run.exchange_share:.0%} of "
        f"the time in dispatch and combine, waiting for other ranks included"
    )
    print("  sample    written by rank 0")
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in sample)
    print(textwrap.indent(printable, "            | ", lambda line: True))
    if check is not None:
        verdict = "passed" if check.passed else "FAILED"
        print(f"  check     {verdict}: against one process without ep, {check}")


def main(arguments: list[str]) -> int:
    """Runs the program; returns its exit status."""
    options = parse_arguments(arguments)
    config = options.config
    text = load_text()
    vocabulary = Vocabulary(text, config.vocab)
    tokens = vocabulary.encode(text)
    longest = longest_context(tokens, config.ranks)
    if config.context > longest:
        print(f"error: context may be {longest} at most, not {config.context}", file=sys.stderr)
        return 2
    introduce(config, text, len(tokens))
    prompts = itertools.islice(itertools.cycle(PROMPTS), config.ranks)
    run = run_ranks(Job(config, tokens, [vocabulary.encode(each).tolist() for each in prompts]))
    sample = vocabulary.decode(run.sample)
    replayed = check = None
    if options.check:
        replayed = replay(config, tokens)
        check = report.compare(run.losses, replayed, config.exchange)
    options.out.mkdir(parents=True, exist_ok=True)
    picture, figures = options.out / "loss.png", options.out / "report.json"
    report.draw(picture, config, run, replayed)
    report.write_json(figures, config, run, sample, check)
    conclude(config, run, sample, check)
    print(f"  written   {picture} (loss and expert load), {figures}")
    return 0 if check is None or check.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
