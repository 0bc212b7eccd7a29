"""Files of runs that one opens to look at: figures."""
