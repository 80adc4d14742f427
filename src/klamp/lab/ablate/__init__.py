"""Ablations: the same training in several variants (arms) and seeds, compared in a table and a picture."""
