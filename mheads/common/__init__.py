"""What every room uses: errors, seeds, files, text and the terminal. Nothing here knows of networks or training.

Read `errors.py` first: a `UserError` is a mistake that the user can fix, and is shown without a traceback.
"""
