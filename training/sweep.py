"""Searching settings, such as a decider's threshold or the shape of a tree, with every trial tracked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

    from arbordraft.training.tracking import MLflowTracker


def sweep(
    objective: Callable[[optuna.Trial], Mapping[str, float]],
    study_name: str,
    n_trials: int,
    tracker: MLflowTracker | None = None,
    *,
    maximise: str,
    seed: int = 0,
    storage: str | None = None,
) -> optuna.Study:
    """Run a study whose trials are runs below the tracker's own.

    Args:
        objective: measures what ``trial.suggest_*`` proposes, in any number of metrics.
        study_name: names the study, and with a number the trials.
        n_trials: how many to run now.
        tracker: gets the best trial's settings and metrics too; none tracks nothing.
        maximise: the metric that counts; higher is better.
        seed: of the sampler; the same seed proposes the same settings for the same measurements.
        storage: database URL, such as ``sqlite:///sweep.db``, with which a study goes on where it stopped; by default
            it lives in memory.

    Returns:
        The study; each trial's other metrics are its ``user_attrs``.

    Raises:
        ImportError: if optuna is not installed.
        KeyError: if the objective does not measure ``maximise``.
        Exception: whatever the objective raises; its run has failed then.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"optuna cannot be imported ({error}); run: pip install 'arbordraft[mlops]'") from error

    def run(trial: optuna.Trial) -> float:
        child = tracker.child(f"{study_name}-{trial.number}") if tracker is not None else None
        status = "failed"
        try:
            metrics = dict(objective(trial))
            if maximise not in metrics:
                raise KeyError(f"the objective returned {', '.join(metrics) or 'nothing'}, but not {maximise!r}")
            for name, value in metrics.items():
                trial.set_user_attr(name, float(value))
            if child is not None:
                child.log_metrics(metrics)
            status = "success"
            return float(metrics[maximise])
        except optuna.TrialPruned:
            status = "killed"
            raise
        finally:
            if child is not None:
                child.log_hyperparams(trial.params)
                child.finalize(status)

    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        load_if_exists=storage is not None,
        sampler=optuna.samplers.TPESampler(seed=seed),
        direction="maximize",
    )
    study.optimize(run, n_trials=n_trials)
    if tracker is not None:
        _summarise(study, tracker)
    return study


def _summarise(study: Any, tracker: MLflowTracker) -> None:
    from optuna.trial import TrialState

    if study.get_trials(states=[TrialState.COMPLETE]):
        best = study.best_trial
        tracker.log_hyperparams({"best": best.params, "best.trial": best.number})
        tracker.log_metrics({f"best/{name}": value for name, value in best.user_attrs.items()})
