"""`hone doctor`: is this machine right? Checks are rows of a table in `cli/doctor.py`."""
