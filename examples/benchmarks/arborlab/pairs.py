"""Times two calls in turns."""

import statistics
from collections.abc import Callable
from timeit import timeit

from arbordraft.bench.measure import Measurement
from arbordraft.bench.workload import ProgressCallback, Workload, quiet


def paired(
    group: str,
    case: str,
    ours: Callable[[], object],
    reference: Callable[[], object],
    workload: Workload,
    on_progress: ProgressCallback = quiet,
    *,
    reach: str = "",
    speed_up: bool = False,
    calls: tuple[int, int] = (1, 1),
) -> Measurement:
    """Times two calls in turns, after a warm-up call of each, so that a drifting machine slows both alike.

    Args:
        group: see :class:`~arbordraft.bench.measure.Measurement`.
        case: see there; ``on_progress`` receives it, too.
        ours: the measured call.
        reference: the call that ``ours`` is compared with.
        workload: sets the number of rounds, ``repeats``.
        on_progress: receives the case and the number of finished rounds.
        reach: bound of the ratio; empty for none.
        speed_up: whether the ratio is ``reference / ours``.
        calls: calls per timing of ``ours`` and of ``reference``, more than one if a call is too short.
    """
    ours()
    reference()
    pairs = []
    for done in range(workload.repeats):
        on_progress(case, done, workload.repeats)
        runs = zip((ours, reference), calls, strict=True)
        pairs.append([timeit(run, number=number) * 1e3 / number for run, number in runs])
    own, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    return Measurement(group, case, own, other, 1 / ratio if speed_up else ratio, reach)
