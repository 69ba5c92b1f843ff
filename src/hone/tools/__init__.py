"""What tells about runs: plans, reports, measurements, checks of a machine, import of recipes."""
