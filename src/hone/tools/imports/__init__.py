"""Recipes from the scripts and settings of other frameworks: `hone import`.

shell, flags, hydra, YAML, Python ──► Source: settings as given, and where
aliases.yaml, transforms.py       ──► Imported: values of ours, and what became of each setting
write.py                          ──► a recipe with comments that say where each value is from
"""
