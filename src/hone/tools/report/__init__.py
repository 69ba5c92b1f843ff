"""`report.html`: one offline page about a run, or about several for comparison."""
