"""The processes of a run, and how they find each other."""
