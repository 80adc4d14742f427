"""Ablations: the same training in several variants (arms) and seeds, compared in a table and a picture.

plan      what to run: pure data, validated before anything starts
execute   all of it, in order: the folder, what is done already, the base model, the table and the picture
executor  runs it: `local` (processes on this machine) or `cluster` (Ray)
one_run   one run: train, then `measure` against the model that training started from
outcome   the result of a run, as a file and as columns of the table
"""
