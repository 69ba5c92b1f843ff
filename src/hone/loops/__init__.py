"""The loops. Each is a sentence over the same verbs; every choice is made before it starts."""
