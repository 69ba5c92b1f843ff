"""Recipes from the scripts and settings of other frameworks: `hone import`.

shell, flags, hydra, YAML, Python ──► Source: settings as given, and where
aliases.yaml, transforms.py       ──► Imported: values of ours, and what became of each setting
taken_out.py                      ──► a file of the functions of a script that a run must not import
write.py                          ──► a recipe with comments that say where each value is from
"""
