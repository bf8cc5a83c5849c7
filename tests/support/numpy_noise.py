"""The shared noise in numpy, for programs that are not written in torch.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arbordraft.kernels.gumbel.reference import counters_for, gumbel_of, words_of


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocabulary: int) -> npt.NDArray[np.float64]:
    """Returns ``[R, V]`` noise with the bits of :func:`arbordraft.kernels.gumbel.gumbel`.

    Args:
        seeds: R seeds, 0 to 2**64 - 1.
        positions: R positions, 0 to 2**32 - 1.
        vocabulary: V.

    Examples:
        >>> gumbel([7], [100], 3).round(6).tolist()
        [[-0.411244, 4.526934, 1.341845]]
    """
    keys, places = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    counters = np.arange(counters_for(vocabulary), dtype=np.uint64)
    upper, lower = (words[:, :vocabulary].astype(np.float64) for words in words_of(keys, places, counters, np))
    return gumbel_of(upper, lower, np)
