"""The command line.

`main.py` lists the commands and turns errors, signals and closed pipes into exit codes: read it first. The command
`mheads NAME` is in `NAME_command.py`; options that several commands take are in `shared.py`. What commands print, as
tables, trees and plans, is in `printing/`. What commands do is in the other rooms: a command parses, calls and prints.
"""
