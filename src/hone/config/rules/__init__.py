"""The language of rules, and the rules on sections that belong to no part of a run.

The rules on a part lie in its folder; `hone.rules` gathers all of them.
"""
