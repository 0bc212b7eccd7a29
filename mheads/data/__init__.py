"""Datasets, how they are fetched and cached, and which member learns from which example."""

from mheads.data.arrays import ArraySplit
from mheads.data.catalog import DATASETS, load
from mheads.data.clusters import confusable
from mheads.data.preprocessing import Preprocess
from mheads.data.python_data import as_source, from_arrays
from mheads.data.readers.cache import cache_dir
from mheads.data.readers.download import get
from mheads.data.resampling import deal, order, priors, stream, weighted
from mheads.data.sample_weights import check_answers, of_rows, read_answers, read_priors
from mheads.data.splits import Data, Split
from mheads.data.targets import POSED, posed, warn_of_flags
from mheads.data.value_range import Seen

__all__ = [
    "DATASETS",
    "POSED",
    "ArraySplit",
    "Data",
    "Preprocess",
    "Seen",
    "Split",
    "as_source",
    "cache_dir",
    "check_answers",
    "confusable",
    "deal",
    "from_arrays",
    "get",
    "load",
    "of_rows",
    "order",
    "posed",
    "priors",
    "read_answers",
    "read_priors",
    "stream",
    "warn_of_flags",
    "weighted",
]
