"""What a model gives the tokens of a prompt: of each token after the first, the log-probability that the model gives
it after those before it. Computed for a chunk of the prompt at a time, so that no engine holds the logits of all."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy
import numpy.typing

SCORED_BYTES: Final = 256 << 20
"""The most that a chunk's logits may take in float32."""


class ChunkScores(NamedTuple):
    """Of so many tokens in a row. logprobs, ranks: [tokens]; rank 1 is the likeliest token. top, top_logprobs: [tokens,
    alternatives], the ids of the likeliest first."""

    logprobs: numpy.typing.NDArray[numpy.float32]
    ranks: numpy.typing.NDArray[numpy.int32]
    top: numpy.typing.NDArray[numpy.int32]
    top_logprobs: numpy.typing.NDArray[numpy.float32]

    def part(self, first: int, end: int) -> ChunkScores:
        """Those of tokens [first, end) of the chunk."""
        rows = slice(first, end)
        return ChunkScores(self.logprobs[rows], self.ranks[rows], self.top[rows], self.top_logprobs[rows])


def scored_chunk(chunk_tokens: int, vocab_size: int) -> int:
    """The most tokens that are scored together. chunk_tokens: the most that are computed together."""
    return max(1, min(chunk_tokens, SCORED_BYTES // (4 * vocab_size)))
