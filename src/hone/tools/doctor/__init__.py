"""`hone doctor`: checks of this machine, which are rows of a table in `cli/doctor.py`."""
