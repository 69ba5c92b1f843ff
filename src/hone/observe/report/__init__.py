"""`report.html`: one page about a run, or about several side by side, that opens offline."""
