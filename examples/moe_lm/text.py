"""The text: what every Python carries, cut into tokens and shared out among the ranks.

`pydoc_data.topics` holds the language reference that `help()` shows, about 460 KB of English.
Tokens are byte pairs: the 256 bytes, then the most frequent neighbours within a word, merged
again and again (byte pair encoding: Sennrich, Haddow, Birch, https://arxiv.org/abs/1508.07909).
"""

import collections
import itertools
import re

import torch

WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]+|\s+(?=\s)|\s| ?[^\sA-Za-z0-9]+")
HELD_OUT = 0.05  # the share of the text that nobody trains on

Pair = tuple[int, int]


def load_text() -> str:
    """Returns the topics' text, in alphabetical order of their names."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


class Vocabulary:
    """Byte pairs learnt from one text.  `pieces[id]` is the bytes of a token."""

    def __init__(self, text: str, size: int) -> None:
        """Learns `size` tokens, the 256 bytes among them (fewer if the text has no more pairs)."""
        self.pieces = [bytes([value]) for value in range(256)]
        self._ids: dict[str, list[int]] = {}  # word -> its tokens
        counts = collections.Counter(WORD.findall(text))
        self._ids = {word: list(word.encode()) for word in counts}
        self._merges: list[Pair] = []
        self._learn(counts, size)

    def _learn(self, counts: collections.Counter, size: int) -> None:
        pairs: collections.Counter = collections.Counter()  # pair -> how often
        words_with = collections.defaultdict(set)  # pair -> words that have or had it
        for word, ids in self._ids.items():
            for pair in itertools.pairwise(ids):
                pairs[pair] += counts[word]
                words_with[pair].add(word)
        while len(self.pieces) < size and pairs:
            best = max(zip(pairs.values(), pairs, strict=True))[1]
            new_id = len(self.pieces)
            self.pieces.append(self.pieces[best[0]] + self.pieces[best[1]])
            self._merges.append(best)
            for word in words_with.pop(best):
                ids = self._ids[word]
                for pair in itertools.pairwise(ids):
                    pairs[pair] -= counts[word]
                ids = self._ids[word] = merge(ids, best, new_id)
                for pair in itertools.pairwise(ids):
                    pairs[pair] += counts[word]
                    words_with[pair].add(word)
            del pairs[best]

    def encode(self, text: str) -> torch.Tensor:
        """Returns the text's tokens, int64 [N]."""
        return torch.tensor([i for word in WORD.findall(text) for i in self._word(word)])

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens; a character that was cut in two becomes U+FFFD."""
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def _word(self, word: str) -> list[int]:
        if word not in self._ids:
            ids = list(word.encode())
            for number, pair in enumerate(self._merges):
                ids = merge(ids, pair, 256 + number)
            self._ids[word] = ids
        return self._ids[word]


def merge(ids: list[int], pair: Pair, new_id: int) -> list[int]:
    """Replaces each occurrence of `pair` in `ids`, from the left, by `new_id`."""
    merged = []
    at = 0
    while at < len(ids):
        if tuple(ids[at : at + 2]) == pair:
            merged.append(new_id)
            at += 2
        else:
            merged.append(ids[at])
            at += 1
    return merged


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens to train on, and the last few, which nobody trains on."""
    cut = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


def longest_context(tokens: torch.Tensor, ranks: int) -> int:
    """The longest piece, in tokens, that every rank's shard of both parts holds."""
    return len(split(tokens)[1]) // ranks - 1


class Shard:
    """A rank's own part of the text: the `rank`-th of `ranks` equal pieces."""

    def __init__(self, tokens: torch.Tensor, rank: int, ranks: int, seed: int) -> None:
        size = len(tokens) // ranks
        self.tokens = tokens[rank * size : (rank + 1) * size]
        self._random = torch.Generator().manual_seed(seed * ranks + rank)

    def next_batch(self, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns inputs and targets (the inputs one token on), int64 [batch, context] each.

        Raises ValueError if the shard is shorter than one piece.
        """
        last = len(self.tokens) - context - 1
        if last < 0:
            raise ValueError(f"{len(self.tokens)} tokens a rank are too few for {context}")
        starts = torch.randint(last + 1, (batch, 1), generator=self._random)
        pieces = self.tokens[starts + torch.arange(context + 1)]
        return pieces[:, :-1], pieces[:, 1:]
