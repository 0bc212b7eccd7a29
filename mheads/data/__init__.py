"""Datasets, how they are fetched and cached, and which member learns from which example."""

from mheads.data.arrays import ArraySplit
from mheads.data.cache import cache_dir
from mheads.data.catalog import DATASETS, load
from mheads.data.clusters import confusable
from mheads.data.fetch import get
from mheads.data.given import check_answers, of_rows, read_answers, read_priors
from mheads.data.preprocess import Preprocess
from mheads.data.sampling import deal, order, priors, stream, weighted
from mheads.data.seen import Seen
from mheads.data.sources import as_source, from_arrays
from mheads.data.split import Data, Split
from mheads.data.targets import POSED, posed, warn_of_flags

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
