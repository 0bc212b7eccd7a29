"""Tables of experiments: the paper's and ours, each a YAML file, trained by `mheads reproduce`.

Read `suite.py` for what a table is and `reproduce.py` for how it is run. `results.py` is the JSON that every table,
figure and claim is made from.
"""
