"""Learning from preferences: which of two completions is better, or whether one is good."""
