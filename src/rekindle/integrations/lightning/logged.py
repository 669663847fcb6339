"""Captures what has been logged in the epoch so far, which Lightning's own checkpoints lack, and sets it again.

These are the sums behind the means that an epoch ends with, the newest values that loggers and callbacks are given,
and the states of torchmetrics' metrics.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

__all__ = ["capture_logged", "set_logged"]

_NEWEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")
_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_VALUES = ("value", "cumulated_batch_size")
_COUNTED = ("has_reset", "_update_count", "_computed", "_forward_cache")


def capture_logged(trainer: Any) -> dict[str, Any]:
    """Returns what has been logged, as nested values and live tensors."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    return {
        "newest": {name: dict(getattr(connector, name)) for name in _NEWEST},
        "place": {name: getattr(connector, name) for name in _PLACE},
        "results": {key: _capture_result(result) for key, result in results.items() if result.meta.sync.group is None},
        "metrics": {name: _capture_metric(metric) for name, metric in _metrics(trainer) if metric._update_count},
    }


def set_logged(trainer: Any, state: dict[str, Any]) -> None:
    """Sets what ``capture_logged`` has returned."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    for name, value in [*state["newest"].items(), *state["place"].items()]:
        setattr(connector, name, value)
    for name, metric in _metrics(trainer):
        if name in state["metrics"]:
            _set_metric(metric, state["metrics"][name])
    for key, saved in state["results"].items():
        results[key] = _make_result(trainer, results, saved)
    results.log = partial(_log, results, results.log, set(state["results"]))


def _capture_result(result: Any) -> dict[str, Any]:
    meta, reduce = result.meta, result.meta.reduce_fx
    found = {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": (reduce.__module__ == "builtins", reduce.__name__),
        "sync": (meta.sync.should, meta.sync.rank_zero_only),
        "counted": {name: getattr(result, name) for name in _COUNTED},
        "values": None,
    }
    if result.is_tensor:
        found["values"] = {name: getattr(result, name) for name in _VALUES if hasattr(result, name)}
    return found


def _make_result(trainer: Any, results: Any, saved: dict[str, Any]) -> Any:
    """Returns one of Lightning's own, which is equal to what ``self.log()`` makes of the same arguments."""
    kinds = sys.modules[type(results).__module__]
    plain, reduce = saved["reduce"]
    meta = kinds._Metadata(**saved["meta"], reduce_fx=sum if plain else getattr(torch, reduce))
    should, rank_zero_only = saved["sync"]
    meta.sync = kinds._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    values = saved["values"]
    result = kinds._ResultMetric(meta, values is not None)
    for name, value in [*(values or {}).items(), *saved["counted"].items()]:
        setattr(result, name, value)
    if values is None:
        result.value = operator.attrgetter(meta.metric_attribute)(trainer.lightning_module)
    return result


def _log(
    results: Any, original: Callable[..., None], restored: set[str], fx: str, name: str, *args: Any, **options: Any
) -> None:
    """Logs a value, and lets go of a restored one that the script now logs in another way."""
    try:
        original(fx, name, *args, **options)
    except Exception:
        theirs = {key for key in restored if key == f"{fx}.{name}" or key.startswith(f"{fx}.{name}.")}
        if not theirs:
            raise
        for key in theirs:
            restored.discard(key)
            results.pop(key, None)
        original(fx, name, *args, **options)


# -- torchmetrics ---------------------------------------------------------------------------------------------------


def _metrics(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the metrics that are parts of the module, by their names."""
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if kind is None:
        return
    yield from ((name, part) for name, part in trainer.lightning_module.named_modules() if isinstance(part, kind))


def _capture_metric(metric: Any) -> dict[str, Any]:
    counted = {name: getattr(metric, name) for name in _COUNTED if name != "has_reset"}
    return {"states": {name: getattr(metric, name) for name in metric._defaults}, "counted": counted}


def _set_metric(metric: Any, saved: dict[str, Any]) -> None:
    for name, value in [*saved["states"].items(), *saved["counted"].items()]:
        setattr(metric, name, value)
