"""What metrics are called in tables and on pages, how their values are written, and which of them are better."""

from __future__ import annotations

LABELS = {
    "members": "members",
    "single": "mean member",
    "ensemble_mean": "Ensemble-Mean",
    "ensemble_mean_scores": "mean of scores",
    "ensemble_scored": "Ensemble-Scored",
    "oracle": "Oracle",
    "top_m": "top-M",
    "min_ade": "minADE",
    "min_fde": "minFDE",
    "nll": "NLL",
    "nll_voronoi": "NLL, Voronoi",
    "dee": "DEE",
    "dee_scaled": "DEE, scaled",
    "nll_scaled_ensemble_mean": "NLL, scaled",
    "calibration_error_scaled_ensemble_mean": "ECE, scaled",
    "accuracy_shifted_ensemble_mean": "accuracy, shifted",
    "auroc_ensemble_mean": "AUROC",
    "on_proposals": "boxes as proposed",
    "train_loss": "training loss",
    "member_train_loss": "training loss of a member",
}

# By what the name of a metric begins with: `nll` is also for `nll_scaled_ensemble_mean`.
FORMS = {
    **dict.fromkeys(("train_loss", "member_train_loss", "nll", "brier", "temperature", "evenness"), ".3f"),
    **dict.fromkeys(("parameters", "iterations", "peak_memory"), ",.0f"),
    "seconds": ".1f",
}
# What is better whatever the problem; the others follow it.
LOWER = (
    *("train_loss", "member_train_loss", "nll", "calibration_error", "brier", "temperature", "fpr95", "mae"),
    *("seconds", "peak_memory", "parameters", "iterations"),
)
HIGHER = ("dee", "auroc", "evenness", "learning_entropy", "r2", "disagreement", "spread_correlation")
LARGE = 1e6  # from which on decimals say nothing


def begins_with(metric: str, name: str) -> bool:
    return metric == name or metric.startswith(f"{name}_")


def label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " "))


def format_metric(value: float, metric: str, percent: bool = True) -> str:
    """The value of a metric; one that FORMS does not know has two decimals in percent, and else four digits."""
    for name, form in FORMS.items():
        if begins_with(metric, name):
            return format(value, form if form == ",.0f" or abs(value) < LARGE else ".4g")
    return f"{value:.2f}" if (percent or abs(value) >= 1000) and abs(value) < LARGE else f"{value:.4g}"
