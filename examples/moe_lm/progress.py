"""What is shown while a run is going on."""

import sys

from tqdm import tqdm

from moe_lm.config import Config


class Progress:
    """A bar on a terminal, ten lines in a log, nothing on the ranks that are not shown."""

    def __init__(self, config: Config, what: str, shown: bool) -> None:
        self._config, self._what, self._shown = config, what, shown
        self._on_terminal = shown and sys.stdout.isatty()
        self._done = 0

    def __enter__(self) -> "Progress":
        self._bar = tqdm(
            total=self._config.steps,
            desc=f"  {self._what}",
            unit="step",
            file=sys.stdout,
            disable=not self._on_terminal,
        )
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def show(self, loss: float, seconds: float, more: str = "") -> None:
        """One more step is done; `seconds` since the first began."""
        self._done += 1
        steps = self._config.steps
        speed = self._done * self._config.tokens_per_rank * self._config.ranks / seconds
        text = f"loss {loss:.2f}, {speed:.0f} tokens/s" + (f", {more}" if more else "")
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        due = self._done * 10 // steps > (self._done - 1) * 10 // steps or self._done == 1
        if self._shown and not self._on_terminal and due:
            print(f"  {self._what} step {self._done} of {steps}: {text}", flush=True)
