"""An experiment as plain data: keys, types, limits and descriptions, read from YAML and checked key by key.

`schema.py` has the keys, `read.py` reads them, `aliases.py` accepts other names of a key, `unknown_keys.py` knows what
other libraries call them, `recipes/` are configs that come with mheads. What a config means is not here:
`training/build_from_config.py` turns it into networks, losses and data.
"""
