"""What metrics are called in tables and on pages, and how their values are written."""

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


def label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " "))


def number(value: float, metric: str, percent: bool = True) -> str:
    if any(name in metric for name in ("loss", "nll", "brier", "temperature", "evenness")):
        return f"{value:.3f}"
    return f"{value:.2f}" if percent or abs(value) >= 1000 else f"{value:.4g}"
