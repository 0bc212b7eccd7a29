"""`mheads report`: pages of runs."""
