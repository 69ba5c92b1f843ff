"""`hone bench engine`: the speed of an engine on a workload, against the hardware and its peers."""
