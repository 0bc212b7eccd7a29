"""Tables of experiments: the paper's (`table1_standard.yaml`, ...) and ours, trained by `mheads reproduce`.

`suite.py` is what is asked, `expand.py` the same for one recipe, `jobs.py` and `planner.py` what must be trained,
`results.py` and `run_entries.py` what came out (a JSON file that everything else is made from), `findings.py` and
`verdicts.py` what follows from it, `tables.py`, `markdown.py` and `page.py` how that is shown. Read `suite.py` first,
then `reproduce.py`, which calls the others. `detectors.py` compares detectors with the paper's, `demo.py` is the
embedded example.
"""
