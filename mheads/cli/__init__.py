"""The command line: parse, call, print. Torch is imported only by the commands that need it."""
