"""Environments played and checked by a person, without a model and a trainer: `hone env`."""
