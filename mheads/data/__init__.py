"""Datasets, how they are fetched and cached, and which member learns from which example.

Read `splits.py` first: it says what a dataset is for the rest of the package. `catalog.py` lists the datasets by name,
`readers/` reads them, `python_data.py` takes those of Python, and `assembly.py` makes `Data` of either. `batches.py`
has what a training step works on, `resampling.py` the sample weights.
"""

from mheads.data.arrays import ArraySplit
from mheads.data.catalog import DATASETS, load, names_examples
from mheads.data.clusters import confusable
from mheads.data.preprocessing import Preprocess
from mheads.data.python_data import as_source, from_arrays
from mheads.data.readers.cache import cache_dir
from mheads.data.readers.download import get
from mheads.data.resampling import deal, multiply_weights, order, stream
from mheads.data.sample_weights import check_answers, read_answers, read_sample_weights, select_training_rows
from mheads.data.splits import Data, Split
from mheads.data.targets import TARGET_KINDS, pose_targets, warn_of_flags, warn_of_shares
from mheads.data.value_range import ValueRange

__all__ = [
    "DATASETS",
    "TARGET_KINDS",
    "ArraySplit",
    "Data",
    "Preprocess",
    "Split",
    "ValueRange",
    "as_source",
    "cache_dir",
    "check_answers",
    "confusable",
    "deal",
    "from_arrays",
    "get",
    "load",
    "multiply_weights",
    "names_examples",
    "order",
    "pose_targets",
    "read_answers",
    "read_sample_weights",
    "select_training_rows",
    "stream",
    "warn_of_flags",
    "warn_of_shares",
]
