"""Pictures of runs: figures, the HTML page, videos, and what members respond to in images.

`charts/` describes charts as plain data; `figures/` draws them with matplotlib, `page/` on the page of `mheads report`.
Read `plot.py` first: its table `FIGURES` is what `mheads plot` knows. `saliency/` is guided backprop.
"""
