"""What is on disk: run folders, their files and checkpoints. Opening a run folder runs no code.

Read `folder.py` first. `run_files.py` reads each file where its checksum and its schema hold, `checkpoint.py` writes
checkpoints that are whole or absent, `check_resume.py` decides whether a run may be resumed, `read_run.py` shows a run
without building its network.
"""
