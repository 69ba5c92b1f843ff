"""Training: packed rows to gradients, gradients to weights."""
