"""The door: an HTTP server in front of a runner, for programs that call a model by themselves."""
