"""The loop of every run that trains, the runs that it drives, and inference without training."""
