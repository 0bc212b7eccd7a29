"""`mheads report`: one HTML file of a run or of several, which needs no server and loads nothing."""
