"""What of an image each member responds to, and how much."""

from mheads.report.saliency.guided import guided_backprop
from mheads.report.saliency.members import Energy, Saliency, choose, energy_of, explain, explain_files, maps_of

__all__ = ["Energy", "Saliency", "choose", "energy_of", "explain", "explain_files", "guided_backprop", "maps_of"]
